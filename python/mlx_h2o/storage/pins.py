"""Pins: positions whose tokens no policy evicts.

A slot's position p is stored as its complement -1 - p while its token is pinned. That is below
every sink, so whatever spares sinks spares pinned tokens too, by the comparison that it makes
anyway: the reference, the CPU's kernels, the GPU's text, C and Swift. There is no list of pins to
hand to a kernel, and a step costs the same with pins as without. Each sequence of a batch and each
head has its own, slots lie in any order, and copies, files and steps taken back hold pins as they
hold positions. `true_positions` gives the position itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlx_h2o._utils import checks

#: First position and the one past the last.
Span = tuple[int, int]


def checked_spans(name: str, spans: Any) -> tuple[Span, ...]:
    """Spans in order, apart from each other.

    Args:
        name: What the caller calls them.
        spans: A list of pairs (first position, one past the last).

    Raises:
        ValueError: They are no pairs of whole numbers, or one of them is empty or negative.
    """
    if isinstance(spans, str | bytes) or not isinstance(spans, Iterable):
        raise ValueError(
            f"{name} must be a list of (first, one past the last) positions; got "
            f"{checks.shown(spans)}."
        )
    pairs = []
    for i, span in enumerate(spans):
        numbers = checks.wholes(f"{name}[{i}]", span, 0)
        if len(numbers) != 2 or numbers[0] >= numbers[1]:
            raise ValueError(
                f"{name}[{i}] must be (first, one past the last) with first below last; got "
                f"{checks.shown(span)}."
            )
        pairs.append((numbers[0], numbers[1]))
    return joined(pairs)


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same positions in as few spans as can be, in order."""
    out: list[Span] = []
    for first, end in sorted(spans):
        if out and first <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((first, end))
    return tuple(out)


def spans_of(positions: Iterable[int]) -> tuple[Span, ...]:
    """Positions as spans."""
    return joined((position, position + 1) for position in positions)


def without(spans: Sequence[Span], others: Sequence[Span]) -> tuple[Span, ...]:
    """The positions of some spans that are in none of the others."""
    out = []
    for first, end in spans:
        for start, stop in joined(others):
            if stop <= first or start >= end:
                continue
            if first < start:
                out.append((first, start))
            first = stop
        if first < end:
            out.append((first, end))
    return tuple(out)


def among_first(spans: Sequence[Span], count: int) -> tuple[Span, ...]:
    """The positions of some spans, in order and apart, that are below `count`."""
    return tuple((first, min(end, count)) for first, end in spans if first < count)


def pinned_from(spans: Sequence[Span], sink: int) -> int:
    """How many positions are pinned that are no sinks."""
    return sum(end - max(first, sink) for first, end in spans if end > sink)


def is_pinned(spans: Sequence[Span], position: int) -> bool:
    """Whether a position lies in one of the spans."""
    return any(first <= position < end for first, end in spans)


def stored_positions(positions: mx.array, spans: Sequence[Span]) -> mx.array:
    """Positions as slots store them: complements where they are pinned.

    Args:
        positions: int32 of any shape, true or stored.
        spans: What is pinned.
    """
    positions = true_positions(positions)
    for first, end in spans:
        inside = (positions >= first) & (positions < end)
        positions = mx.where(inside, -1 - positions, positions)
    return positions


def true_positions(stored: mx.array) -> mx.array:
    """Positions without the marks of pins."""
    return mx.maximum(stored, -1 - stored)
