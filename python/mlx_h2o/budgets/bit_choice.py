"""The choice of bits: the loss from fewer bits a row against the gain from more slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_h2o.budgets.cost import LayerShare, slots_of_model
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.policies import Policy
from mlx_h2o.storage.packed import Packing

#: Widths of rows to choose from; None for dense rows.
WIDTHS = (None, 8, 6, 5, 4)
#: A difference of expected loss too small to choose by. Of widths this near to the least loss the
#: one with most slots is best: facts stay in slots though prose does not need them (a quarter:
#: SmolLM2 knew 10 facts of 12 in rows of 8 bits, and all 12 in the more rows of 6 bits). With 0.001
#: a half was kept in 6 bits too, where 8 already hold every fact and lose less.
NEGLIGIBLE = 3e-4
#: Bits of packed rows if no profile has the loss by packing: of keys with key scaling (`Frame`),
#: and of values. Values in 6 bits lose less than dense or 8-bit ones in the fewer slots of equal
#: bytes (docs/results/experiments.md).
USUAL_BITS = 6


@dataclass(frozen=True)
class Choice:
    """A width of rows and its expected loss.

    Attributes:
        bits: Bits of keys and values, or None for dense rows.
        slots: Slots per KV head, on average.
        loss: The expected loss, summed over the heads, in units of the profile.
    """

    bits: int | None
    slots: int
    loss: float

    def __str__(self) -> str:
        width = "16 bits" if self.bits is None else f"{self.bits} bits"
        return f"{width}: {self.slots} slots, expected loss {self.loss:.3g}"


def packed_in(share: LayerShare, bits: int | None, group_size: int) -> LayerShare:
    """A layer's share with rows of so many bits, with key scaling if they are packed.

    Args:
        share: The layer's share.
        bits: Bits of keys and values, or None for dense rows.
        group_size: Elements that share a scale and a bias.
    """
    packing = Packing(bits, bits, group_size) if bits else Packing()
    return replace(share, widths=replace(share.widths, packing=packing, framed=bits is not None))


def choices(
    shares: Sequence[LayerShare],
    max_bytes: int,
    profile: Profile,
    policy: Policy,
    remembers: bool,
    least: int,
    context: int,
) -> list[Choice]:
    """The slots and loss of each width of rows: the chosen one, then the others by their losses.

    Among the widths whose loss is negligibly above the least, the one with most slots that a
    conversation can use is chosen; among several that keep all tokens, the one with the least loss.

    Args:
        shares: The shares of the model's layers, with rows not packed.
        max_bytes: Bytes for all layers, everything counted.
        profile: The model's profile; widths of rows that it does not know are left out.
        policy: The eviction policy.
        remembers: Whether the caches keep statistics of evicted tokens.
        least: Slots that every head must have.
        context: The most tokens of a conversation.
    """
    measured = profile.measured
    known = set(measured.packing) if measured and measured.frames else set()
    out = []
    for bits in WIDTHS:
        if bits is not None and bits not in known:
            continue
        group = measured.group_size if measured else 0
        packed = [packed_in(share, bits, group) for share in shares]
        slots = min(slots_of_model(packed, max_bytes, policy, remembers))
        if slots >= least:
            out.append(Choice(bits, slots, profile.loss_of(slots, least, bits, context)))
    out.sort(key=lambda choice: choice.loss)
    near = [choice for choice in out if choice.loss <= out[0].loss + NEGLIGIBLE]
    # `max` takes the first of equals, which has the least loss.
    chosen = max(near, key=lambda choice: min(choice.slots, context), default=None)
    return [] if chosen is None else [chosen, *(choice for choice in out if choice is not chosen)]
