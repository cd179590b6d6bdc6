"""Caches for whole models: which layers can be bounded, and with how many slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_h2o.bounded_cache import BoundedKVCache
from mlx_h2o.budget import LayerShare, bytes_for_slots, slots_for_bytes
from mlx_h2o.cache_lists import entries, replaced
from mlx_h2o.frame import Frame
from mlx_h2o.layer_kinds import LayerKind, layer_kinds
from mlx_h2o.model_identity import identity_of
from mlx_h2o.packed import DEFAULT_GROUP_SIZE
from mlx_h2o.policies import Policy
from mlx_h2o.profile import Profile
from mlx_h2o.profile_places import found_profile
from mlx_h2o.remainder import SATURATION
from mlx_h2o.settings import CacheSettings, ModelSettings
from mlx_h2o.stock import caches_beneath, is_asked, stock_caches

# A head of a profile that could only choose among one or two tokens would choose nothing.
FEWEST_CHOICES = 4


class NothingToBound(ValueError):
    """A model whose memory is bounded already."""


def make_prompt_cache(
    model: nn.Module,
    max_size: int | None = None,
    *,
    max_bytes: int | None = None,
    policy: str | Policy | None = None,
    remainder: bool = True,
    budgets: str | Path | Profile | None = None,
    bits: int | None = None,
    k_bits: int | None = None,
    v_bits: int | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    recent_bits: int | None = None,
    undo: int = 0,
    frames: Sequence[Frame | None] | Literal[False] | str | None = None,
    **settings: Any,
) -> list[Any]:
    """The model's own caches, with every plain KV cache replaced by a bounded one.

    Sliding-window, state-space and other caches stay as the model made them (`describe` tells
    which, and why).

    Args:
        model: An mlx-lm model.
        max_size: Tokens' worth of memory per KV head and layer, on average; the remainder of the
            evicted is charged against it.
        max_bytes: Instead: bytes for all bounded layers together and one sequence, everything
            counted.
        policy: A policy, or its name; the default is "distinct" (in models that attend by
            themselves in its form that looks at keys only).
        remainder: Whether evicted tokens go on answering.
        budgets: "uniform", a `Profile`, or the path of one. By default the model's own profile
            where one ships with mlx-h2o or lies beside its weights (see `mlx_h2o.load`).
        bits: Store keys and values in so many bits (2, 3, 4, 5, 6 or 8); None stores them as they
            come.
        k_bits: Of keys alone, instead of `bits`.
        v_bits: Of values alone, instead of `bits`.
        group_size: Elements that share a scale and a bias: 32, 64 or 128.
        recent_bits: Of the newest tokens, where that is to differ (16: the model's own dtype).
        undo: How many of the last tokens can be taken back after evictions; speculative decoding
            needs as many as it drafts at once.
        frames: In which packed keys are stored: a `Frame` or None for each entry of the model's own
            list of caches, as `frames_of` gives them. False or "none": as they come, which is the
            default.
        settings: Fields of the policy to change, such as `sink`, `recent` or `evict_every`.

    Raises:
        ValueError: No or two sizes, an unknown policy or setting, a budget without room to evict, a
            profile of another model, or a policy that this model cannot run.
    """
    if is_asked(model):  # by its own make_cache, which was replaced by this function
        return caches_beneath(model)
    stored = {"bits": bits, "k_bits": k_bits, "v_bits": v_bits, "group_size": group_size}
    given = {"policy": policy, "remainder": remainder, "budgets": budgets, **stored, **settings}
    given |= {"max_bytes": max_bytes, "recent_bits": recent_bits, "undo": undo, "frames": frames}
    return bounded_caches(model, ModelSettings.of(max_size, **given))


def bounded_caches(model: nn.Module, settings: ModelSettings) -> list[Any]:
    """The model's own caches, with every plain KV cache replaced by one of these settings.

    Raises:
        NothingToBound: The model has no plain KV cache.
        ValueError: The settings do not suit the model.
    """
    name = type(model).__module__.rsplit(".", 1)[-1]
    kinds = layer_kinds(model)
    if not kinds:
        raise NothingToBound(
            f"{name} has no plain KV cache to bound: its memory is bounded already."
        )
    attending = all(kind.routed for kind in kinds)
    derived = any(kind.derived for kind in kinds)
    policy = settings.policy_for(attending)
    _check_kinds(name, settings, policy, attending, derived)
    answers = settings.remainder and not derived
    uniform = derived or not attending or policy.unit == "layer"
    profile = _profile_for(model, kinds, settings.budgets, uniform)
    packing, undo = settings.packing, settings.undo
    caches = stock_caches(model)
    frames = frames_of_caches(caches, settings.frames)
    shares = [
        LayerShare(k.heads, replace(k.widths, packing=packing, undo=undo, framed=bool(frame)))
        for k, frame in zip(kinds, frames, strict=True)
    ]
    if profile is not None:
        shares = [
            replace(share, grid=profile.grid, losses=losses)
            for share, losses in zip(shares, profile.losses, strict=True)
        ]
    remembers = answers or policy.uses_evicted_mean
    sizes = slots_of_layers(shares, settings, policy, remembers, attending, profile)
    orders = _saturations(profile, policy, sizes)
    layers = iter(zip(kinds, shares, sizes, orders, frames, strict=True))

    def bounded() -> BoundedKVCache:
        kind, share, budgets, saturation, frame = next(layers)
        of_layer = CacheSettings(
            budgets=tuple(budgets),
            policy=policy,
            remainder=answers,
            packing=packing,
            attending=attending,
            undo=undo,
            saturation=saturation,
            frame=frame,
        )
        use = "latent" if kind.derived else ""
        return BoundedKVCache.of(of_layer, use if attending else "plain rows", share)

    return [replaced(entry, bounded) for entry in caches]


def frames_of_caches(caches: Sequence[Any], frames: Any) -> list[Frame | None]:
    """The frame of each plain KV cache of a model's list, members of a CacheList too.

    Args:
        caches: The model's own.
        frames: As in `ModelSettings`.

    Raises:
        ValueError: There is not one for each entry, or one where there is no plain KV cache.
    """
    given = frames if isinstance(frames, tuple) else (None,) * len(caches)
    if len(given) != len(caches):
        raise ValueError(
            f"frames has {len(given)} entries, and the model has {len(caches)} caches: give a "
            "Frame or None for each."
        )
    of_plain: list[Frame | None] = []
    for i, (entry, frame) in enumerate(zip(caches, given, strict=True)):
        plain = sum(type(member) is KVCache for _, member in entries([entry]))
        if frame is not None and type(entry) is not KVCache:
            raise ValueError(
                f"frames[{i}] is for a {type(entry).__name__}, which is no plain KV cache: it must "
                "be None."
            )
        of_plain += [frame] * plain
    return of_plain


def _saturations(
    profile: Profile | None, policy: Policy, sizes: Sequence[Sequence[int]]
) -> list[float | tuple[float, ...]]:
    """Each layer's: its heads' better orders, where a profile was made with this policy."""
    if profile is None or not profile.knows(policy.name):
        return [SATURATION] * len(sizes)
    return [tuple(of_layer) for of_layer in profile.saturation(sizes)]


def _check_kinds(
    name: str, settings: ModelSettings, policy: Policy, attending: bool, derived: bool
) -> None:
    """Raise ValueError where a model that attends in its own way cannot have the settings."""
    if not attending and policy.needs_attention:
        raise ValueError(
            f"{name} attends by itself, so policy {policy.name!r} would never see its attention: "
            'choose one that looks at keys only ("keydiff", "streaming", or "distinct" with '
            "mass_weight=0)."
        )
    if settings.packing.packs and (derived or not attending):
        raise ValueError(
            f"{name} attends to keys that this library does not hand out, so they cannot be "
            "packed: leave bits, k_bits and v_bits away."
        )
    if settings.undo and (derived or not attending):
        raise ValueError(
            f"{name} attends to keys that this library does not hand out, so tokens cannot be "
            "taken back one by one: leave undo away."
        )


def slots_of_layers(
    shares: Sequence[LayerShare],
    settings: ModelSettings,
    policy: Policy,
    remembers: bool,
    attending: bool,
    profile: Profile | None,
) -> list[list[int]]:
    """Slots of each layer's KV heads.

    Raises:
        ValueError: The size is too small for the policy.
    """
    sizes = []
    shared_out: dict[int, list[list[int]]] = {}  # layers of equal widths have equal means
    least = policy.least_budget() + (FEWEST_CHOICES if profile else 0)
    for layer, share in enumerate(shares):
        mean = _mean_slots(len(shares), share, settings, policy, remembers, least)
        if profile is None:
            sizes.append([mean] * share.heads)
        else:
            if mean not in shared_out:
                shared_out[mean] = profile.budgets(mean, least)
            sizes.append(shared_out[mean][layer])
    if not attending:
        # One mask serves all layers, so all must hold the same number of tokens.
        fewest = min(min(layer) for layer in sizes)
        sizes = [[fewest] * len(layer) for layer in sizes]
    return sizes


def _mean_slots(
    layers: int,
    share: LayerShare,
    settings: ModelSettings,
    policy: Policy,
    remembers: bool,
    least: int,
) -> int:
    """Slots per KV head of a layer, on average.

    Raises:
        ValueError: They are fewer than `least`.
    """
    if settings.max_size is not None:
        charged = share.widths.remainder_slots(remembers)
        name, given, needed = "max_size", settings.max_size, least + charged
        mean = given - charged
    else:
        assert settings.max_bytes is not None
        name, given = "max_bytes", settings.max_bytes
        needed = layers * bytes_for_slots(least, share.heads, share.widths, policy, remembers)
        mean = 0
        if given >= needed:
            mean = slots_for_bytes(given // layers, share.heads, share.widths, policy, remembers)
    if mean < least:
        sinks, recent = policy.sink, policy.recent_slots(least)
        raise ValueError(
            f"{name}={given} is too small: with policy {policy.name!r} each KV head needs {least} "
            f"slots ({sinks} sinks, {recent} recent, the rest to choose from)"
            f"{' and a remainder' if remembers else ''}: make {name} at least {needed}, or lower "
            "sink, recent or evict_every."
        )
    return mean


def _profile_for(
    model: nn.Module,
    kinds: list[LayerKind],
    budgets: str | Path | Profile | None,
    uniform: bool,
) -> Profile | None:
    """The profile to share slots out by, or None for uniform budgets."""
    if budgets == "uniform" or (budgets is None and uniform):
        return None
    if uniform:
        raise ValueError(
            "All heads need the same budget here (one mask serves them all, or the policy's unit "
            'is the layer): pass budgets="uniform".'
        )
    identity = identity_of(model, [k.heads for k in kinds], [k.widths.key for k in kinds])
    if budgets is not None:
        profile = budgets if isinstance(budgets, Profile) else Profile.load(budgets)
        profile.require(identity)
        return profile
    return found_profile(model, identity)
