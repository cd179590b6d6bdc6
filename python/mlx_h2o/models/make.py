"""Caches for whole models: which layers can be bounded, and with how many slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import mlx.nn as nn

from mlx_h2o._byte_size import USUAL_CONTEXT
from mlx_h2o.attention.backends.choice import pack
from mlx_h2o.budgets.options import CacheOptions
from mlx_h2o.budgets.plan import LayerKind, plain_bytes, plan_of, retrieval_heads
from mlx_h2o.budgets.settings import CacheSettings, ModelSettings
from mlx_h2o.budgets.tensor_parallel import ranks_of
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.conversation import bounded_members
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.hosts import own_attention
from mlx_h2o.hosts.cache_lists import replaced
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.hosts.loaded import language_model
from mlx_h2o.hosts.recorder import trained_context
from mlx_h2o.hosts.refusals import check_settings, require_boundable
from mlx_h2o.hosts.stock_caches import caches_beneath, makes_caches_of, stock_caches
from mlx_h2o.loading.identity import architecture
from mlx_h2o.models.model_data import model_data
from mlx_h2o.spill.setting import Spill


def make_prompt_cache(
    model: nn.Module, max_size: int | None = None, **options: Unpack[CacheOptions]
) -> list[Any]:
    """The model's own caches, with every plain KV cache replaced by a bounded one.

    Other caches stay as they are (`describe` lists them, with reasons).

    Args:
        model: A model of mlx-lm or mlx-vlm.
        max_size: Tokens' worth of memory per KV head, on average, the remainder included. The
            alternative is `max_bytes`.
        **options: All optional; `CacheOptions` explains each at length.

            max_bytes: Bytes for all layers, "64MB", or "25%" of a 16-bit cache of `context` tokens.
            context: The most tokens of a conversation.
            policy: A name ("salient", "h2o", ...) or a policy, `Salient(mass_weight=0.5)`.
            remainder: Whether evicted tokens keep contributing (default: True).
            budgets: The shares of slots among heads: "uniform", a `Profile`, or its path.
            bits, k_bits, v_bits: Bits of packed keys and values, 2 to 8; 16 for dense rows.
            group_size: Packed elements that share a scale: 32, 64 or 128.
            recent_bits: Bits of the newest tokens.
            undo: Last tokens that can be taken back, for speculative decoding.
            frames: Key scaling of packed keys, one for each cache, or "none".
            positions: "rolling" shows queries the kept keys without gaps (default: "absolute").
            pins: Pairs (first, one past the last) of positions that are never evicted.
            profile: "never" measures no model without a profile (default: "first use").
            spill: A folder for a file of rows from which evicted rows come back, or "auto".

    Returns:
        A cache for each entry of the model's own list, to be passed on as `prompt_cache`.

    Raises:
        ValueError: An option is unknown or invalid, two exclude each other, or they do not suit
            this model.
    """
    model = language_model(model)
    if makes_caches_of(model):  # called by its own make_cache, whose function this one replaces
        return caches_beneath(model)
    return bounded_caches(model, ModelSettings.of(max_size, **options))


def bounded_caches(
    model: nn.Module, settings: ModelSettings, kinds: Sequence[LayerKind] | None = None
) -> list[Any]:
    """The model's own caches, with every plain KV cache replaced by one with these settings.

    Args:
        model: A model of mlx-lm or mlx-vlm.
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
    own_attention.warn_if_changed(type(model).__module__)
    attending = all(kind.routed for kind in kinds)
    policy = settings.policy_for(attending)
    check_settings(name, kinds, settings, policy)
    answers = settings.remainder and not any(kind.derived for kind in kinds)
    context = trained_context(model, USUAL_CONTEXT)
    settings = settings.in_bytes(sum(map(plain_bytes, kinds)), context)
    data = model_data(model, kinds, caches, settings, policy, ranks is None)
    plan = plan_of(kinds, settings, policy, answers or policy.uses_evicted_mean, data)
    layers = zip(kinds, plan.layers, data.ropes, strict=True)

    def bounded() -> BoundedKVCache:
        kind, layer, rope = next(layers)
        layer = layer if ranks is None else layer.of_rank(ranks)
        own = CacheSettings(
            budgets=layer.budgets,
            policy=policy,
            remainder=answers,
            packing=plan.packing,
            attending=attending,
            undo=settings.undo,
            saturation=layer.saturation,
            frame=layer.frame,
            filling=layer.filling,
            rope=rope,
            ranks=1 if ranks is None else ranks.count,
            pins=settings.pins,
        )
        cache = class_for(kind, attending).of(own, layer.share)
        cache.choice, cache.context, cache.sharers = plan.choice, settings.context, kind.sharers
        return cache

    made = [replaced(entry, bounded) for entry in caches]
    if not settings.rolls:  # one of them warns for all
        bounded_members(made)[0].trained = trained_context(model, 0)
    if settings.spill is not None:
        spill_to(made, settings.spill, retrieval_heads(data.profile, len(kinds)))
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
    layers = bounded_members(cache)
    written = [
        (layer, back)
        for layer, back in zip(layers, heads or [None] * len(layers), strict=True)
        if back != frozenset()
    ]
    if not written:
        return
    from mlx_h2o.spill.layer_rows import spilling  # with files only

    ways = spilling(spill, [(layer.packing, layer.frame) for layer, _ in written], pack)
    for (layer, back), way in zip(written, ways, strict=True):
        layer.spill_to(way, back)


def class_for(kind: LayerKind, attending: bool) -> type[BoundedKVCache]:
    """The cache class of a layer: `H2OKVCache`, or that of another way to attend.

    Args:
        kind: How the model uses the layer's cache.
        attending: Whether all layers of the model attend through this library.
    """
    if attending and not kind.derived and kind.sharers == 1:
        return H2OKVCache
    from mlx_h2o.caches.latent import LatentKVCache
    from mlx_h2o.caches.plain_rows import PlainRowsKVCache
    from mlx_h2o.caches.shared import SharedKVCache

    if not attending:
        return PlainRowsKVCache
    return LatentKVCache if kind.derived else SharedKVCache
