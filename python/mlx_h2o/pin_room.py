"""Slots for pins: what a layer's heads need to hold them, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_h2o.pins import Span, pinned_from
from mlx_h2o.policies import Policy


class TooManyPins(ValueError):
    """A layer has too few slots for its pins.

    Attributes:
        why: In numbers, a sentence.
        most: Tokens that could be pinned.
        least: Slots that every head needs for those that were asked for.
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
    head that is too small gets what it lacks from the others, of each in proportion to what it can
    spare. As many slots as before are shared out.

    Args:
        budgets: Slots of each KV head.
        policy: What it protects beside the pins counts too.
        pins: Spans of positions.

    Returns:
        Slots of each KV head.

    Raises:
        TooManyPins: All heads together have too few.
    """
    pinned = pinned_from(pins, policy.sink)
    least = policy.least_budget(pinned)
    lacking = sum(max(least - budget, 0) for budget in budgets)
    if not lacking:
        return tuple(budgets)
    spare = [max(budget - least, 0) for budget in budgets]
    if sum(spare) < lacking:
        raise _too_many(pinned, least, budgets, policy)
    given = [part * lacking // sum(spare) for part in spare]
    # What rounding down left over comes of the largest.
    largest = sorted(range(len(spare)), key=lambda i: -spare[i])
    for i in largest[: lacking - sum(given)]:
        given[i] += 1
    return tuple(max(b, least) - part for b, part in zip(budgets, given, strict=True))


def _too_many(pinned: int, least: int, budgets: Sequence[int], policy: Policy) -> TooManyPins:
    """What is wrong, in numbers, and what to do."""
    mean = sum(budgets) // len(budgets)
    protected = policy.sink + policy.recent_slots(mean) + policy.evict_every
    most = min(max(mean - protected, 0), pinned - 1)
    why = (
        f"{pinned} pinned tokens are too many: with {policy.sink} sinks, "
        f"{policy.recent_slots(least)} recent tokens and {policy.evict_every} to evict they need "
        f"{least} slots in every KV head, and a layer here has {mean} a head."
    )
    return TooManyPins(why, most, least)
