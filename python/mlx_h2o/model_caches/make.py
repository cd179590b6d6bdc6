"""Caches for whole models: which layers can be bounded, and with how many slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_h2o._utils.byte_size import USUAL_CONTEXT
from mlx_h2o._utils.cache_lists import entries, replaced
from mlx_h2o.attention.backends.choice import pack
from mlx_h2o.budgets.layer_budgets import slots_given
from mlx_h2o.budgets.options import CacheOptions
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_store import found_profile
from mlx_h2o.budgets.settings import CacheSettings, ModelSettings
from mlx_h2o.budgets.tensor_parallel import ranks_of
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.caches.latent import LatentKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.caches.shared import SharedKVCache
from mlx_h2o.calibration.first_use import first_profile
from mlx_h2o.calibration.scaling_build import Frames, found_frames, made_frames
from mlx_h2o.integration import own_attention
from mlx_h2o.integration.layer_probe import LayerKind, identity_by_kinds, layer_kinds
from mlx_h2o.integration.recorder import trained_context
from mlx_h2o.integration.refusals import check_settings, require_boundable
from mlx_h2o.integration.rope_probe import ropes_in_keys
from mlx_h2o.integration.stock_caches import caches_beneath, is_asked, stock_caches
from mlx_h2o.loading.identity import ModelIdentity, architecture
from mlx_h2o.model_caches.plan import AtHand, planned, retrieval_heads
from mlx_h2o.policies import Policy
from mlx_h2o.spill.layer_rows import spilling
from mlx_h2o.spill.setting import Spill
from mlx_h2o.storage.key_scaling import Frame

#: Bytes of an element of a 16-bit cache.
PLAIN_ELEMENT = 2


def make_prompt_cache(
    model: nn.Module, max_size: int | None = None, **options: Unpack[CacheOptions]
) -> list[Any]:
    """The model's own caches, with every plain KV cache replaced by a bounded one.

    Other caches stay as they are (`describe` lists them, with reasons).

    Args:
        model: An mlx-lm model.
        max_size: Tokens' worth of memory per KV head, on average, the remainder included. The
            alternative is `max_bytes`.
        options: The options that `CacheOptions` explains.

    Returns:
        A cache for each entry of the model's own list, to be passed on as `prompt_cache`.

    Raises:
        ValueError: An option is unknown or invalid, two exclude each other, or they do not suit
            this model.
    """
    if is_asked(model):  # called by its own make_cache, whose function this one replaces
        return caches_beneath(model)
    return bounded_caches(model, ModelSettings.of(max_size, **options))


def bounded_caches(
    model: nn.Module, settings: ModelSettings, kinds: Sequence[LayerKind] | None = None
) -> list[Any]:
    """The model's own caches, with every plain KV cache replaced by one with these settings.

    Args:
        model: An mlx-lm model.
        settings: Settings of all caches.
        kinds: The kinds of its layers, if not `layer_kinds` of the model.

    Raises:
        NothingToBound: No cache of the model grows.
        ValueError: The settings do not suit the model, or it cannot be bounded.
    """
    name = architecture(model)
    kinds, ranks = layer_kinds(model) if kinds is None else kinds, ranks_of(model)
    if ranks is not None:
        kinds = [replace(kind, heads=kind.heads * ranks.count) for kind in kinds]
    caches = stock_caches(model)
    require_boundable(name, kinds, caches)
    attending = all(kind.routed for kind in kinds)
    own_attention.warn_if_changed(type(model).__module__)
    policy = settings.policy_for(attending)
    check_settings(name, kinds, settings, policy)
    answers = settings.remainder and not any(kind.derived for kind in kinds)
    context = trained_context(model, USUAL_CONTEXT)
    settings = settings.in_bytes(sum(map(plain_bytes, kinds)), context)
    at_hand = _at_hand(name, model, kinds, caches, settings, policy)
    remembers = answers or policy.uses_evicted_mean
    plan = planned(kinds, settings, policy, remembers, at_hand)
    own = [layer if ranks is None else layer.of_rank(ranks) for layer in plan.layers]
    layers = iter(zip(kinds, own, strict=True))

    def bounded() -> BoundedKVCache:
        kind, layer = next(layers)
        of_layer = CacheSettings(
            budgets=layer.budgets,
            policy=policy,
            remainder=answers,
            packing=plan.packing,
            attending=attending,
            undo=settings.undo,
            saturation=layer.saturation,
            frame=layer.frame,
            filling=layer.filling,
            rope=layer.rope,
            ranks=1 if ranks is None else ranks.count,
            pins=settings.pins,
        )
        of_kind = class_for(kind) if attending else PlainRowsKVCache
        cache = of_kind.of(of_layer, layer.share)
        cache.choice, cache.sharers = plan.choice, kind.sharers
        return cache

    made = [replaced(entry, bounded) for entry in caches]
    if settings.spill is not None:
        spill_to(made, settings.spill, retrieval_heads(at_hand.profile, len(kinds)))
    return made


def spill_to(
    cache: Sequence[Any], spill: Spill, heads: Sequence[frozenset[int] | None] | None = None
) -> None:
    """Let the bounded caches of a list, which are empty, have one file of their rows.

    Layers to which no rows come back have none.

    Args:
        cache: The model's caches.
        spill: Where the file is to be, and how rows come back from it.
        heads: The KV heads of each layer to which evicted rows come back; None means all.
    """
    layers = [entry for _, entry in entries(cache) if isinstance(entry, BoundedKVCache)]
    written = [
        (layer, back)
        for layer, back in zip(layers, heads or [None] * len(layers), strict=True)
        if back != frozenset()
    ]
    if not written:
        return
    ways = spilling(spill, [(layer.packing, layer.frame) for layer, _ in written], pack)
    for (layer, back), way in zip(written, ways, strict=True):
        layer.spill_to(way, back)


def _at_hand(
    name: str,
    model: nn.Module,
    kinds: Sequence[LayerKind],
    caches: Sequence[Any],
    settings: ModelSettings,
    policy: Policy,
) -> AtHand:
    """The data for a plan: slots that the caller gave, or a profile, key scaling, and more."""
    attending = all(kind.routed for kind in kinds)
    one_mask = not attending or any(kind.derived for kind in kinds)
    shared = any(kind.sharers > 1 for kind in kinds)
    heads = [kind.heads for kind in kinds]
    identity = identity_by_kinds(model, kinds)
    slots = profile = frames = None
    why = ""
    if settings.layer_budgets is not None:
        slots = slots_given(settings.layer_budgets, caches, heads, one_mask)
    else:
        uniform = one_mask or shared or policy.unit == "layer"
        profile = _profile_for(model, identity, settings.profile, uniform)
        if profile is None and not uniform and settings.profile is None:
            profile, why = _first_profile(model, identity, settings)
    if settings.frames is None and policy.suits_frames and not one_mask:
        frames = _frames_at_hand(model, identity, profile, settings, shared)
    given = frames_of_caches(caches, settings.frames)
    ropes = ropes_in_keys(name, model, len(kinds)) if settings.rolls else None
    values_packable = not any(kind.derived for kind in kinds) and not settings.rolls
    return AtHand(profile, frames, given, slots, ropes, why, values_packable)


def class_for(kind: LayerKind) -> type[BoundedKVCache]:
    """The cache class of a layer that attends through this library."""
    if kind.derived:
        return LatentKVCache
    return SharedKVCache if kind.sharers > 1 else H2OKVCache


def plain_bytes(kind: LayerKind) -> int:
    """Bytes of one token of a layer in a 16-bit cache."""
    return kind.heads * (kind.widths.key + kind.widths.value) * PLAIN_ELEMENT


def _frames_at_hand(
    model: nn.Module,
    identity: ModelIdentity,
    profile: Profile | None,
    settings: ModelSettings,
    shared: bool,
) -> Frames | None:
    """Key scaling (`Frame`) for packed keys, made now if bits are left to us; None without.

    It is not made for keys that layers share, or of which this process has only a part, nor if
    nothing may be measured.
    """
    if settings.packing.k_bits is None and not settings.chooses_bits:
        return None
    frames = found_frames(identity, profile)
    if frames is not None or not settings.chooses_bits or settings.measures == "never":
        return frames
    if shared or ranks_of(model) is not None:
        return None
    return made_frames(model, identity)


def frames_of_caches(caches: Sequence[Any], frames: Any) -> list[Frame | None]:
    """The key scaling of each plain KV cache of a model's list, including members of a CacheList.

    Args:
        caches: The model's own caches.
        frames: As in `ModelSettings`.

    Raises:
        ValueError: There is not one entry for each cache, or one for a cache that is not plain KV.
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
                f"frames[{i}] is for a {type(entry).__name__}, which is not a plain KV cache: "
                "it must be None."
            )
        of_plain += [frame] * plain
    return of_plain


def _first_profile(
    model: nn.Module, identity: ModelIdentity, settings: ModelSettings
) -> tuple[Profile | None, str]:
    """A profile that is measured now, or None, and the reason."""
    if settings.max_bytes is None:
        return None, ""
    if settings.measures == "never":
        return None, 'profile="never"'
    if ranks_of(model) is not None:
        return None, "this process has a part of the model"
    found = first_profile(model, identity)
    return (found, "") if isinstance(found, Profile) else (None, found)


def _profile_for(
    model: nn.Module,
    identity: ModelIdentity,
    budgets: str | Path | Profile | None,
    uniform: bool,
) -> Profile | None:
    """The profile to share slots out by, or None for uniform budgets."""
    if budgets == "uniform" or (budgets is None and uniform):
        return None
    if uniform:
        raise ValueError(
            "All heads need the same budget here (one mask serves them all, layers share keys, or "
            'the policy\'s unit is the layer): pass budgets="uniform".'
        )
    if budgets is not None:
        profile = budgets if isinstance(budgets, Profile) else Profile.load(budgets)
        profile.require(identity)
        return profile
    return found_profile(model, identity)
