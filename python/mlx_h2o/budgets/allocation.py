"""Allocation: slots shared out among KV heads by each head's loss at each number of slots.

A curve has one head's loss at each point of a grid of slots. Allocation is greedy: every head
starts at the least number of slots; the step up the grid that saves the most loss per slot is
bought next, until the slots are spent.

Pins get their room here too: a head that is too small for its pins gets slots from the layer's
larger heads.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from operator import itemgetter

from mlx_h2o import _checks
from mlx_h2o.policies import Policy
from mlx_h2o.slots.pins import Span, pinned_from

# Limits for a file's numbers: beyond them allocation would overflow or take too long.
LONGEST_GRID, MOST_SLOTS = 1024, 2**40
LARGEST_LOSS = 1e100

Curve = Sequence[float]


def check_curves(grid: Sequence[int], curves: Sequence[Curve]) -> None:
    """Raise ValueError unless every head has a loss at each number of slots."""
    slots = all(type(x) is int for x in grid)
    if not slots or not all(type(x) in (int, float) for curve in curves for x in curve):
        raise ValueError("A profile is damaged: its grid, losses and probe must be numbers.")
    if not grid or list(grid) != sorted(set(grid)) or grid[0] < 1:
        raise ValueError(
            f"A profile's grid must ascend from at least 1; got {_checks.shown(grid)}."
        )
    if len(grid) > LONGEST_GRID or grid[-1] > MOST_SLOTS:
        raise ValueError(
            f"A profile's grid has at most {LONGEST_GRID} points of at most {MOST_SLOTS} slots."
        )
    for curve in curves:
        if len(curve) != len(grid) or not all(0 <= x <= LARGEST_LOSS for x in curve):
            raise ValueError("Every head needs one finite loss >= 0 per grid point.")


def falling(curve: Curve) -> tuple[float, ...]:
    """The curve with every rise flattened."""
    out = list(curve)
    for i in range(len(out) - 2, -1, -1):
        out[i] = max(out[i], out[i + 1])
    return tuple(out)


def loss_at(grid: Sequence[int], curve: Curve, slots: int) -> float:
    """The loss at any number of slots, linear between grid points.

    Args:
        grid: Numbers of slots, ascending.
        curve: The loss at each of them.
        slots: The number of slots at which to read the loss.
    """
    if slots <= grid[0]:
        return curve[0]
    for i in range(1, len(grid)):
        if slots <= grid[i]:
            low, high = grid[i - 1], grid[i]
            part = (slots - low) / (high - low)
            return curve[i - 1] + part * (curve[i] - curve[i - 1])
    return curve[-1]


def best_step(grid: Sequence[int], curve: Curve, have: int) -> tuple[float, int]:
    """The best saving per slot from `have` slots on, and the number of slots it leads to.

    Args:
        grid: Numbers of slots, ascending.
        curve: The loss at each of them.
        have: Slots that the head has.
    """
    now = loss_at(grid, curve, have)
    steps = [
        ((now - loss) / (b - have), b) for b, loss in zip(grid, curve, strict=True) if b > have
    ]
    return max(steps, default=(0.0, have), key=itemgetter(0))


def shared_out(grid: Sequence[int], curves: Sequence[Curve], mean: int, least: int) -> list[int]:
    """Slots of each head, `mean` on average, exactly.

    Args:
        grid: Numbers of slots.
        curves: Each head's losses at these numbers.
        mean: Slots per head on average, at least `least`.
        least: Slots that every head must have.
    """
    slots = [least] * len(curves)
    left = (mean - least) * len(curves)
    # The greatest saving first, then the head with the fewest slots.
    offers = []
    for h, curve in enumerate(curves):
        saving, target = best_step(grid, curve, least)
        offers.append((-saving, least, h, target))
    heapq.heapify(offers)
    while left:
        loss, _, head, target = offers[0]
        if loss >= 0:
            # No slot saves anything more: the rest is spread evenly.
            for h in range(len(curves)):
                slots[h] += left // len(curves) + (h < left % len(curves))
            break
        bought = min(target - slots[head], left)
        slots[head] += bought
        left -= bought
        saving, target = best_step(grid, curves[head], slots[head])
        heapq.heapreplace(offers, (-saving, slots[head], head, target))
    return slots


def capped(slots: Sequence[int], most: int) -> list[int]:
    """The same total with no head above `most`; slots taken go to the heads with the fewest.

    Args:
        slots: Slots of each head; on average at most `most`.
        most: The most slots of any head.
    """
    out = [min(s, most) for s in slots]
    left = sum(slots) - sum(out)
    order = sorted(range(len(out)), key=lambda h: (out[h], h))
    while left:
        # Raise the lowest heads to the next higher one, or as far as the slots last.
        level = out[order[0]]
        low = [h for h in order if out[h] == level]
        above = min((out[h] for h in order if out[h] > level), default=most)
        room = min((above - level) * len(low), left)
        for i, h in enumerate(low):
            out[h] += room // len(low) + (i < room % len(low))
        left -= room
        order.sort(key=lambda h: (out[h], h))
    return out


def scaled(slots: Sequence[int], total: int, least: int) -> list[int]:
    """The same proportions of another total, which is met exactly; every head gets the least.

    Args:
        slots: Slots of each head.
        total: Slots to share out, at least `least` a head.
        least: Slots that every head must have.
    """
    factor = total / sum(slots)
    out = [max(int(s * factor), least) for s in slots]
    # Slots left over by rounding are added, or slots that the least required are taken back, one a
    # turn, from the largest head on.
    order = sorted(range(len(out)), key=lambda h: (-out[h], h))
    left = total - sum(out)
    if left >= 0:
        for turn, head in enumerate(order):
            out[head] += left // len(out) + (turn < left % len(out))
        return out
    spare = [s - least for s in out]

    def excess(turns: int) -> int:
        return sum(min(turns, one) for one in spare)

    turns = bisect.bisect_right(range(max(spare) + 1), -left, key=excess) - 1
    last = [h for h in order if spare[h] > turns][: -left - excess(turns)]
    return [s - min(turns, spare[h]) - (h in last) for h, s in enumerate(out)]


class TooManyPins(ValueError):
    """A layer has too few slots for its pins.

    Attributes:
        why: The reason in numbers, a sentence.
        most: The most tokens that could be pinned.
        least: Slots that every head needs for the tokens to pin.
    """

    def __init__(self, why: str, most: int, least: int):
        self.why, self.most, self.least = why, most, least
        super().__init__(
            f"{why} Pin at most {most} tokens, make max_size at least {least} slots a head, or "
            "lower sink or recent."
        )


def room_for_pins(budgets: Sequence[int], policy: Policy, pins: Sequence[Span]) -> tuple[int, ...]:
    """A layer's budgets, shared out so that every head holds its pins and can still evict.

    A profile gives some heads a dozen slots, and a pinned token is never evicted from any head: a
    head that is too small gets the missing slots from the others, in proportion to what each can
    spare. The total stays the same.

    Args:
        budgets: Slots of each KV head.
        policy: The policy; the tokens that it protects need slots too.
        pins: Spans of positions.

    Returns:
        Slots of each KV head.

    Raises:
        TooManyPins: All heads together have too few slots.
    """
    pinned = pinned_from(pins, policy.sink)
    least = policy.least_budget(pinned)
    lacking = sum(max(least - budget, 0) for budget in budgets)
    if not lacking:
        return tuple(budgets)
    spare = [max(budget - least, 0) for budget in budgets]
    if sum(spare) < lacking:
        raise _too_many(pinned, least, budgets, policy)
    cuts = [part * lacking // sum(spare) for part in spare]
    # Slots lost by rounding down are taken from the largest heads.
    largest = sorted(range(len(spare)), key=lambda i: -spare[i])
    for i in largest[: lacking - sum(cuts)]:
        cuts[i] += 1
    return tuple(max(b, least) - part for b, part in zip(budgets, cuts, strict=True))


def _too_many(pinned: int, least: int, budgets: Sequence[int], policy: Policy) -> TooManyPins:
    """The error, with the numbers and the remedies."""
    mean = sum(budgets) // len(budgets)
    protected = policy.sink + policy.recent_slots(mean) + policy.evict_every
    most = min(max(mean - protected, 0), pinned - 1)
    why = (
        f"{pinned} pinned tokens are too many: with {policy.sink} sinks, "
        f"{policy.recent_slots(least)} recent tokens and {policy.evict_every} to evict they need "
        f"{least} slots in every KV head, and a layer here has {mean} a head."
    )
    return TooManyPins(why, most, least)
