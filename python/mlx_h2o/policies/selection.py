"""Selection of victims: the lowest unprotected priority first, ties to the oldest position.

The tie rule makes every backend choose alike.
"""

from __future__ import annotations

import mlx.core as mx


def evictable_slots(positions: mx.array, offset: int, sink: int, recent: int) -> mx.array:
    """True where a slot is neither a sink nor recent nor pinned, `[B, H, N]` bool.

    Args:
        positions: `[B, H, N]` as slots store them: below 0 where a token is pinned
            (`slots/pins.py`).
        offset: The next logical position.
        sink: The number of first positions to protect.
        recent: The number of last positions to protect.
    """
    return (positions >= sink) & (positions < offset - recent)


def select_victims(
    priority: mx.array, positions: mx.array, evictable: mx.array, count: int, unit: str = "head"
) -> mx.array:
    """The `count` slots to free, lowest priority first.

    Args:
        priority: `[B, H, N]`; the lowest is evicted first.
        positions: `[B, H, N]` int32, all different within a head.
        evictable: `[B, H, N]` bool; at least `count` True in each head.
        count: Victims per head.
        unit: "head", or "layer": the heads' mean priority decides for all (their positions agree).

    Returns:
        Slot indices `[B, H, count]` int32.
    """
    ranked = rankable(priority, evictable, unit)
    if count == 1:
        lowest = ranked.min(axis=-1, keepdims=True)
        tied = mx.where((ranked == lowest) & evictable, positions, mx.iinfo(mx.int32).max)
        return mx.argmin(tied, axis=-1, keepdims=True).astype(mx.int32)
    return order_by_worth(ranked, positions)[..., :count].astype(mx.int32)


def select_kept(
    priority: mx.array, positions: mx.array, evictable: mx.array, count: int, unit: str = "head"
) -> mx.array:
    """The `count` slots to keep of a prompt chunk, in order of position.

    Protected slots are always kept; arguments as in `select_victims`.

    Args:
        priority: `[B, H, N]`; the highest are kept.
        positions: `[B, H, N]`.
        evictable: `[B, H, N]`; slots that are not evictable are always kept.
        count: Slots to keep.
        unit: "head", or "layer": all heads keep the same slots.

    Returns:
        Slot indices `[B, H, count]` int32.
    """
    order = order_by_worth(rankable(priority, evictable, unit), positions)
    winners = order[..., order.shape[-1] - count :]
    by_position = mx.argsort(mx.take_along_axis(positions, winners, axis=-1), axis=-1)
    return mx.take_along_axis(winners, by_position, axis=-1).astype(mx.int32)


def rankable(priority: mx.array, evictable: mx.array, unit: str) -> mx.array:
    """Priorities with plus infinity for protected slots; a NaN counts as the lowest.

    Args:
        priority: `[B, H, N]`.
        evictable: `[B, H, N]`.
        unit: "head", or "layer": the mean over the heads is ranked.
    """
    if unit == "layer":
        priority = mx.broadcast_to(priority.mean(axis=1, keepdims=True), priority.shape)
    priority = mx.where(mx.isnan(priority), -mx.inf, priority)
    # Capped, so that a protected slot never ties with an unprotected one.
    return mx.where(evictable, mx.minimum(priority, mx.finfo(mx.float32).max), mx.inf)


def order_by_worth(ranked: mx.array, positions: mx.array) -> mx.array:
    """Slot indices in order of eviction, ties oldest first, `[B, H, N]`."""
    by_position = mx.argsort(positions, axis=-1)
    # argsort is stable, so equal priorities stay in order of position.
    by_worth = mx.argsort(mx.take_along_axis(ranked, by_position, axis=-1), axis=-1)
    return mx.take_along_axis(by_position, by_worth, axis=-1)
