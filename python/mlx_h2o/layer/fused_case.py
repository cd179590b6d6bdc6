"""A fused step of the default device on a small case, compared with the definition.

The case is a short conversation: a prompt, read by the definition, then single tokens, by the
kernels in one layer and by the definition in another. One head is full from the start and the other
fills on the way, so that every kind of launch occurs: a row into an unused slot, a row over a
victim, attention with and without a remainder.

The definition computes in float32, from the same rounded rows: for dense rows of 16 bits it would
otherwise use MLX's attention, which rounds logits. It reads packed rows in float32 anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.attention.backends.self_check import (
    EXACT,
    MASS,
    OUT,
    Error,
    Pair,
    Tolerance,
    worst,
)
from mlx_h2o.attention.backends.self_check_variants import FusedVariant
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.layer.layer import Layer
from mlx_h2o.layer.layer_factory import open_layer
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.remainder import SATURATION

# Slots of the two heads: fewer than a simdgroup's step, and a threadgroup's step plus some.
FEW, MANY = 48, 555
# Unused slots of the larger head when the single tokens begin.
UNUSED = 4
STEPS = 10
# Two sequences, so that the second one is read with a stride.
BATCH, HEADS = 2, 2
SHARPNESS = 2.0
# For sums of evicted rows, over some hundred of them.
STATISTICS = Tolerance(1e-4, 2e-3)


#: `layer.step.update_and_attend`, which builds on this file.
Step = Callable[[Layer, AttentionCall, mx.array, mx.array], mx.array]


def check(variant: FusedVariant, like: CacheSettings, step: Step) -> Error:
    """Compare the default device's fused steps with the definition's.

    Args:
        variant: The variant of the steps.
        like: Settings of a layer with such steps: its policy and how its rows are stored.
        step: The function that stores rows in a layer and attends (`update_and_attend`).
    """
    settings = small_settings(variant, like)
    assert settings.budgets is not None
    tokens = max(settings.budgets) - UNUSED
    with only_reference():
        q, k, v, sinks = rows(variant, tokens + STEPS)
        prompt = AttentionCall(q[:, :, :tokens], variant.widths[0] ** -0.5, "causal", sinks)
        ours = _after_prompt(step, settings, prompt, k, v)
        exact = [x if settings.packing.packs else x.astype(mx.float32) for x in (q, k, v)]
        in_exact = prompt.with_queries(exact[0][:, :, :tokens])
        theirs = _after_prompt(step, settings, in_exact, *exact[1:])
        expected = _decoded(step, theirs, in_exact, tuple(exact), tokens)
    outputs = _decoded(step, ours, prompt, (q, k, v), tokens)
    return worst(_pairs(variant, theirs, ours, expected, outputs))


def small_settings(variant: FusedVariant, like: CacheSettings) -> CacheSettings:
    """Settings of a small layer whose steps compile the same kernels as those of a large one."""
    least = like.policy.least_budget()
    few, many = max(FEW, least + UNUSED), max(MANY, least + 2 * UNUSED)
    heads = variant.heads or HEADS
    budgets = (many,) * heads if variant.heads else (few, many)
    frame = None
    if like.frame is not None:
        rng, shape = np.random.default_rng(3), (heads, variant.widths[0])
        centre = np.zeros(shape) if variant.sinks else rng.standard_normal(shape)
        frame = Frame(mx.array(centre), mx.array(np.exp(0.5 * rng.standard_normal(shape))))
    return replace(
        like,
        max_size=None,
        max_bytes=None,
        budgets=budgets,
        undo=0,
        saturation=SATURATION,
        frame=frame,
        filling=(),
        ranks=1,
        pins=(),
    )


def rows(
    variant: FusedVariant, tokens: int
) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """q, k, v of so many tokens `[2, heads, tokens, width]`, and sinks; always the same."""
    rng, (D, Dv), H = np.random.default_rng(7), variant.widths, variant.heads or HEADS

    def normal(heads: int, width: int) -> mx.array:
        return mx.array(rng.standard_normal((BATCH, heads, tokens, width), np.float32))

    # Keys lie off the origin, so that the remainder matters.
    numbers = SHARPNESS * normal(H * variant.group, D), normal(H, D) + 0.5, normal(H, Dv)
    q, k, v = (x.astype(variant.dtype) for x in numbers)
    sinks = mx.array(rng.standard_normal(H * variant.group, np.float32)).astype(variant.dtype)
    return q, k, v, sinks if variant.sinks else None


def _after_prompt(
    step: Step, settings: CacheSettings, prompt: AttentionCall, k: mx.array, v: mx.array
) -> Layer:
    """A layer that the definition has read the prompt into."""
    layer, _ = open_layer(settings, k[:, :, :1], v[:, :, :1])
    read = prompt.q.shape[2]
    step(layer, prompt, k[:, :, :read], v[:, :, :read])
    mx.eval(list(layer.arrays().values()))
    return layer


def _decoded(
    step: Step, layer: Layer, prompt: AttentionCall, of: tuple[mx.array, ...], first: int
) -> list[mx.array]:
    """The outputs of single tokens from `first` on."""
    outs = []
    for i in range(first, first + STEPS):
        q, k, v = (x[:, :, i : i + 1] for x in of)
        call = AttentionCall(q, prompt.scale, None, prompt.sinks)
        outs.append(step(layer, call, k, v))
    mx.eval(outs)
    return outs


def _pairs(
    variant: FusedVariant,
    expected: Layer,
    computed: Layer,
    expected_outs: list[mx.array],
    computed_outs: list[mx.array],
) -> dict[str, Pair]:
    """The pairs of arrays to compare, by name."""
    tolerance = OUT[variant.dtype]
    with only_reference():
        pairs = {
            f"output {i}": Pair(*outs, tolerance)
            for i, outs in enumerate(zip(computed_outs, expected_outs, strict=True), 1)
        }
        for run, _ in enumerate(expected.runs):
            ours, theirs = _sorted(computed, run), _sorted(expected, run)
            pairs[f"kept positions of run {run}"] = Pair(
                ours["positions"], theirs["positions"], EXACT
            )
            if "scores" in ours:
                own = MASS if "logits" not in str(variant.form[0]) else tolerance
                pairs[f"scores of run {run}"] = Pair(ours["scores"], theirs["scores"], own)
        if expected.settings.remembers:
            of_both = computed.remainder.arrays, expected.remainder.arrays
            pairs |= {
                name: Pair(of_both[0][name], of_both[1][name], STATISTICS) for name in of_both[1]
            }
        mx.eval([pair[:2] for pair in pairs.values()])
    return pairs


def _sorted(layer: Layer, index: int) -> dict[str, mx.array]:
    """Positions and scores of a run's heads, in order of position."""
    store = layer.store
    run = store.runs[index]
    positions = store.view(run, "positions")
    order = mx.argsort(positions, axis=-1)
    names = [name for name in ("positions", "scores") if name in store.fields]
    return {name: mx.take_along_axis(store.view(run, name), order, axis=-1) for name in names}
