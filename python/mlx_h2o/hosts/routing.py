"""Routing: how a model's attention reaches the cache.

mlx-lm's models import `scaled_dot_product_attention` from `mlx_lm.models.base` by name. `install`
puts a wrapper there and into every loaded module that holds the original; modules imported later
pick the wrapper up by themselves. The wrapper asks a cache that can attend to do so (where layers
share keys, the cache that returned them), and calls the original untouched otherwise. Meanwhile
mlx-lm's `save_prompt_cache` refuses bounded caches, since it could not read its files of them back,
and functions that take tokens back are checked (`hosts/trimming.py`).
`hosts/own_attention.py` does the same for models that attend by themselves.

A layer that attends to another layer's keys and values gets them as arrays, often without the cache
that returned them. `owner_of` maps key arrays to that cache: they are the very objects that it
returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import base
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.hosts import own_attention, trimming
from mlx_h2o.hosts.patching import replace_everywhere
from mlx_h2o.hosts.tested_versions import warn_if_newer

# Pairs of a function now in mlx-lm's place and the original one.
_replaced: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
# Methods of mlx-lm's LRU cache that are wrapped; the originals by name.
_LRU_METHODS = ("fetch_nearest_cache", "insert_cache")
_methods: dict[str, Callable[..., Any]] = {}


def installed() -> bool:
    """Whether attention is being routed."""
    return bool(_replaced)


def install() -> None:
    """Route the attention of all mlx-lm models; calling it twice changes nothing."""
    if installed():
        return
    warn_if_newer()
    wrapped: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
        (base.scaled_dot_product_attention, routed),
        (mlx_lm_cache.save_prompt_cache, refusing),
        (mlx_lm_cache.trim_prompt_cache, trimming.trimming),
        (mlx_lm_cache.can_trim_prompt_cache, trimming.asking),
        (speculative_generate_step, trimming.speculating),
    )
    _replaced.extend((made(original), original) for original, made in wrapped)
    for new, original in _replaced:
        replace_everywhere(original, new)
    for name in _LRU_METHODS:
        _methods[name] = getattr(mlx_lm_cache.LRUPromptCache, name)
        setattr(mlx_lm_cache.LRUPromptCache, name, trimming.by_any_number(_methods[name]))
    own_attention.install()


def uninstall() -> None:
    """Put mlx-lm's own functions back everywhere; bounded caches cannot attend afterwards."""
    while _replaced:
        replace_everywhere(*_replaced.pop())
    while _methods:
        setattr(mlx_lm_cache.LRUPromptCache, *_methods.popitem())
    own_attention.uninstall()


def routed(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's attention, wrapped to ask caches that can attend."""

    @functools.wraps(original)
    def attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, *args: Any, **kwargs: Any
    ) -> mx.array:
        owner = owner_of(keys) or cache
        if not getattr(owner, "attending", False):
            return original(queries, keys, values, cache, *args, **kwargs)
        return _attend(owner, queries, keys, values, *args, **kwargs)

    return attention


def refusing(original: Callable[..., Any]) -> Callable[..., None]:
    """mlx-lm's `save_prompt_cache`, wrapped to refuse bounded caches."""

    @functools.wraps(original)
    def save_prompt_cache(file_name: str, cache: list[Any], *args: Any, **kwargs: Any) -> None:
        for entry in cache:
            # Members of a CacheList too.
            if any(hasattr(member, "attending") for member in getattr(entry, "caches", [entry])):
                raise ValueError(
                    "mlx-lm's save_prompt_cache writes bounded caches to a file that cannot be "
                    "read back: use mlx_h2o.save_prompt_cache and mlx_h2o.load_prompt_cache."
                )
        original(file_name, cache, *args, **kwargs)

    return save_prompt_cache


def _attend(
    cache: Any,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    out: mx.array = cache.attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    return out


_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()


def hand_out(cache: Any, keys: mx.array) -> None:
    """Note that a cache returned these keys; it must keep them alive until they are attended to.

    Args:
        cache: The cache, with a method `handed_out` that says whether keys are its own.
        keys: `[B, Hk, N, D]`.
    """
    _owners[id(keys)] = cache


def owner_of(keys: Any) -> Any:
    """The cache that returned these keys, or None."""
    cache = _owners.get(id(keys))
    return cache if cache is not None and cache.handed_out(keys) else None
