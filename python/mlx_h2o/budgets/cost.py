"""Bytes of a row, a slot and a KV head, and how many slots fit into a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mlx_h2o import _checks
from mlx_h2o.budgets.allocation import check_curves
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.policies import Policy
from mlx_h2o.slots.journal import step_bytes
from mlx_h2o.slots.packed import Packing, group_size_for
from mlx_h2o.slots.remainder import Remainder
from mlx_h2o.slots.slot_store import FEW, NARROW, WIDE

#: Bytes of memory that a row which came back from a file may take beside its slot: its position and
#: what its score was raised by (`layer/return_state.py`), in 4 bytes each.
CREDIT_BYTES = 8
#: Bytes of an element of a 16-bit cache.
PLAIN_ELEMENT = 2
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
        position: Bytes of a slot's position (`slots/slot_store.py`): those of a long
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

    def cost(self, policy: Policy, remembers: bool) -> HeadCost:
        """Bytes of a head by its slots.

        Args:
            policy: The eviction policy; it determines what is stored beside a row.
            remembers: Whether the caches keep statistics of evicted tokens.
        """
        remainder = Remainder.bytes_per_head(self.key, self.value) if remembers else 0
        recent = self.recent_row_bytes if self.packing.recent else 0
        length = self._length_bytes(policy)
        rows = self.row_bytes + length, recent + length * bool(recent)
        step = step_bytes(*rows, remainder, policy.evict_every)
        frame = 2 * 4 * self.key * self.framed
        file = self.spill_bytes + self.waiting * self.row_bytes
        victims = 4 * policy.evict_every
        fixed = remainder + frame + file + victims + self.undo * step
        # A recent window of wider rows leaves room for fewer slots. (One of narrower rows frees no
        # room: with a profile the window is as small as that of the smallest head.)
        wider = max(self.recent_row_bytes - self.row_bytes, 0)
        return HeadCost(self.slot_bytes(policy), fixed, wider, self.returning, policy)


class HeadCost(NamedTuple):
    """Bytes of one KV head by its slots.

    Attributes:
        slot: Bytes of a slot and all beside it.
        fixed: Bytes beside the slots: statistics, key scaling, file, victims, journal.
        wider: Further bytes of a row in the recent window.
        returning: Rows that come back from a file at once, at most.
        policy: The policy; it determines the recent window.
    """

    slot: int
    fixed: int
    wider: int
    returning: int
    policy: Policy

    def of(self, slots: int) -> int:
        """Bytes of a head with so many slots."""
        window = self.policy.recent_slots(slots) * self.wider if self.wider else 0
        return self.fixed + slots * self.slot + window + min(self.returning, slots) * CREDIT_BYTES


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
    cost = widths.cost(policy, remembers)
    slots = most_slots(max_bytes, lambda slots: heads * cost.of(slots))
    if slots < least:
        raise ValueError(
            f"max_bytes={max_bytes} is too small: each of {heads} KV heads needs {least} slots of "
            f"{widths.row_bytes} bytes: make it at least {heads * cost.of(least)}."
        )
    return slots


def most_slots(
    max_bytes: int,
    bytes_of: Callable[[int], int],
    least: int = 0,
    most: int = _checks.MOST_TOKENS,
) -> int:
    """The most slots that fit: bytes grow with slots.

    Args:
        max_bytes: The bytes that there are.
        bytes_of: Bytes by slots.
        least: The fewest slots, which fit.
        most: How many more slots are of any use.
    """
    slots, too_many = least, least + min(max_bytes, most) + 1
    while too_many - slots > 1:
        middle = (slots + too_many) // 2
        if bytes_of(middle) > max_bytes:
            too_many = middle
        else:
            slots = middle
    return slots


def group_size_of(widths: Sequence[RowWidths]) -> int | None:
    """A group size in which all these rows can be packed: the usual one if possible."""
    return group_size_for(*(width for of in widths for width in (of.key, of.value)))


@dataclass(frozen=True)
class LayerShare:
    """What is known of a layer for its part of the slots; its cache remembers it for `resize`.

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
        slots = {"slots": self.slots} if self.slots else {}
        shared = {"grid": self.grid, "losses": self.losses}
        return {"heads": self.heads, "widths": widths, **shared, **slots}

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
        heads = _checks.whole("heads", config["heads"], 1)
        sizes = {name: _checks.whole(name, x, 1) for name, x in config["widths"].items()}
        if heads > MOST_HEADS or max(sizes.values()) > WIDEST_ROW:
            raise ValueError(f"A layer cannot have {heads} KV heads with rows of {sizes}.")
        grid, losses = tuple(config["grid"]), tuple(tuple(curve) for curve in config["losses"])
        if losses:
            check_curves(grid, losses)
        if len(losses) not in (0, heads):
            raise ValueError(f"There are losses of {len(losses)} heads for {heads} KV heads.")
        slots = _checks.wholes("slots", config["slots"], 1) if config.get("slots") else ()
        if len(slots) not in (0, heads):
            raise ValueError(f"There are slots of {len(slots)} heads for {heads} KV heads.")
        own = {"packing": packing, "undo": undo, "framed": framed}
        widths = RowWidths(**sizes, **own)  # type: ignore[arg-type]  # each is what it is named
        return cls(heads, widths, grid, losses, tuple(slots))


def bytes_by_stage(settings: CacheSettings, widths: RowWidths) -> list[int]:
    """Bytes of one layer's cache for one sequence, at first and from each stage of its growth on.

    Args:
        settings: The cache's settings, with slots of its heads.
        widths: The widths of its rows in a long conversation.
    """
    slots = [settings.budgets or (), *(stage.budgets for stage in settings.filling)]
    # A stage lasts until the next begins; the last one lasts for good.
    ends = [stage.beyond for stage in settings.filling]
    rows = [*(widths.narrow if end <= FEW else widths for end in ends), widths]
    costs = [of.cost(settings.policy, settings.remembers) for of in rows]
    return [sum(map(cost.of, of_heads)) for cost, of_heads in zip(costs, slots, strict=True)]
