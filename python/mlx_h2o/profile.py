"""Head budgets: a model's profile says how many slots each KV head deserves.

Heads differ more than policies do: a few copy and recall over long distances, most look at the last
tokens. A profile holds, for every KV head, what the model loses when that head alone is limited to
b slots (and the remainder); `budgets` hands out the slots by the loss saved per slot. Related:
DuoAttention (arXiv 2410.10819), AdaKV (2407.11550), HeadKV (2410.19258).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o import checks

FORMAT = "mlx-h2o profile"
VERSION = 1
# The file name under which a profile is looked for beside a model's weights.
FILE_NAME = "mlx_h2o_profile.json"
# Below 4 sinks, a few recent tokens and some to choose from, a head is no use.
SMALLEST_BUDGET = 12
# Of numbers in a profile's file: beyond them sharing out would overflow or take its time.
LONGEST_GRID, MOST_SLOTS = 1024, 2**40
LARGEST_LOSS, LARGEST_PROBE = 1e100, 1e30
# Two models are taken for the same when their probes point the same way: quantizing a model moves
# it by a percent or two, another training run turns it anywhere.
LEAST_LIKENESS = 0.9


@dataclass(frozen=True)
class ModelIdentity:
    """What tells models apart without reading their weights.

    Attributes:
        model_type: As in the model's config.
        kv_heads: KV heads of each bounded layer.
        key_widths: D of each bounded layer.
        vocab_size: Rows of the embedding, 0 if unknown.
        probe: A few entries of the embedding.
    """

    model_type: str
    kv_heads: tuple[int, ...]
    key_widths: tuple[int, ...]
    vocab_size: int
    probe: tuple[float, ...]

    def check(self) -> None:
        """Raise ValueError unless these are texts and numbers that a model can have."""
        if not isinstance(self.model_type, str):
            raise ValueError(f"A profile is damaged: model_type is {self.model_type!r}.")
        for name in ("kv_heads", "key_widths"):
            checks.wholes(name, getattr(self, name), 1)
        checks.whole("vocab_size", self.vocab_size, 0)
        if not all(type(x) in (int, float) and abs(x) <= LARGEST_PROBE for x in self.probe):
            raise ValueError("A profile is damaged: its grid, losses and probe must be numbers.")

    def difference(self, other: ModelIdentity) -> str | None:
        """Why the other is another model, or None if it is not."""
        for name in ("model_type", "kv_heads", "key_widths", "vocab_size"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {mine}, not {theirs}"
        if not self.probe:
            return None
        if len(self.probe) != len(other.probe):
            return "its embedding differs"
        a, b = (mx.array([float(x) for x in probe]) for probe in (self.probe, other.probe))
        likeness = (a * b).sum() / mx.maximum(mx.linalg.norm(a) * mx.linalg.norm(b), 1e-12)
        return None if (likeness >= LEAST_LIKENESS).item() else "its embedding differs"


def identity_of(model: nn.Module, heads: Sequence[int], widths: Sequence[int]) -> ModelIdentity:
    """The identity of a loaded model.

    Args:
        model: An mlx-lm model.
        heads: KV heads of each bounded layer.
        widths: D of each bounded layer.
    """
    embedding = next(
        (m for name, m in model.named_modules() if name.endswith(("embed_tokens", "wte"))), None
    )
    probe: tuple[float, ...] = ()
    if embedding is not None:
        rows = embedding(mx.array([1, 2, 3, 4])).astype(mx.float32)[:, :16]
        probe = tuple(round(x, 5) for x in rows.flatten().tolist())
    args = getattr(model, "args", None)
    vocab = getattr(args, "vocab_size", 0) or 0
    kind = getattr(model, "model_type", None) or getattr(args, "model_type", "unknown")
    return ModelIdentity(str(kind), tuple(heads), tuple(widths), int(vocab), probe)


def check_curves(grid: Sequence[int], curves: Sequence[Sequence[float]]) -> None:
    """Raise ValueError unless every head has a loss at each number of slots."""
    slots = all(type(x) is int for x in grid)
    if not slots or not all(type(x) in (int, float) for curve in curves for x in curve):
        raise ValueError("A profile is damaged: its grid, losses and probe must be numbers.")
    if not grid or list(grid) != sorted(set(grid)) or grid[0] < 1:
        raise ValueError(f"A profile's grid must ascend from at least 1; got {grid}.")
    if len(grid) > LONGEST_GRID or grid[-1] > MOST_SLOTS:
        raise ValueError(
            f"A profile's grid has at most {LONGEST_GRID} points of at most {MOST_SLOTS} slots."
        )
    for curve in curves:
        if len(curve) != len(grid) or not all(0 <= x <= LARGEST_LOSS for x in curve):
            raise ValueError("Every head needs one finite loss >= 0 per grid point.")


@dataclass(frozen=True)
class Profile:
    """What each KV head loses at each number of slots.

    Attributes:
        model: The model it belongs to.
        grid: Numbers of slots, ascending.
        losses: Per bounded layer and KV head the loss at each grid point, non-negative. In units of
            the method; only differences matter.
        method: How the losses were measured.
        details: How the measurement was made (text, tokens, versions, date).
    """

    model: ModelIdentity
    grid: tuple[int, ...]
    losses: tuple[tuple[tuple[float, ...], ...], ...]
    method: str
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model.check()
        shape = tuple(len(layer) for layer in self.losses)
        if shape != tuple(self.model.kv_heads):
            raise ValueError(f"A profile of {self.model.kv_heads} KV heads has losses for {shape}.")
        check_curves(self.grid, [curve for layer in self.losses for curve in layer])
        if not isinstance(self.method, str) or not isinstance(self.details, dict):
            raise ValueError("A profile is damaged: its method is a text, its details are a table.")

    def budgets(self, mean: int, least: int = SMALLEST_BUDGET) -> list[list[int]]:
        """Slots per layer and KV head, `mean` on average, exactly.

        Greedy: every head starts at the least; the largest saving of loss per slot, over all steps
        up the grid, is bought next, until the slots are spent.

        Args:
            mean: Slots per KV head on average.
            least: Slots that every head must have.

        Raises:
            ValueError: mean is below least.
        """
        curves = [curve for layer in self.losses for curve in layer]
        if mean < least:
            raise ValueError(
                f"A budget of {mean} slots a head is below the {least} that a head needs with this "
                "policy; raise max_size or lower sink and recent."
            )
        slots = [least] * len(curves)
        left = (mean - least) * len(curves)
        offers = [self._best_step(curve, least) for curve in curves]
        while left:
            head = max(range(len(curves)), key=lambda h: (offers[h][0], -slots[h], -h))
            saving, target = offers[head]
            if saving <= 0:
                # Nothing more to gain: the rest is spread evenly.
                for h in range(len(curves)):
                    slots[h] += left // len(curves) + (h < left % len(curves))
                break
            bought = min(target - slots[head], left)
            slots[head] += bought
            left -= bought
            offers[head] = self._best_step(curves[head], slots[head])
        heads = iter(slots)
        return [[next(heads) for _ in layer] for layer in self.losses]

    def _best_step(self, curve: Sequence[float], have: int) -> tuple[float, int]:
        """The best saving per slot from `have` slots on, and where it leads."""
        now = self._loss_at(curve, have)
        steps = [
            ((now - loss) / (b - have), b)
            for b, loss in zip(self.grid, curve, strict=True)
            if b > have
        ]
        return max(steps, default=(0.0, have), key=lambda step: step[0])

    def _loss_at(self, curve: Sequence[float], slots: int) -> float:
        """The loss at any number of slots, linear between grid points."""
        if slots <= self.grid[0]:
            return curve[0]
        for i in range(1, len(self.grid)):
            if slots <= self.grid[i]:
                low, high = self.grid[i - 1], self.grid[i]
                part = (slots - low) / (high - low)
                return curve[i - 1] + part * (curve[i] - curve[i - 1])
        return curve[-1]

    def require(self, model: ModelIdentity) -> None:
        """Raise ValueError unless the profile belongs to the model."""
        reason = self.model.difference(model)
        if reason:
            raise ValueError(
                f"This profile was made for another model ({self.model.model_type}): {reason}. "
                'Make one with `mlx_h2o calibrate --model ...`, or pass budgets="uniform".'
            )

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)
        # Innermost lists go on one line each, so that a profile can be read and compared.
        text = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), text)
        Path(path).write_text(text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            ValueError: The file is no profile, or one of another version.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"Cannot read the profile {path}: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{path} is no mlx-h2o profile.")
        if data.get("version") != VERSION:
            raise ValueError(f"{path} has version {data.get('version')}; this reads {VERSION}.")
        try:
            model = data["model"]
            return cls(
                ModelIdentity(
                    model["model_type"],
                    tuple(model["kv_heads"]),
                    tuple(model["key_widths"]),
                    model["vocab_size"],
                    tuple(model["probe"]),
                ),
                tuple(data["grid"]),
                tuple(tuple(tuple(curve) for curve in layer) for layer in data["losses"]),
                data["method"],
                data["details"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"The profile {path} is damaged: {error!r}.") from error
