"""How a library's attention reaches the cache: it asks the cache that returned the keys.

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


def routed(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A library's attention, wrapped to ask caches that can attend."""

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
    **others: Any,
) -> mx.array:
    # A newer library may give more, such as a sliding window.
    if extras := [name for name, value in others.items() if value is not None]:
        raise ValueError(
            f"This model's attention has {extras[0]}={others[extras[0]]!r}, which no bounded cache "
            "knows: leave this layer the cache that its library makes."
        )
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
