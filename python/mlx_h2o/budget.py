"""What a budget buys: bytes and slots."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mlx_h2o.packed import Packing
from mlx_h2o.policies import Policy
from mlx_h2o.remainder import Remainder


@dataclass(frozen=True)
class RowWidths:
    """What one token's row of one KV head measures.

    Attributes:
        key: D.
        value: Dv.
        key_size: Bytes of a key's element in the model's dtype.
        value_size: Bytes of a value's element, likewise.
        packing: How they are stored.
    """

    key: int
    value: int
    key_size: int
    value_size: int
    packing: Packing = field(default_factory=Packing)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value."""
        return self.packing.row_bytes("keys", self.key, self.key_size) + self.packing.row_bytes(
            "values", self.value, self.value_size
        )

    @property
    def recent_row_bytes(self) -> int:
        """The same of one of the newest tokens."""
        recent = self.packing.recent
        return replace(self, packing=recent).row_bytes if recent else self.row_bytes

    def remainder_slots(self, remembers: bool) -> int:
        """Slots whose memory the remainder of one head takes (rounded up)."""
        return -(-Remainder.bytes_per_head(self.key, self.value) // self.row_bytes) * remembers

    def slot_bytes(self, policy: Policy) -> int:
        """Bytes of a slot with everything kept beside it: position and score."""
        return self.row_bytes + 4 + 4 * policy.needs_attention

    def head_bytes(self, policy: Policy, remembers: bool) -> int:
        """Bytes of a head apart from its slots: the remainder and the next victims."""
        remainder = Remainder.bytes_per_head(self.key, self.value) if remembers else 0
        return remainder + 4 * policy.evict_every


def slots_for_bytes(
    max_bytes: int, heads: int, widths: RowWidths, policy: Policy, remembers: bool
) -> int:
    """Slots per head that fit into `max_bytes` of `heads` heads (batch included).

    Raises:
        ValueError: Not even one slot fits.
    """
    per_head = max_bytes // heads - widths.head_bytes(policy, remembers)
    slots = per_head // widths.slot_bytes(policy)
    # A recent zone of wider rows leaves room for fewer. (Of narrower ones it gives none back: with
    # a profile the zone is as small as the smallest head's.)
    extra = max(widths.recent_row_bytes - widths.row_bytes, 0)
    while slots > 0 and slots * widths.slot_bytes(policy) > (
        per_head - policy.recent_slots(slots) * extra
    ):
        slots -= 1
    if slots < 1:
        raise ValueError(
            f"max_bytes={max_bytes} leaves no slot for each of {heads} KV heads of "
            f"{widths.row_bytes} bytes a token; make it larger."
        )
    return slots
