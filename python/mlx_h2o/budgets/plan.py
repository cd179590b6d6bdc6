"""The plan of a model's memory: how bytes become slots and bits of each layer and KV head.

`plan_of` decides how rows are stored. The `Plan` that it returns has the slots of each layer on
average (`means`), of each head by the model's profile (`slots`), and as the conversation grows
(`stages`, by `budgets/growth.py`). What rows, slots and heads cost is in `budgets/cost.py`.

A size, in tokens or in bytes, is a total number of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from mlx_h2o.budgets.allocation import scaled
from mlx_h2o.budgets.cost import (
    PLAIN_ELEMENT,
    HeadCost,
    LayerShare,
    RowWidths,
    group_size_of,
    most_slots,
)
from mlx_h2o.budgets.growth import Stage, Stages, stages_of_model, starts_narrow, while_narrow
from mlx_h2o.budgets.profile import LayerFrames, Profile, frames_for
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.budgets.tensor_parallel import Ranks
from mlx_h2o.policies import Policy
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import Packing, group_size_for
from mlx_h2o.slots.pins import Span, pinned_from
from mlx_h2o.slots.remainder import SATURATION

if TYPE_CHECKING:
    from mlx_h2o.slots.rope import Rope

#: A head of a profile needs this many tokens to choose from; with one or two there is no choice.
FEWEST_CHOICES = 4
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
ADVICE = "`mlx_h2o calibrate --model MODEL` makes a profile (minutes, once)"


# -- the model and how its rows are stored ---------------------------------------------------------


@dataclass(frozen=True)
class LayerKind:
    """How a model uses one of its plain KV caches (`layer_probe` finds out).

    Attributes:
        heads: Hk.
        widths: Widths of the cache's rows.
        routed: Whether the model asked the cache to attend.
        derived: Whether it attended to keys made of the cached ones (MLA).
        sharers: How many layers attended to its rows.
        indexes: Whether another cache's keys are picked by its rows (sparse attention).
        group: G, the query heads of each KV head (of the first layer that attended).
    """

    heads: int
    widths: RowWidths
    routed: bool
    derived: bool
    sharers: int = 1
    indexes: bool = False
    group: int = 1


def plain_bytes(layer: LayerKind | LayerShare) -> int:
    """Bytes of one token of a layer in a 16-bit cache."""
    return layer.heads * (layer.widths.key + layer.widths.value) * PLAIN_ELEMENT


@dataclass(frozen=True)
class ModelData:
    """What a plan can know of a model: measurements, and what the caller gave for its layers.

    Attributes:
        profile: The model's profile, or None for even shares.
        key_scaling: Key scaling of each layer by context, or None.
        frames: Each layer's key scaling from the caller, or None.
        slots: Slots of each layer's KV heads from the caller; or None.
        ropes: Each layer's RoPE of its keys, if positions are to have no gaps, or None.
        no_profile: The reason that there is no profile where one would help; otherwise empty.
    """

    profile: Profile | None = None
    key_scaling: dict[int, LayerFrames] | None = None
    frames: Sequence[Frame | None] = ()
    slots: list[list[int]] | None = None
    ropes: Sequence[Rope | None] = ()
    no_profile: str = ""

    def frames_for(self, context: int, layers: int) -> list[Frame | None]:
        """Each layer's measured key scaling for so many positions, or None."""
        if not self.key_scaling:
            return [None] * layers
        each = frames_for(self.key_scaling, context)
        return [Frame(mx.array(centre), mx.array(scale)) for centre, scale in each]


def plan_of(
    kinds: Sequence[LayerKind],
    settings: ModelSettings,
    policy: Policy,
    remembers: bool,
    data: ModelData,
) -> Plan:
    """The plan of a model.

    Args:
        kinds: The model's plain KV caches.
        settings: Settings with a size in slots or bytes, and a context (`ModelSettings.in_bytes`).
        policy: The eviction policy.
        remembers: Whether the caches keep statistics of evicted tokens.
        data: What is known of the model.

    Raises:
        ValueError: Rows cannot be packed so.
    """
    attending, profile = all(kind.routed for kind in kinds), data.profile
    if profile is not None and _rows_return(settings, policy):
        profile = profile.where_rows_return()
    size = settings.max_size, cast(int | None, settings.max_bytes)
    shares = _shares_of(kinds, settings, profile, data)
    plan = Plan(
        *(shares, policy, remembers, attending, *size, data.slots, profile),
        pins=settings.pins,
    )
    packing, choice = settings.packing, ""
    if settings.chooses_bits and attending:
        values_packable = not settings.rolls and not any(kind.derived for kind in kinds)
        packing, choice = _chosen_packing(plan, settings, data, values_packable)
    widths = [kind.widths for kind in kinds]
    packing = packing.fitting([of.key for of in widths], [of.value for of in widths])
    frames = data.frames
    if settings.frames is None and packing.k_bits is not None:
        frames = data.frames_for(cast(int, settings.context), len(kinds))
    plan = plan.stored(packing, [frame is not None for frame in frames])
    return replace(plan, frames=frames, choice=choice)


def _rows_return(settings: ModelSettings, policy: Policy) -> bool:
    """Whether evicted rows come back from a file, so that slots are bought by other losses.

    Caches to which none can come back (`BoundedKVCache.rows_return`) have no profile.
    """
    return settings.spill is not None and policy.needs_attention


def retrieval_heads(profile: Profile | None, layers: int) -> list[frozenset[int] | None]:
    """The KV heads of each layer to which evicted rows come back; None means all."""
    return [None] * layers if profile is None else profile.retrieval_heads()


def _shares_of(
    kinds: Sequence[LayerKind], settings: ModelSettings, profile: Profile | None, data: ModelData
) -> list[LayerShare]:
    """The layers, with the bytes of what their heads hold beside rows, and the profile's losses."""
    shares = []
    returning_to = retrieval_heads(profile, len(kinds))
    for kind, heads in zip(kinds, returning_to, strict=True):
        spill = settings.spill if heads != frozenset() else None
        queries = kind.group * (1 if heads is None else len(heads) / kind.heads)
        widths = replace(
            kind.widths,
            undo=settings.undo,
            spill_bytes=spill.head_bytes(kind.widths, queries) if spill else 0,
            waiting=spill.waiting_rows if spill else 0,
            returning=spill.returns.rows if spill else 0,
        )
        shares.append(LayerShare(kind.heads, widths))
    if profile is not None:
        each = zip(shares, profile.wanted_by_layer(), strict=True)
        shares = [replace(share, grid=profile.grid, losses=losses) for share, losses in each]
    if data.slots is not None and len({n for of_layer in data.slots for n in of_layer}) > 1:
        pairs = zip(shares, data.slots, strict=True)
        shares = [replace(share, slots=tuple(slots)) for share, slots in pairs]
    return shares


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


def _chosen_packing(
    plan: Plan, settings: ModelSettings, data: ModelData, values_packable: bool
) -> tuple[Packing, str]:
    """How rows are stored if bits are left to us, and the reason."""
    measured = data.profile.measured if data.profile else None
    advice = f"{data.no_profile}; {ADVICE}" if data.no_profile else ADVICE
    if not data.key_scaling or settings.frames is not None:
        # Values need no scaling, and the slots gained are worth more than the loss by packing. Keys
        # stay dense: a few of their channels carry large offsets, and unscaled 8 bits lose 3.7 % on
        # Qwen2.5-0.5B (docs/results/experiments.md).
        group = group_size_for(*(share.widths.value for share in plan.shares))
        why = f"there is no key scaling; {advice}"
        if not values_packable or group is None:
            return settings.packing, f"dense rows: {why}"
        stored = Packing(None, USUAL_BITS, group)
        return stored, f"dense keys and values in {USUAL_BITS} bits: {why}"
    if measured is None or not measured.packing:
        group = group_size_of([share.widths for share in plan.shares])
        if group is None:
            return settings.packing, "dense rows: no group size divides their width"
        return (
            Packing(USUAL_BITS, USUAL_BITS, group),
            f"rows of {USUAL_BITS} bits with key scaling, slots shared out evenly; {advice}",
        )
    # By all of the retrieval loss, also where rows return (`RETURNING_PART`).
    choices = _choices(plan, cast(Profile, data.profile), cast(int, settings.context))
    if not choices:
        return settings.packing, ""
    return _packing(choices[0].bits, measured.group_size), "; ".join(map(str, choices))


def _choices(plan: Plan, profile: Profile, context: int) -> list[Choice]:
    """The slots and loss of each width of rows: the chosen one, then the others by their losses.

    Among the widths whose loss is negligibly above the least, the one with most slots that a
    conversation can use is chosen; among several that keep all tokens, the one with the least loss.

    Args:
        plan: The plan, with rows not packed.
        profile: The model's profile; widths of rows that it does not know are left out.
        context: The most tokens of a conversation.
    """
    measured = profile.measured
    measured_widths = set(measured.packing) if measured and measured.frames else set()
    first, least = plan.at_first, plan.policy.least_budget() + FEWEST_CHOICES
    out = []
    for bits in WIDTHS:
        if bits is not None and bits not in measured_widths:
            continue
        packing = _packing(bits, measured.group_size if measured else 0)
        packed = first.stored(packing, [bits is not None] * len(plan.shares))
        slots = min(packed.slots_that_fit())
        if slots >= least:
            out.append(Choice(bits, slots, profile.loss_of(slots, least, bits, context)))
    out.sort(key=lambda choice: choice.loss)
    near = [choice for choice in out if choice.loss <= out[0].loss + NEGLIGIBLE]
    # `max` takes the first of equals, which has the least loss.
    chosen = max(near, key=lambda choice: min(choice.slots, context), default=None)
    return [] if chosen is None else [chosen, *(choice for choice in out if choice is not chosen)]


def _packing(bits: int | None, group_size: int) -> Packing:
    return Packing(bits, bits, group_size) if bits else Packing()


# -- the slots of every layer and head -------------------------------------------------------------


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer.

    Attributes:
        share: What the layer's part of the slots follows from.
        budgets: Slots of each KV head, at first.
        filling: Budgets that follow as the conversation grows.
        saturation: The remainder's t, for all heads or each.
        frame: The key scaling of packed keys, or None.
    """

    share: LayerShare
    budgets: tuple[int, ...]
    filling: tuple[Stage, ...]
    saturation: float | tuple[float, ...]
    frame: Frame | None

    def of_rank(self, ranks: Ranks) -> LayerPlan:
        """The plan of the heads that a process holds."""
        share, frame, t = self.share, self.frame, self.saturation
        return LayerPlan(
            replace(
                share,
                heads=share.heads // ranks.count,
                losses=ranks.own(share.losses),
                slots=ranks.own(share.slots),
            ),
            ranks.own(self.budgets),
            tuple(Stage(beyond, ranks.own(slots)) for beyond, slots in self.filling),
            t if isinstance(t, float) else ranks.own(t),
            frame and Frame(ranks.own_rows(frame.centre), ranks.own_rows(frame.scale)),
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """A model's memory: a size, and the slots of each layer and KV head that follow from it.

    Attributes:
        shares: The layers, with rows as they will be stored.
        policy: The eviction policy.
        remembers: Whether the caches keep statistics of evicted tokens.
        attending: Whether this library computes the attention.
        max_size: Tokens' worth of memory per KV head on average, the remainder included; or None.
        max_bytes: Bytes for all layers, everything counted, instead of `max_size`; or None.
        fixed_slots: Slots of each layer's KV heads that the caller gave instead of a size; or None.
        profile: The profile by which slots are bought, or None for even shares.
        pins: Spans of positions that are never evicted.
        frames: The key scaling of each layer's packed keys, or None.
        choice: How the bits were chosen, in words; empty if the caller gave them.
    """

    shares: Sequence[LayerShare]
    policy: Policy
    remembers: bool
    attending: bool
    max_size: int | None = None
    max_bytes: int | None = None
    fixed_slots: list[list[int]] | None = None
    profile: Profile | None = None
    pins: tuple[Span, ...] = ()
    frames: Sequence[Frame | None] = ()
    choice: str = ""

    @property
    def layers(self) -> list[LayerPlan]:
        """The plan of each layer.

        Raises:
            ValueError: The size is too small for the policy.
        """
        frames = self.frames or [None] * len(self.shares)
        each = zip(self.shares, self.stages, self._saturations(), frames, strict=True)
        return [LayerPlan(share, *stages, t, frame) for share, stages, t, frame in each]

    @property
    def packing(self) -> Packing:
        """How rows are stored."""
        return self.shares[0].widths.packing

    @property
    def undo(self) -> int:
        """Steps that can be taken back."""
        return self.shares[0].widths.undo

    def stored(self, packing: Packing, framed: Sequence[bool]) -> Plan:
        """The same size for rows that are stored so.

        Args:
            packing: How rows are stored.
            framed: Whether the keys of each layer have key scaling.
        """
        each = zip(self.shares, framed, strict=True)
        return self._with_widths(
            [replace(share.widths, packing=packing, framed=has) for share, has in each]
        )

    @property
    def at_first(self) -> Plan:
        """The same size for a conversation whose positions still fit into few bits."""
        if not starts_narrow(self.max_bytes, self.undo, self.attending):
            return self
        return self._with_widths([share.widths.narrow for share in self.shares])

    def _with_widths(self, widths: Sequence[RowWidths]) -> Plan:
        each = zip(self.shares, widths, strict=True)
        return replace(self, shares=[replace(share, widths=of) for share, of in each])

    # -- slots on average -------------------------------------------------------------------------

    @cached_property
    def least(self) -> int:
        """The fewest slots of a head."""
        return self.policy.least_budget() + (FEWEST_CHOICES if self.profile else 0)

    @cached_property
    def means(self) -> list[int]:
        """Slots per KV head of each layer, on average.

        Raises:
            ValueError: The size is too small for the policy.
        """
        least, policy = self.least, self.policy
        if self.max_size is not None:
            name, size = "max_size", self.max_size
            charged = [share.widths.remainder_slots(self.remembers) for share in self.shares]
            means, needed = [size - of_layer for of_layer in charged], least + max(charged)
        else:
            name, size = "max_bytes", cast(int, self.max_bytes)
            means, needed = self.slots_that_fit(), self.bytes_of(least)
        if min(means) < least:
            sinks, recent = policy.sink, policy.recent_slots(least)
            raise ValueError(
                f"{name}={size} is too small: with policy {policy.name!r} each KV head needs "
                f"{least} slots ({sinks} sinks, {recent} recent, the rest to choose from)"
                f"{' and a remainder' if self.remembers else ''}: make {name} at least {needed}, "
                "or lower sink, recent or evict_every."
            )
        return means

    def slots_that_fit(self) -> list[int]:
        """Slots per KV head of each layer that fit into `max_bytes`; 0 where none do.

        Each layer has an equal part of the bytes. Layers that differ only in what their heads hold
        beside the slots, such as rows that wait for a file, have as many slots each instead: a
        profile then shares out the slots of all layers together.
        """
        max_bytes = cast(int, self.max_bytes)
        if self._slots_cost_alike:
            heads: dict[RowWidths, int] = {}
            for share in self.shares:
                heads[share.widths] = heads.get(share.widths, 0) + share.heads
            parts = [(self._cost(widths), count) for widths, count in heads.items()]
            slots = most_slots(max_bytes, lambda n: sum(c * cost.of(n) for cost, c in parts))
            return [slots] * len(self.shares)
        each = max_bytes // len(self.shares)
        costs = [(share.heads, self._cost(share.widths)) for share in self.shares]
        return [
            most_slots(each, lambda n, h=heads, cost=cost: h * cost.of(n))  # type: ignore[misc]
            for heads, cost in costs
        ]

    def bytes_of(self, slots: int) -> int:
        """The fewest bytes of which `slots_that_fit` makes so many slots in every layer."""
        each = [share.heads * self._cost(share.widths).of(slots) for share in self.shares]
        return sum(each) if self._slots_cost_alike else len(each) * max(each)

    def _cost(self, widths: RowWidths) -> HeadCost:
        return widths.cost(self.policy, self.remembers)

    @cached_property
    def _slots_cost_alike(self) -> bool:
        """Whether one more slot for each head costs every layer as many bytes."""
        of_slots = {
            (share.heads, share.widths.slot_bytes(self.policy), share.widths.recent_row_bytes)
            for share in self.shares
        }
        return len(of_slots) == 1

    # -- slots of each head -----------------------------------------------------------------------

    @cached_property
    def slots(self) -> list[list[int]]:
        """Slots of each layer's KV heads in a long conversation.

        Raises:
            ValueError: The size is too small for the policy.
        """
        if self.fixed_slots is not None:
            return self.fixed_slots
        if all(share.slots for share in self.shares):
            return self._slots_in_proportion()
        sizes = []
        by_mean: dict[int, list[list[int]]] = {}  # layers of equal widths have equal means
        for layer, (share, mean) in enumerate(zip(self.shares, self.means, strict=True)):
            if self.profile is None:
                sizes.append([mean] * share.heads)
                continue
            if mean not in by_mean:
                by_mean[mean] = self.profile.budgets(mean, self._least_beside_pins(mean))
            sizes.append(by_mean[mean][layer])
        if not self.attending:
            # All layers use one mask, so all must hold the same number of tokens.
            fewest = min(min(layer) for layer in sizes)
            sizes = [[fewest] * len(layer) for layer in sizes]
        return sizes

    def _least_beside_pins(self, mean: int) -> int:
        """The fewest slots of a head by a profile: `least`, or more where pins need them.

        A layer makes room for its pins with its own slots alone, so a layer that deserves few slots
        would have to refuse pins that the model as a whole has room for.
        """
        if not self.pins:
            return self.least
        pinned = pinned_from(self.pins, self.policy.sink)
        return max(self.least, min(self.policy.least_budget(pinned) + FEWEST_CHOICES, mean))

    def _slots_in_proportion(self) -> list[list[int]]:
        """Slots in the proportions of those that the caller gave the layers before.

        Raises:
            ValueError: The size is too small for the policy.
        """
        shares, policy, remembers = self.shares, self.policy, self.remembers
        least, heads = policy.least_budget(), sum(share.heads for share in shares)

        def of(total: int) -> list[list[int]]:
            each = iter(scaled([slots for share in shares for slots in share.slots], total, least))
            return [[next(each) for _ in range(share.heads)] for share in shares]

        if self.max_size is not None:
            charged = [share.widths.remainder_slots(remembers) for share in shares]
            parts = zip(shares, charged, strict=True)
            total = sum(share.heads * (self.max_size - charge) for share, charge in parts)
            if total < least * heads:
                raise ValueError(
                    f"max_size={self.max_size} is too small: with policy {policy.name!r} each KV "
                    f"head needs {least} slots: make it at least {least + max(charged)}."
                )
            return of(total)
        costs = [self._cost(share.widths) for share in shares]

        def bytes_of(total: int) -> int:
            each = zip(costs, of(total), strict=True)
            return sum(cost.of(slots) for cost, layer in each for slots in layer)

        max_bytes, total = cast(int, self.max_bytes), least * heads
        if bytes_of(total) > max_bytes:
            raise ValueError(
                f"max_bytes={max_bytes} is too small: with policy {policy.name!r} each KV head "
                f"needs {least} slots: make it at least {bytes_of(total)}."
            )
        # Bytes grow with slots, except for rounding where rows differ from layer to layer.
        return of(most_slots(max_bytes, bytes_of, total, max_bytes))

    def _saturations(self) -> list[float | tuple[float, ...]]:
        """Each layer's saturations: its heads' better orders, if the profile has this policy's."""
        if self.profile is None or not self.profile.knows(self.policy.name):
            return [SATURATION] * len(self.shares)
        return [tuple(of_layer) for of_layer in self.profile.saturation(self.slots)]

    # -- growth with the conversation -------------------------------------------------------------

    @property
    def stages(self) -> list[Stages]:
        """Each layer's slots at first, and those that follow as the conversation grows.

        Raises:
            ValueError: The size is too small for the policy.
        """
        long, at_first = self._stages_of_one_width(), self.at_first
        if at_first is self:
            return long
        short = at_first._stages_of_one_width()
        return [while_narrow(*of_layer) for of_layer in zip(short, long, strict=True)]

    def _stages_of_one_width(self) -> list[Stages]:
        """The stages if positions had one width throughout."""
        # The step at which slots are shared out anew depends on drafts (`Journal.settled`), and
        # tokens with a draft model must be those without: with `undo` all use the last shares.
        if self.profile is None or self.undo:
            return [(tuple(of_layer), ()) for of_layer in self.slots]
        least = self._least_beside_pins(min(self.means))
        return stages_of_model(self.slots, self.means, least, self.profile)
