"""Pins: positions whose tokens no policy evicts.

A slot's position p is stored as its complement -1 - p while its token is pinned. That is below
every sink, so the comparison that spares sinks spares pinned tokens too: in the reference, the CPU
kernels, the GPU kernels, C and Swift. No list of pins is handed to a kernel, and a step costs the
same with pins as without. Each sequence of a batch and each head has its own pins, slots lie in any
order, and copies, files and undone steps hold pins as they hold positions. `true_positions` gives
the position itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlx_h2o import _checks

#: The first position and one past the last.
Span = tuple[int, int]


def checked_spans(name: str, spans: Any) -> tuple[Span, ...]:
    """Spans in order and separate from each other.

    Args:
        name: The caller's name for them, used in messages.
        spans: A list of pairs (first position, one past the last).

    Raises:
        ValueError: They are not pairs of whole numbers, or one of them is empty or negative.
    """
    if isinstance(spans, str | bytes) or not isinstance(spans, Iterable):
        raise ValueError(
            f"{name} must be a list of (first, one past the last) positions; got "
            f"{_checks.shown(spans)}."
        )
    pairs = []
    for i, span in enumerate(spans):
        numbers = _checks.wholes(f"{name}[{i}]", span, 0)
        if len(numbers) != 2 or numbers[0] >= numbers[1]:
            raise ValueError(
                f"{name}[{i}] must be (first, one past the last) with first below last; got "
                f"{_checks.shown(span)}."
            )
        pairs.append((numbers[0], numbers[1]))
    return joined(pairs)


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same positions in as few spans as possible, in order."""
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
    """The positions below `count` of some spans, which are in order and separate."""
    return tuple((first, min(end, count)) for first, end in spans if first < count)


def pinned_from(spans: Sequence[Span], sink: int) -> int:
    """The number of pinned positions that are not sinks."""
    return sum(end - max(first, sink) for first, end in spans if end > sink)


def is_pinned(spans: Sequence[Span], position: int) -> bool:
    """Whether a position lies in one of the spans."""
    return any(first <= position < end for first, end in spans)


def stored_positions(positions: mx.array, spans: Sequence[Span]) -> mx.array:
    """Positions as slots store them: pinned ones as complements.

    Args:
        positions: int32 of any shape, true or stored.
        spans: The pinned spans.
    """
    positions = true_positions(positions)
    for first, end in spans:
        inside = (positions >= first) & (positions < end)
        positions = mx.where(inside, -1 - positions, positions)
    return positions


def true_positions(stored: mx.array) -> mx.array:
    """Positions without the marks of pins (stored complements undone)."""
    return mx.maximum(stored, -1 - stored)
