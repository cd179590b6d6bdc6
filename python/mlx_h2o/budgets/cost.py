"""Bytes of rows and slots, and how many slots fit into a number of bytes.

Where a caller gave each layer its slots, another size scales them: each head keeps its part of the
total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_h2o._utils import checks
from mlx_h2o.budgets.allocation import check_curves, scaled
from mlx_h2o.policies import Policy
from mlx_h2o.storage.journal import step_bytes
from mlx_h2o.storage.packed import Packing, group_size_for
from mlx_h2o.storage.remainder import Remainder
from mlx_h2o.storage.slot_store import NARROW, WIDE

#: Bytes of memory that a row which came back from a file may take beside its slot: its position and
#: what its score was raised by (`engine/return_state.py`), in 4 bytes each.
CREDIT_BYTES = 8
# Limits for a layer in a file.
MOST_HEADS, WIDEST_ROW = 2**16, 2**20


@dataclass(frozen=True)
class RowWidths:
    """The sizes of one token's row of one KV head.

    Attributes:
        key: Width of a key, D.
        value: Width of a value, Dv.
        key_size: Bytes of a key's element in the model's dtype.
        value_size: Bytes of a value's element in the model's dtype.
        packing: How rows are stored.
        undo: Steps that can be taken back.
        framed: Whether keys have key scaling (`Frame`).
        spill_bytes: Bytes that one KV head keeps for a file of its rows (`Spill.head_bytes`), or 0.
        waiting: Rows, as they are stored, of one KV head that wait for the file.
        returning: Rows of one KV head that come back from the file at once, at most.
        position: Bytes of a slot's position (`storage/slot_store.py`): those of a long
            conversation, or fewer while it is short (`narrow`).
    """

    key: int
    value: int
    key_size: int
    value_size: int
    packing: Packing = field(default_factory=Packing)
    undo: int = 0
    framed: bool = False
    spill_bytes: int = 0
    waiting: int = 0
    returning: int = 0
    position: int = WIDE.size

    @property
    def narrow(self) -> RowWidths:
        """The widths while positions fit into few bits."""
        return replace(self, position=NARROW.size)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value."""
        return self.packing.row_bytes("keys", self.key, self.key_size) + self.packing.row_bytes(
            "values", self.value, self.value_size
        )

    @property
    def recent_row_bytes(self) -> int:
        """Bytes of a key and value in the recent window."""
        recent = self.packing.recent
        return replace(self, packing=recent).row_bytes if recent else self.row_bytes

    def remainder_slots(self, remembers: bool) -> int:
        """Slots whose memory one head's remainder takes (rounded up)."""
        remainder = Remainder.bytes_per_head(self.key, self.value) * remembers
        return -(-remainder // self.row_bytes)

    def slot_bytes(self, policy: Policy) -> int:
        """Bytes of a slot with all that is kept beside it: position, value length, scores now and
        before."""
        scores = 4 * (1 + self.undo) * policy.needs_attention
        return self.row_bytes + self.position + scores + self._length_bytes(policy)

    def _length_bytes(self, policy: Policy) -> int:
        return 2 * policy.keeps_value_lengths(self.packing)

    def head_bytes(self, policy: Policy, remembers: bool) -> int:
        """Bytes of a head beside its slots: statistics, key scaling, file, victims, journal."""
        remainder = Remainder.bytes_per_head(self.key, self.value) if remembers else 0
        recent = self.recent_row_bytes if self.packing.recent else 0
        length = self._length_bytes(policy)
        rows = self.row_bytes + length, recent + length * bool(recent)
        step = step_bytes(*rows, remainder, policy.evict_every)
        frame = 2 * 4 * self.key * self.framed
        beside = frame + self.spill_bytes + self.waiting * self.row_bytes
        return remainder + beside + 4 * policy.evict_every + self.undo * step


def group_size_of(widths: Sequence[RowWidths]) -> int | None:
    """A group size in which all these rows can be packed: the usual one if possible."""
    return group_size_for(*(width for of in widths for width in (of.key, of.value)))


@dataclass(frozen=True)
class LayerShare:
    """A layer's share of its model's budget, by which the whole can be shared out anew.

    Attributes:
        heads: KV heads, H.
        widths: The widths of its rows.
        grid: Numbers of slots in the model's profile; empty without a profile.
        losses: Each KV head's loss at each of them by which slots are bought
            (`Profile.wanted_by_layer`), or empty.
        slots: Slots of each KV head, where the caller gave layers different ones; or empty.
    """

    heads: int
    widths: RowWidths
    grid: tuple[int, ...] = ()
    losses: tuple[tuple[float, ...], ...] = ()
    slots: tuple[int, ...] = ()

    def config(self) -> dict[str, Any]:
        """The share as JSON types; packing, undo and key scaling are cache settings."""
        own = {"packing", "undo", "framed", "position"}
        of_file = {"spill_bytes", "waiting", "returning"}
        widths = {n: value for n, value in vars(self.widths).items() if n not in own | of_file}
        given = {"slots": self.slots} if self.slots else {}
        shared = {"grid": self.grid, "losses": self.losses}
        return {"heads": self.heads, "widths": widths, **shared, **given}

    @classmethod
    def of_config(
        cls, config: dict[str, Any], packing: Packing, undo: int, framed: bool
    ) -> LayerShare:
        """The share of a `config`, for a cache with these settings.

        Args:
            config: The result of `config`.
            packing: How rows are stored.
            undo: Steps that can be taken back.
            framed: Whether keys have key scaling.

        Raises:
            ValueError: It is not the result of `config`.
        """
        heads = checks.whole("heads", config["heads"], 1)
        sizes = {name: checks.whole(name, x, 1) for name, x in config["widths"].items()}
        if heads > MOST_HEADS or max(sizes.values()) > WIDEST_ROW:
            raise ValueError(f"A layer cannot have {heads} KV heads with rows of {sizes}.")
        grid, losses = tuple(config["grid"]), tuple(tuple(curve) for curve in config["losses"])
        if losses:
            check_curves(grid, losses)
        if len(losses) not in (0, heads):
            raise ValueError(f"There are losses of {len(losses)} heads for {heads} KV heads.")
        slots = checks.wholes("slots", config["slots"], 1) if config.get("slots") else ()
        if len(slots) not in (0, heads):
            raise ValueError(f"There are slots of {len(slots)} heads for {heads} KV heads.")
        own = {"packing": packing, "undo": undo, "framed": framed}
        widths = RowWidths(**sizes, **own)  # type: ignore[arg-type]  # each is what it is named
        return cls(heads, widths, grid, losses, tuple(slots))


def bytes_for_slots(
    slots: int, heads: int, widths: RowWidths, policy: Policy, remembers: bool
) -> int:
    """Bytes of `heads` heads with so many slots each: the inverse of `slots_for_bytes`.

    Args:
        slots: Slots of each head.
        heads: KV heads, times the batch.
        widths: The widths of a row.
        policy: The eviction policy; it determines what is stored beside a row.
        remembers: Whether the caches keep statistics of evicted tokens.
    """
    # A recent window of wider rows leaves room for fewer slots. (One of narrower rows frees no
    # room: with a profile the window is as small as that of the smallest head.)
    extra = max(widths.recent_row_bytes - widths.row_bytes, 0)
    rows = slots * widths.slot_bytes(policy) + policy.recent_slots(slots) * extra
    credits = min(widths.returning, slots) * CREDIT_BYTES
    return heads * (rows + credits + widths.head_bytes(policy, remembers))


def slots_for_bytes(
    max_bytes: int,
    heads: int,
    widths: RowWidths,
    policy: Policy,
    remembers: bool,
    least: int = 1,
) -> int:
    """Slots per head that fit into `max_bytes` of `heads` heads (batch included).

    Args:
        max_bytes: Bytes for all of the heads.
        heads: KV heads, times the batch.
        widths: The widths of a row.
        policy: The eviction policy; it determines what is stored beside a row.
        remembers: Whether the caches keep statistics of evicted tokens.
        least: The fewest slots that are useful.

    Raises:
        ValueError: Fewer than `least` fit.
    """
    slots = _most_slots(
        max_bytes, lambda slots: bytes_for_slots(slots, heads, widths, policy, remembers)
    )
    if slots < least:
        enough = bytes_for_slots(least, heads, widths, policy, remembers)
        raise ValueError(
            f"max_bytes={max_bytes} is too small: each of {heads} KV heads needs {least} slots of "
            f"{widths.row_bytes} bytes: make it at least {enough}."
        )
    return slots


def slots_of_model(
    shares: Sequence[LayerShare], max_bytes: int, policy: Policy, remembers: bool
) -> list[int]:
    """Slots per KV head of each layer that fit into a model's bytes; 0 where none do.

    Each layer has an equal part of the bytes. Layers that differ only in what their heads hold
    beside the slots, such as rows that wait for a file, have as many slots each instead: a profile
    then shares out the slots of all layers together.

    Args:
        shares: The shares of all layers.
        max_bytes: Bytes for all layers, everything counted.
        policy: The eviction policy; it determines what is stored beside a row.
        remembers: Whether the caches keep statistics of evicted tokens.
    """

    def slots_of(shares: Sequence[LayerShare], max_bytes: int) -> int:
        return _most_slots(
            max_bytes, lambda slots: sum(_bytes_of_layers(slots, shares, policy, remembers))
        )

    if _slots_alike(shares, policy):
        return [slots_of(shares, max_bytes)] * len(shares)
    return [slots_of([share], max_bytes // len(shares)) for share in shares]


def bytes_of_model(
    slots: int, shares: Sequence[LayerShare], policy: Policy, remembers: bool
) -> int:
    """The fewest bytes of which `slots_of_model` makes so many slots in every layer.

    Args:
        slots: Slots of each KV head.
        shares: As in `slots_of_model`.
        policy: As in `slots_of_model`.
        remembers: As in `slots_of_model`.
    """
    each = _bytes_of_layers(slots, shares, policy, remembers)
    return sum(each) if _slots_alike(shares, policy) else len(each) * max(each)


def _bytes_of_layers(
    slots: int, shares: Sequence[LayerShare], policy: Policy, remembers: bool
) -> list[int]:
    how = policy, remembers
    return [bytes_for_slots(slots, share.heads, share.widths, *how) for share in shares]


def _slots_alike(shares: Sequence[LayerShare], policy: Policy) -> bool:
    """Whether one more slot for each head costs every layer as many bytes."""
    of_slots = {
        (share.heads, share.widths.slot_bytes(policy), share.widths.recent_row_bytes)
        for share in shares
    }
    return len(of_slots) == 1


def _most_slots(
    max_bytes: int,
    bytes_of: Callable[[int], int],
    least: int = 0,
    most: int = checks.MOST_TOKENS,
) -> int:
    """The most slots from `least` on that fit: bytes grow with slots."""
    slots, too_many = least, least + min(max_bytes, most) + 1
    while too_many - slots > 1:
        middle = (slots + too_many) // 2
        if bytes_of(middle) > max_bytes:
            too_many = middle
        else:
            slots = middle
    return slots


def slots_in_proportion(
    shares: Sequence[LayerShare],
    max_size: int | None,
    max_bytes: int | None,
    policy: Policy,
    remembers: bool,
) -> list[list[int]]:
    """Slots of each layer's KV heads, in the proportions of the slots given.

    Args:
        shares: The shares of all layers, with the given slots.
        max_size: Tokens' worth of memory per KV head on average, the remainder included; or None.
        max_bytes: Bytes for all layers, everything counted, instead of `max_size`; or None.
        policy: The eviction policy.
        remembers: Whether the caches keep statistics of evicted tokens.

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
    # Bytes grow with slots, except for rounding where rows differ from layer to layer.
    return of(_most_slots(max_bytes, bytes_of, total, max_bytes))
