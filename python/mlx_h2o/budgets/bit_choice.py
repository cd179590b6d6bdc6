"""The choice of bits: the loss by fewer bits a row against the gain by more slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_h2o.budgets.cost import LayerShare, bytes_for_slots, slots_for_bytes
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.policies import Policy
from mlx_h2o.storage.packed import Packing

#: Widths of rows that are weighed against each other; None: not packed.
WIDTHS = (None, 8, 6, 5, 4)
#: Of expected loss, too little to choose by. Of widths so near to the least the one with most slots
#: serves best: facts stay in slots, though prose does not ask for them (a quarter: SmolLM2 knew 10
#: facts of 12 in rows of 8 bits, and all 12 in the more rows of 6 bits). With 0.001 a half was kept
#: in 6 bits too, where 8 already hold every fact, and lose less.
NEGLIGIBLE = 3e-4
#: Bits of packed rows where no profile tells what packing loses: of keys with key scaling, and of
#: values. Values in 6 bits lose less than dense or 8-bit ones in the fewer slots of equal bytes
#: (docs/results/packing.md).
USUAL_BITS = 6


@dataclass(frozen=True)
class Choice:
    """Rows of some width, and what they are expected to lose.

    Attributes:
        bits: Of keys and values; None: not packed.
        slots: Per KV head, on average.
        loss: Summed over the heads, in units of the profile.
    """

    bits: int | None
    slots: int
    loss: float

    def __str__(self) -> str:
        width = "16 bits" if self.bits is None else f"{self.bits} bits"
        return f"{width}: {self.slots} slots, expected loss {self.loss:.3g}"


def packed_in(share: LayerShare, bits: int | None, group_size: int) -> LayerShare:
    """A layer's share with rows of so many bits, in a frame if they are packed.

    Args:
        share: Of the layer.
        bits: Of keys and values, or None: as they come.
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
    """What each width of rows would give: the chosen one, then the others by their losses.

    Chosen is, of those whose loss is the least but for what is negligible, the one with most slots
    that a conversation can use; of several that keep all of it, the one that loses least.

    Args:
        shares: Of the model's layers, their rows not packed.
        max_bytes: For all of them, everything counted.
        profile: Of the model; widths of rows that it does not know are left out.
        policy: What chooses.
        remembers: Whether statistics of the evicted are kept.
        least: Slots that every head must have.
        context: Tokens that conversations may reach.
    """
    measured = profile.measured
    known = set(measured.packing) if measured and measured.frames else set()
    out = []
    for bits in WIDTHS:
        if bits is not None and bits not in known:
            continue
        group = measured.group_size if measured else 0
        packed = [packed_in(share, bits, group) for share in shares]
        slots = fewest_slots(packed, max_bytes, policy, remembers)
        if slots >= least:
            out.append(Choice(bits, slots, profile.loss_of(slots, least, bits, context)))
    out.sort(key=lambda choice: choice.loss)
    near = [choice for choice in out if choice.loss <= out[0].loss + NEGLIGIBLE]
    # Of equals the first, which loses least.
    chosen = max(near, key=lambda choice: min(choice.slots, context), default=None)
    return [] if chosen is None else [chosen, *(choice for choice in out if choice is not chosen)]


def fewest_slots(
    shares: Sequence[LayerShare], max_bytes: int, policy: Policy, remembers: bool
) -> int:
    """Slots per KV head that fit, in the layer where the fewest do; 0 if none do.

    Args:
        shares: Of the layers.
        max_bytes: For all of them.
        policy: Which says what is stored beside a row.
        remembers: Whether statistics of the evicted are kept.
    """
    each = max_bytes // len(shares)
    fit = []
    for share in shares:
        if each < bytes_for_slots(1, share.heads, share.widths, policy, remembers):
            return 0
        fit.append(slots_for_bytes(each, share.heads, share.widths, policy, remembers))
    return min(fit)
