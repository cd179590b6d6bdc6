"""Calibration: each head's loss at b slots, measured by running the policy with b slots.

One pass of the full model over a text gives each layer's queries, keys and values. With them every
KV head is tried with every b of the grid and both orders of the remainder, token by token, by
decode steps (`calibration/trials.py`). The loss is

    E ||W_o (o - o_b)||^2 / ||residual after attention||^2

with o the head's full attention output and o_b the output of the b slots that the policy keeps,
with their remainder. Curves of another policy mislead: shares by a window's curves cost twice as
much as shares by the policy's own. The same pass measures the loss by packing alone for each head.
A second pass, over a mixed text, makes the key scaling (`Frame`) for packed keys
(`calibration/scaling_build.py`); a third, in which stretches of the text are repeated, measures
which heads must hold tokens that prose does not ask for (`calibration/retrieval_loss.py`). Passes
back through the model measure how much its predictions feel each head's error
(`calibration/sensitivity.py`); every loss is multiplied by that, so that a profile is in nats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o._progress import Progress
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.cost import group_size_of
from mlx_h2o.budgets.profile import SMALLEST_BUDGET, LayerFrames, Measured, Profile, frames_for
from mlx_h2o.budgets.settings import DEFAULT_POLICY
from mlx_h2o.calibration.checkpoint import CalibratedLayers, LayerLosses
from mlx_h2o.calibration.retrieval_loss import PAGES, retrieval_losses
from mlx_h2o.calibration.row_format import RowFormat
from mlx_h2o.calibration.scaling_build import frame_passes, frame_tokens, frames_of_text
from mlx_h2o.calibration.sensitivity import WINDOWS, sensitivities
from mlx_h2o.calibration.trials import ORDERS, Rows, tried
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.layer_probe import identity_by_kinds
from mlx_h2o.hosts.recorder import (
    HeadWeights,
    LookingCache,
    Watcher,
    full_attention,
    looked_through,
    profiled_kinds,
    require_weighable,
    trained_context,
    windows_of,
)
from mlx_h2o.policies import Policy, make_policy
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import DEFAULT_GROUP_SIZE

#: Slots tried per head, as far as the text is long. Steps are two thirds where most slots are
#: bought; 768 slots take as long as all up to 192, and add hardly any information.
GRID = (SMALLEST_BUDGET, 24, 48, 64, 96, 128, 192, 256, 384, 512)
#: Tokens of one pass, and of the text that `calibrated` reads. Passes of 2,048, more of them and
#: fourteen sizes took five times as long and bought nothing (docs/results/experiments.md).
LENGTH = 1024
# Errors are kept apart by position, in spans that double from here.
FIRST_SPAN = 256
#: Widths of rows whose loss from packing alone is measured.
PACKED_BITS = (4, 5, 6, 8)
#: Time of the passes for key scaling, and for a window of the sensitivities or of the retrieval
#: loss, as parts of that of the trials, about.
FRAME_WORK, WINDOW_WORK = 0.2, 0.06
METHOD = "output error of the policy itself, token by token"
#: Where the model has gradients, so that its heads' sensitivities could be measured.
METHOD_IN_NATS = f"{METHOD}, in nats of the predictions"


@dataclass
class _Run:
    """The state shared by the looking caches of one calibration.

    Attributes:
        policy: The policy to calibrate.
        grid: Numbers of slots; the last is the text's length.
        spans: The ends of spans of positions.
        frames: Key scaling of each layer, or empty.
        checkpoint: Layers that are done.
        progress: Called after each block of tokens, with layers done as a fraction.
        group_size: Elements of packed rows that share a scale; None if their width has no groups.
    """

    policy: Policy
    grid: tuple[int, ...]
    spans: tuple[int, ...]
    frames: LayerFrames
    checkpoint: CalibratedLayers
    progress: Callable[[float], None]
    group_size: int | None
    watcher: Watcher = field(default_factory=Watcher)


class _Calibrating(LookingCache):
    """A looking cache that tries every setting of its layer's heads as the text passes."""

    knows_softcap = True

    def __init__(self, index: int, run: _Run):
        self.index, self.run = index, run

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        rows = Rows(call.q, keys, values, call.scale, call.sinks, call.softcap)
        mx.eval(call.q, keys, values)
        out = full_attention(call.q, keys, values, call.scale, call.sinks, call.softcap)
        if self.index not in self.run.checkpoint:
            weights = HeadWeights.of(self.run.watcher, out, keys.shape[1])
            mx.eval(weights.grams, weights.norm)
            errors = self._errors(rows, out, weights)
            losses = LayerLosses(errors, self._packing(rows, out, weights))
            self.run.checkpoint.add(self.index, losses)
        self.run.progress(self.index + 1)
        return out

    def _errors(self, rows: Rows, out: mx.array, weights: HeadWeights) -> np.ndarray:
        """`[H, orders, spans, grid]`: means over the spans' positions."""
        run, H = self.run, rows.keys.shape[1]
        slots = run.grid[:-1]  # slots for the whole text have no loss
        total = np.zeros((H, len(ORDERS), len(run.spans), len(run.grid)), np.float64)
        for start, outs in tried(rows, run.policy, slots, ORDERS, run.spans):
            n = outs.shape[3]
            error = weights.errors(out[:, None, :, start : start + n] - outs, start)
            error = error.reshape(H, len(slots), len(ORDERS), n)
            # Until its slots are full a head has no loss; differences are rounding.
            at = mx.arange(start, start + n)
            error = error * (at >= mx.array(slots)[:, None])[:, None]
            span = next(i for i, end in enumerate(run.spans) if start < end)
            sums = np.array(error.sum(axis=-1)).transpose(0, 2, 1)
            total[:, :, span, :-1] += sums
            run.progress(self.index + (start + n) / rows.length)
        starts = (0, *run.spans[:-1])
        sizes = np.array([e - s for s, e in zip(starts, run.spans, strict=True)])
        errors: np.ndarray = (total / sizes[:, None]).astype(np.float32)
        return errors

    def _packing(self, rows: Rows, out: mx.array, weights: HeadWeights) -> np.ndarray:
        """`[bits, H]`: the loss by packing all rows, with key scaling."""
        run = self.run
        if run.group_size is None or not run.frames:
            return np.zeros((0, rows.keys.shape[1]), np.float32)
        centre, scale = run.frames[self.index]
        frame = Frame(mx.array(centre), mx.array(scale))
        losses = []
        for bits in PACKED_BITS:
            form = RowFormat(bits, bits, run.group_size, frame=frame)
            keys, values = form.keys(rows.keys), form.values(rows.values)
            packed = full_attention(rows.q, keys, values, rows.scale, rows.sinks, rows.softcap)
            error = weights.errors((out - packed)[:, None], 0)
            losses.append(np.array(error.mean(axis=(1, 2))))
        return np.stack(losses)


def spans_of(length: int) -> tuple[int, ...]:
    """The ends of spans of positions: a text's length, its half, and so on."""
    spans = [length]
    while spans[0] // 2 >= FIRST_SPAN:
        spans.insert(0, spans[0] // 2)
    return tuple(spans)


def calibrate(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    length: int = LENGTH,
    policy: str | Policy = DEFAULT_POLICY,
    framing: Sequence[int] | None = None,
    details: dict[str, Any] | None = None,
    progress: Progress | None = None,
    checkpoint: CalibratedLayers | None = None,
) -> Profile:
    """Measure all heads of a model with the policy that will run.

    Args:
        model: An mlx-lm model.
        tokens: A text; a thousand tokens suffice.
        length: The most tokens of one pass. Never more than the model's trained context.
        policy: A policy or its name.
        framing: Some 2000 tokens of a varied text, like those that the model will see, for key
            scaling; by default the same text.
        details: Entries to note in the profile.
        progress: Called as the calibration goes on.
        checkpoint: Layers that an earlier run of the same calibration finished; new ones are added.

    Raises:
        ValueError: The text is too short, or the model's heads cannot be measured.
    """
    policy = make_policy(policy)
    kinds = profiled_kinds(model)
    require_weighable(model)
    settings: dict[str, Any] = {"name": policy.name, **asdict(policy)}
    passes = mx.concatenate(windows_of(tokens, min(length, trained_context(model))))
    T, measured_on = passes.shape[1], {"tokens": passes.size, "length": passes.shape[1]}
    frame_text = frame_passes(model, tokens if framing is None else framing)
    of_frames, of_windows, of_echoes, of_trials = _telling(progress, len(kinds))
    frames = frames_of_text(model, frame_text, progress=of_frames)
    identity = identity_by_kinds(model, kinds)
    at_hand = CalibratedLayers() if checkpoint is None else checkpoint
    felt = sensitivities(model, tokens, policy, progress=of_windows)
    echoes = retrieval_losses(model, tokens, felt is not None, of_echoes)
    run = _Run(
        policy,
        (*(b for b in GRID if policy.least_budget() <= b < T), T),
        spans_of(T),
        frames_for(frames, T),
        at_hand,
        of_trials,
        group_size_of([k.widths for k in kinds]),
    )
    same = {"model": asdict(identity), "grid": run.grid, "orders": ORDERS, "policy": settings}
    at_hand.begin(same | {"texts": [_digest(passes), _digest(frame_text)]})
    routing.install()
    looked_through(model, passes, run.watcher, lambda i: _Calibrating(i, run))
    measured = _measured(run, at_hand.all(len(kinds)), frames, settings, echoes, felt)
    return Profile.of(identity, run.grid, measured, _method(felt), measured_on | (details or {}))


def calibrated(
    model: nn.Module, tokenizer: Any, text: Path, progress: Progress, **options: Any
) -> Profile:
    """A profile by a text file, as `mlx_h2o calibrate` and a model's first use make it.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        text: The file; its first `LENGTH` tokens are read. Key scaling is made from bundled texts.
        progress: Called as the calibration goes on.
        options: Further arguments of `calibrate`.

    Raises:
        ValueError: As `calibrate`.
    """
    about = {
        "text": text.name,
        "date": date.today().isoformat(),
        "mlx-h2o": version("mlx-h2o"),
    }
    return calibrate(
        model,
        tokenizer.encode(text.read_text(encoding="utf-8"))[:LENGTH],
        framing=frame_tokens(tokenizer),
        details=about,
        progress=progress,
        **options,
    )


def _telling(progress: Progress | None, layers: int) -> tuple[Callable[[float], None], ...]:
    """Functions that report the progress of key scaling, sensitivities, retrieval loss and trials.

    Args:
        progress: Called with the steps done and the steps in all.
        layers: How many layers are measured.

    Returns:
        One function for each of them. Those of key scaling and trials are called with the layers
        done, the others with the part done, from 0 to 1.
    """
    frames, windows = FRAME_WORK * layers, WINDOW_WORK * WINDOWS * layers
    echoes = WINDOW_WORK * PAGES * layers
    whole = frames + windows + echoes + layers

    def after(start: float, work: float) -> Callable[[float], None]:
        def tell(done: float) -> None:
            if progress:
                progress(round(100 * (start + work * done)), round(100 * whole))

        return tell

    return (
        after(0, FRAME_WORK),
        after(frames, windows),
        after(frames + windows, echoes),
        after(frames + windows + echoes, 1),
    )


def _method(felt: np.ndarray | None) -> str:
    """The name of the method, with or without sensitivities."""
    return METHOD if felt is None else METHOD_IN_NATS


def _measured(
    run: _Run,
    layers: Sequence[LayerLosses],
    frames: dict[int, LayerFrames],
    policy: dict[str, Any],
    echoes: np.ndarray,
    felt: np.ndarray | None,
) -> Measured:
    """All layers' losses together, with the other measurements and the policy's settings.

    They are in nats where the heads' sensitivities `felt` are known.
    """
    packing = np.concatenate([layer.packing for layer in layers], axis=1)
    measured = Measured(
        ORDERS,
        run.spans,
        np.concatenate([layer.errors for layer in layers]),
        dict(zip(PACKED_BITS, packing, strict=False)),
        run.group_size or DEFAULT_GROUP_SIZE,
        frames,
        policy,
        echoes,
    )
    return measured if felt is None else measured.weighed(felt)


def _digest(tokens: mx.array) -> str:
    return hashlib.sha256(np.array(tokens).tobytes()).hexdigest()
