"""Another size for layers whose slots a caller gave: each head keeps its part of the whole."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_h2o.budget import LayerShare, bytes_for_slots
from mlx_h2o.curves import scaled
from mlx_h2o.policies import Policy


def slots_in_proportion(
    shares: Sequence[LayerShare],
    max_size: int | None,
    max_bytes: int | None,
    policy: Policy,
    remembers: bool,
) -> list[list[int]]:
    """Slots of each layer's KV heads, in the proportions of those that were given.

    Args:
        shares: Of all layers, with the given slots.
        max_size: Tokens' worth of memory per KV head on average, the remainder included; or None.
        max_bytes: Instead: for all layers, everything counted.
        policy: What chooses.
        remembers: Whether statistics of the evicted are kept.

    Raises:
        ValueError: The size is too small for the policy.
    """
    least, heads = policy.least_budget(), sum(share.heads for share in shares)

    def of(total: int) -> list[list[int]]:
        each = iter(scaled([slots for share in shares for slots in share.slots], total, least))
        return [[next(each) for _ in range(share.heads)] for share in shares]

    def bytes_of(total: int) -> int:
        return sum(
            bytes_for_slots(slots, 1, share.widths, policy, remembers)
            for share, layer in zip(shares, of(total), strict=True)
            for slots in layer
        )

    if max_size is not None:
        charged = [share.widths.remainder_slots(remembers) for share in shares]
        parts = zip(shares, charged, strict=True)
        total = sum(share.heads * (max_size - charge) for share, charge in parts)
        if total < least * heads:
            raise ValueError(
                f"max_size={max_size} is too small: with policy {policy.name!r} each KV head needs "
                f"{least} slots: make it at least {least + max(charged)}."
            )
        return of(total)
    assert max_bytes is not None
    total = least * heads
    if bytes_of(total) > max_bytes:
        raise ValueError(
            f"max_bytes={max_bytes} is too small: with policy {policy.name!r} each KV head needs "
            f"{least} slots: make it at least {bytes_of(total)}."
        )
    # Bytes grow with slots, all but for rounding where rows differ from layer to layer.
    too_many = total + max_bytes
    while too_many - total > 1:
        middle = (total + too_many) // 2
        if bytes_of(middle) > max_bytes:
            too_many = middle
        else:
            total = middle
    return of(total)
