"""Pins of a layer, set before or after their tokens come, and turns of a conversation.

Scores, positions and ages carry over from turn to turn. `new_turn` shortens the memory of the
scores: they then cover the last `carry` times as many steps as before, at the mean mass of a step,
and older tokens count as no older than that. Masses and ages shrink together, so mass per step
still ranks an old token fairly beside a new one. With 1 nothing changes; with 0 every held token
counts as if it had just come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_h2o import _checks
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.layer import eviction
from mlx_h2o.layer.layer import Layer
from mlx_h2o.slots.pins import Span, joined, spans_of, true_positions, without


@dataclass(frozen=True)
class PinAnswer:
    """The result of pinning positions.

    Attributes:
        pinned: Positions that every KV head holds, or that are still to come.
        partly: Positions that some heads have evicted; pinned in the others.
        gone: Positions that every head has evicted; they cannot be pinned.
    """

    pinned: tuple[Span, ...] = ()
    partly: tuple[Span, ...] = ()
    gone: tuple[Span, ...] = ()

    def __bool__(self) -> bool:
        """Whether every head holds every position."""
        return not (self.partly or self.gone)

    @classmethod
    def of_all(cls, answers: Iterable[PinAnswer]) -> PinAnswer:
        """The result for several layers together."""
        whole, *others = answers
        spans = joined((*whole.pinned, *whole.partly, *whole.gone))
        pinned, gone = whole.pinned, whole.gone
        for other in others:
            pinned = without(pinned, (*other.partly, *other.gone))
            gone = without(gone, (*other.pinned, *other.partly))
        return cls(pinned, without(spans, (*pinned, *gone)), gone)


def repin(layer: Layer, settings: CacheSettings) -> None:
    """Set the pins to those of these settings, which otherwise are the layer's own.

    Earlier steps can no longer be taken back.

    Args:
        layer: A layer that has tokens.
        settings: The layer's settings with other pins, and with budgets that have room for them.
    """
    other_budgets = settings.budgets != layer.settings.budgets
    layer.mark_pins(settings)
    if other_budgets:
        eviction.resize(layer, settings)
    elif layer.offset:
        eviction.choose_victims(layer)


def answer_of(layer: Layer, spans: Sequence[Span]) -> PinAnswer:
    """The result of pinning positions, given what the heads hold."""
    stored = [(first, min(end, layer.offset)) for first, end in spans if first < layer.offset]
    positions = np.array([p for first, end in stored for p in range(first, end)], np.int64)
    if not positions.size:
        return PinAnswer(tuple(spans))
    counts = _heads_that_hold(layer, positions)
    heads = layer.runs[-1].last * layer.store.fields["positions"].shape[0]
    gone = spans_of(positions[counts == 0].tolist())
    partly = spans_of(positions[(counts > 0) & (counts < heads)].tolist())
    return PinAnswer(without(spans, (*partly, *gone)), partly, gone)


def _heads_that_hold(layer: Layer, pinned: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each position, how many heads, over all sequences, hold its token."""
    store = layer.store
    counts = np.zeros(pinned.shape, np.int64)
    for run in store.runs:
        positions = np.array(true_positions(store.view(run, "positions"))).reshape(-1, run.length)
        for row in positions:
            counts += np.isin(pinned, row)
        newest = layer.offset - layer.window_length
        counts += len(positions) * (pinned >= newest)
    return counts


#: The value of `carry` by which nothing of the past counts.
RESET = "reset"


def checked_carry(carry: float | str) -> float:
    """`carry` as a number from 0 to 1.

    Raises:
        ValueError: `carry` is invalid.
    """
    part = 0.0 if isinstance(carry, str) and carry == RESET else carry
    try:
        number = _checks.finite("carry", float(part) if isinstance(part, str) else part)
    except ValueError:
        number = -1
    if not 0 <= number <= 1:
        raise ValueError(f'carry must be a number from 0 to 1, or "{RESET}"; got {carry!r}.')
    return number


def new_turn(layer: Layer, carry: float) -> None:
    """Begin a turn.

    With a carry below 1, earlier steps can no longer be taken back.

    Args:
        layer: A layer that has tokens.
        carry: How much of the past counts, from 0 to 1.
    """
    if carry == 1 or not layer.offset:
        return
    before = layer.aged_from
    after = layer.offset - int(carry * (layer.offset - before))
    # Scores cover at least one step, else mass per step is undefined.
    layer.begin_turn(min(after, layer.offset - 1))
    if not layer.policy.needs_attention:
        return

    def carried(scores: mx.array, positions: mx.array) -> mx.array:
        ages, ages_after = (
            (layer.offset - mx.maximum(positions, start)).astype(mx.float32)
            for start in (before, after)
        )
        return layer.policy.carried(scores, ages, ages_after, carry)

    store, window = layer.store, layer.window
    views = [(store.view(run, "scores"), store.view(run, "positions")) for run in layer.runs]
    layer.write_scores([carried(scores, true_positions(at)) for scores, at in views])
    if window is not None and window.length:
        newest = window.views(0, layer.runs[-1].last, layer.offset)
        layer.write_newest_scores(carried(newest["scores"], newest["positions"]))
