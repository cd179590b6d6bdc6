"""The plan of a size: each layer's bits, key scaling, slots, and later budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx

from mlx_h2o._utils.checks import MOST_TOKENS
from mlx_h2o.budgets.bit_choice import USUAL_BITS, choices, packed_in
from mlx_h2o.budgets.cost import (
    LayerShare,
    RowWidths,
    bytes_of_model,
    group_size_of,
    slots_of_model,
)
from mlx_h2o.budgets.growth import Stage, Stages, stages_of, starts_narrow, while_narrow
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_data import LayerFrames, frames_for
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.budgets.tensor_parallel import Ranks
from mlx_h2o.integration.layer_probe import LayerKind
from mlx_h2o.policies import Policy
from mlx_h2o.spill.row_file import WAITING
from mlx_h2o.storage.key_scaling import Frame
from mlx_h2o.storage.packed import Packing, group_size_for
from mlx_h2o.storage.pins import pinned_from
from mlx_h2o.storage.remainder import SATURATION
from mlx_h2o.storage.rope import Rope

# A head of a profile needs this many tokens to choose from; with one or two there is no choice.
FEWEST_CHOICES = 4
# Slots per KV head that no conversation fills: later stages would be beyond all positions.
NEVER_FULL = MOST_TOKENS // 64
ADVICE = "`mlx_h2o calibrate --model MODEL` makes a profile (minutes, once)"


@dataclass(frozen=True)
class AtHand:
    """The data for a plan: profile, key scaling, and slots that the caller gave.

    Attributes:
        profile: The profile by which slots are shared out, or None for even shares.
        frames: Key scaling (`Frame`) of each layer by context, or None.
        given: Each layer's key scaling from the caller.
        slots: Slots of each layer's KV heads, if the caller gave them.
        ropes: The RoPE of each layer's keys, if positions are to have no gaps.
        without: The reason that there is no profile where one would help; otherwise empty.
        values_packable: Whether the caches can hold packed values beside dense keys.
    """

    profile: Profile | None
    frames: dict[int, LayerFrames] | None
    given: Sequence[Frame | None]
    slots: list[list[int]] | None = None
    ropes: Sequence[Rope] | None = None
    without: str = ""
    values_packable: bool = True

    def frame(self, layer: int, context: int) -> Frame | None:
        """A layer's key scaling for so many positions, or None."""
        if not self.frames:
            return None
        centre, scale = frames_for(self.frames, context)[layer]
        return Frame(mx.array(centre), mx.array(scale))


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer.

    Attributes:
        share: The layer's share of the model's budget.
        budgets: Slots of each KV head, at first.
        saturation: The remainder's t, for all heads or each.
        frame: The key scaling of packed keys, or None.
        filling: Budgets that follow as the conversation grows.
        rope: The RoPE of the layer's keys, if positions are to have no gaps.
    """

    share: LayerShare
    budgets: tuple[int, ...]
    saturation: float | tuple[float, ...]
    frame: Frame | None
    filling: tuple[Stage, ...] = ()
    rope: Rope | None = None

    def of_rank(self, ranks: Ranks) -> LayerPlan:
        """The plan of the heads that a process holds."""
        share, frame, t = self.share, self.frame, self.saturation
        heads = share.heads // ranks.count
        return replace(
            self,
            share=replace(
                share, heads=heads, losses=ranks.own(share.losses), slots=ranks.own(share.slots)
            ),
            budgets=ranks.own(self.budgets),
            saturation=t if isinstance(t, float) else ranks.own(t),
            frame=frame and Frame(ranks.own_rows(frame.centre), ranks.own_rows(frame.scale)),
            filling=tuple(Stage(beyond, ranks.own(slots)) for beyond, slots in self.filling),
        )


@dataclass(frozen=True)
class Plan:
    """The plans of all layers.

    Attributes:
        packing: How rows are stored.
        layers: One for each plain KV cache.
        choice: How the bits were chosen, in words; empty if the caller gave them.
    """

    packing: Packing
    layers: list[LayerPlan]
    choice: str = ""


def retrieval_heads(profile: Profile | None, layers: int) -> list[frozenset[int] | None]:
    """The KV heads of each layer to which evicted rows come back; None means all."""
    return [None] * layers if profile is None else profile.retrieval_heads()


def planned(
    kinds: Sequence[LayerKind],
    settings: ModelSettings,
    policy: Policy,
    remembers: bool,
    at_hand: AtHand,
) -> Plan:
    """The plan of each layer.

    Args:
        kinds: The model's plain KV caches.
        settings: Settings with a size in slots or bytes.
        policy: The eviction policy.
        remembers: Whether the caches keep statistics of evicted tokens.
        at_hand: The data for the plan.

    Raises:
        ValueError: The size is too small for the policy.
    """
    attending = all(kind.routed for kind in kinds)
    profile = _profile_to_buy_by(settings, policy, at_hand.profile)
    own = _own_widths(kinds, settings, profile)
    shares = [LayerShare(kind.heads, widths) for kind, widths in zip(kinds, own, strict=True)]
    if profile is not None:
        shares = [
            replace(share, grid=profile.grid, losses=losses)
            for share, losses in zip(shares, profile.wanted_by_layer(), strict=True)
        ]
    packing, choice = settings.packing, ""
    if settings.chooses_bits and attending:
        first = _narrow(shares, settings, attending)
        # By all of the retrieval loss, also where rows return (`RETURNING_PART`).
        packing, choice = _chosen_packing(first, settings, policy, remembers, at_hand)
    packing = packing.fitting([each.key for each in own], [each.value for each in own])
    frames = list(at_hand.given)
    if settings.frames is None and packing.k_bits is not None:
        frames = [at_hand.frame(i, cast(int, settings.context)) for i in range(len(shares))]
    shares = [
        replace(share, widths=replace(share.widths, packing=packing, framed=frame is not None))
        for share, frame in zip(shares, frames, strict=True)
    ]
    if at_hand.slots is not None:
        shares = _with_given(shares, at_hand.slots)

    def sizes_of(shares: Sequence[LayerShare]) -> list[list[int]]:
        if at_hand.slots is not None:
            return at_hand.slots
        return slots_of_layers(shares, settings, policy, remembers, attending, profile)

    sizes = sizes_of(shares)
    stages = fillings(shares, sizes_of, settings, policy, remembers, attending, profile)
    ropes: Sequence[Rope | None] = at_hand.ropes or [None] * len(shares)
    layers = [
        LayerPlan(share, budgets, t, frame, later, rope)
        for share, t, frame, (budgets, later), rope in zip(
            shares, saturations(profile, policy, sizes), frames, stages, ropes, strict=True
        )
    ]
    return Plan(packing, layers, choice)


def _profile_to_buy_by(
    settings: ModelSettings, policy: Policy, profile: Profile | None
) -> Profile | None:
    """The profile by which slots are bought: another where evicted rows come back from a file.

    Caches to which none can come back (`BoundedKVCache.rows_return`) have no profile.
    """
    if profile is None or settings.spill is None or not policy.needs_attention:
        return profile
    return profile.where_rows_return()


def _own_widths(
    kinds: Sequence[LayerKind], settings: ModelSettings, profile: Profile | None
) -> list[RowWidths]:
    """The widths of each layer's rows, with the bytes of what its heads hold beside them."""
    looking = retrieval_heads(profile, len(kinds))
    own = []
    for kind, heads in zip(kinds, looking, strict=True):
        spill = settings.spill if heads != frozenset() else None
        queries = kind.group * (1 if heads is None else len(heads) / kind.heads)
        widths = replace(
            kind.widths,
            undo=settings.undo,
            spill_bytes=spill.head_bytes(kind.widths, queries) if spill else 0,
            waiting=WAITING if spill else 0,
            returning=spill.returns.rows if spill else 0,
        )
        own.append(widths)
    return own


def _chosen_packing(
    shares: Sequence[LayerShare],
    settings: ModelSettings,
    policy: Policy,
    remembers: bool,
    at_hand: AtHand,
) -> tuple[Packing, str]:
    """How rows are stored if bits are left to us, and the reason."""
    profile = at_hand.profile
    advice = f"{at_hand.without}; {ADVICE}" if at_hand.without else ADVICE
    if not at_hand.frames or settings.frames is not None:
        return _packing_without_frames(shares, settings, at_hand, advice)
    if profile is None or profile.measured is None or not profile.measured.packing:
        fits = group_size_of([share.widths for share in shares])
        if fits is None:
            return settings.packing, "dense rows: no group size divides their width"
        return (
            Packing(USUAL_BITS, USUAL_BITS, fits),
            f"rows of {USUAL_BITS} bits with key scaling, slots shared out evenly; {advice}",
        )
    found = choices(
        shares,
        cast(int, settings.max_bytes),
        profile,
        policy,
        remembers,
        policy.least_budget() + FEWEST_CHOICES,
        cast(int, settings.context),
    )
    if not found:
        return settings.packing, ""
    group = profile.measured.group_size
    packing = packed_in(shares[0], found[0].bits, group).widths.packing
    return packing, "; ".join(map(str, found))


def _packing_without_frames(
    shares: Sequence[LayerShare], settings: ModelSettings, at_hand: AtHand, advice: str
) -> tuple[Packing, str]:
    """How rows are stored if keys have no key scaling: dense keys, and packed values.

    Values need no scaling, and the slots gained are worth more than the loss by packing. Keys stay
    dense: a few of their channels carry large offsets, and unscaled 8 bits lose 3.7 % on
    Qwen2.5-0.5B (docs/results/experiments.md).
    """
    groups = group_size_for(*(share.widths.value for share in shares))
    why = f"there is no key scaling; {advice}"
    if not at_hand.values_packable or groups is None:
        return settings.packing, f"dense rows: {why}"
    return (
        Packing(None, USUAL_BITS, groups),
        f"dense keys and values in {USUAL_BITS} bits: {why}",
    )


def saturations(
    profile: Profile | None, policy: Policy, sizes: Sequence[Sequence[int]]
) -> list[float | tuple[float, ...]]:
    """Each layer's saturations: its heads' better orders, if a profile was made with this policy.

    Args:
        profile: The model's profile, or None.
        policy: The eviction policy.
        sizes: Slots of the layers' heads.
    """
    if profile is None or not profile.knows(policy.name):
        return [SATURATION] * len(sizes)
    return [tuple(of_layer) for of_layer in profile.saturation(sizes)]


def _with_given(shares: Sequence[LayerShare], sizes: Sequence[Sequence[int]]) -> list[LayerShare]:
    """Shares with the slots that the caller gave, unless all heads have the same number."""
    if len({slots for of_layer in sizes for slots in of_layer}) == 1:
        return list(shares)
    given = zip(shares, sizes, strict=True)
    return [replace(share, slots=tuple(slots)) for share, slots in given]


def _narrow(
    shares: Sequence[LayerShare], settings: ModelSettings, attending: bool
) -> list[LayerShare]:
    """The layers' shares with positions as wide as they are at first."""
    if not starts_narrow(cast(int | None, settings.max_bytes), settings.undo, attending):
        return list(shares)
    return [replace(share, widths=share.widths.narrow) for share in shares]


def fillings(
    shares: Sequence[LayerShare],
    sizes_of: Callable[[Sequence[LayerShare]], list[list[int]]],
    settings: ModelSettings,
    policy: Policy,
    remembers: bool,
    attending: bool,
    profile: Profile | None,
) -> list[Stages]:
    """Each layer's budgets at first, and those that follow as the conversation grows.

    Args:
        shares: The shares of all layers, in long conversations.
        sizes_of: The function that gives the final slots of the layers' KV heads for such shares.
        settings: Settings with a size.
        policy: The eviction policy.
        remembers: Whether the caches keep statistics of evicted tokens.
        attending: Whether the layers attend through this library.
        profile: The profile by which slots are shared out, or None.
    """

    def stages_by(shares: Sequence[LayerShare]) -> list[Stages]:
        sizes = sizes_of(shares)
        # The step at which slots are shared out anew depends on drafts (`Journal.settled`), and
        # tokens with a draft model must be those without: with `undo` all use the last shares.
        if profile is None or settings.undo or settings.layer_budgets is not None:
            return [(tuple(of_layer), ()) for of_layer in sizes]
        least = policy.least_budget() + FEWEST_CHOICES
        means = _mean_slots(shares, settings, policy, remembers, least)
        roomy = _beside_pins(least, min(means), settings, policy)
        return shared_out_anew(sizes, means, roomy, profile)

    long = stages_by(shares)
    narrow = _narrow(shares, settings, attending)
    if narrow == list(shares):
        return long
    short = stages_by(narrow)
    return [while_narrow(*of_layer) for of_layer in zip(short, long, strict=True)]


def shared_out_anew(
    sizes: Sequence[Sequence[int]], means: Sequence[int], least: int, profile: Profile
) -> list[Stages]:
    """The stages with positions of one width: no token is evicted while all of them fit.

    Layers whose rows have different widths have different means. Their slots are shared out once,
    when the first of them is full, since each layer's size at a stage in between is not known.

    Args:
        sizes: Slots of each layer's KV heads in the end.
        means: Mean slots of each layer's KV heads, before a profile shares them out.
        least: Slots that every head must have.
        profile: The profile by which they were shared out.
    """
    if min(means) >= NEVER_FULL:
        return [((mean,) * len(of), ()) for mean, of in zip(means, sizes, strict=True)]
    if len(set(means)) > 1:
        full = min(means)
        return [
            ((mean,) * len(of_layer), (Stage(full, tuple(of_layer)),))
            for mean, of_layer in zip(means, sizes, strict=True)
        ]
    first, *later = stages_of(profile, means[0], least)
    return [
        (
            tuple(first[1][layer]),
            tuple(Stage(beyond, tuple(budgets[layer])) for beyond, budgets in later),
        )
        for layer in range(len(sizes))
    ]


def slots_of_layers(
    shares: Sequence[LayerShare],
    settings: ModelSettings,
    policy: Policy,
    remembers: bool,
    attending: bool,
    profile: Profile | None,
) -> list[list[int]]:
    """Slots of each layer's KV heads.

    Args:
        shares: The layers' shares.
        settings: Settings of all layers.
        policy: The eviction policy.
        remembers: Whether the caches keep statistics of evicted tokens.
        attending: Whether this library computes the attention.
        profile: The profile by which slots are shared out, or None for even shares.

    Raises:
        ValueError: The size is too small for the policy.
    """
    sizes = []
    shared_out: dict[int, list[list[int]]] = {}  # by mean: layers of equal widths have equal ones
    least = policy.least_budget() + (FEWEST_CHOICES if profile else 0)
    means = _mean_slots(shares, settings, policy, remembers, least)
    for layer, (share, mean) in enumerate(zip(shares, means, strict=True)):
        if profile is None:
            sizes.append([mean] * share.heads)
        else:
            if mean not in shared_out:
                roomy = _beside_pins(least, mean, settings, policy)
                shared_out[mean] = profile.budgets(mean, roomy)
            sizes.append(shared_out[mean][layer])
    if not attending:
        # All layers use one mask, so all must hold the same number of tokens.
        fewest = min(min(layer) for layer in sizes)
        sizes = [[fewest] * len(layer) for layer in sizes]
    return sizes


def _beside_pins(least: int, mean: int, settings: ModelSettings, policy: Policy) -> int:
    """The fewest slots of a head by a profile: `least`, or more where pins need them.

    A layer makes room for its pins with its own slots alone, so a layer that deserves few slots
    would have to refuse pins that the model as a whole has room for.

    Args:
        least: The fewest slots without pins.
        mean: Slots a head, on average.
        settings: Settings of all layers.
        policy: The eviction policy.
    """
    if not settings.pins:
        return least
    pinned = pinned_from(settings.pins, policy.sink)
    return max(least, min(policy.least_budget(pinned) + FEWEST_CHOICES, mean))


def _mean_slots(
    shares: Sequence[LayerShare],
    settings: ModelSettings,
    policy: Policy,
    remembers: bool,
    least: int,
) -> list[int]:
    """Slots per KV head of each layer, on average.

    Raises:
        ValueError: Fewer than `least` fit.
    """
    if settings.max_size is not None:
        name, given = "max_size", settings.max_size
        charged = [share.widths.remainder_slots(remembers) for share in shares]
        needed = least + max(charged)
        means = [given - of_layer for of_layer in charged]
    else:
        name, given = "max_bytes", cast(int, settings.max_bytes)
        needed = bytes_of_model(least, shares, policy, remembers)
        means = slots_of_model(shares, given, policy, remembers)
    if min(means) < least:
        sinks, recent = policy.sink, policy.recent_slots(least)
        raise ValueError(
            f"{name}={given} is too small: with policy {policy.name!r} each KV head needs {least} "
            f"slots ({sinks} sinks, {recent} recent, the rest to choose from)"
            f"{' and a remainder' if remembers else ''}: make {name} at least {needed}, or lower "
            "sink, recent or evict_every."
        )
    return means
