"""Routing: how a model's attention reaches the cache.

mlx-lm's models import `scaled_dot_product_attention` from `mlx_lm.models.base` by name. `install`
puts a wrapper there and into every loaded model module that holds the original; modules imported
later pick the wrapper up by themselves. It asks a cache that can attend to do so, and calls the
original untouched otherwise.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

_NAME = "scaled_dot_product_attention"
_original: Callable[..., mx.array] | None = None


def installed() -> bool:
    """Whether attention is being routed."""
    return _original is not None


def install() -> None:
    """Route the attention of all mlx-lm models; doing it twice changes nothing."""
    global _original
    if _original is not None:
        return
    original = base.scaled_dot_product_attention

    @functools.wraps(original)
    def routed(
        queries: mx.array, keys: Any, values: Any, cache: Any, *args: Any, **kwargs: Any
    ) -> mx.array:
        if not getattr(cache, "attending", False):
            return original(queries, keys, values, cache, *args, **kwargs)
        return _attend(cache, queries, keys, values, *args, **kwargs)

    _original = original
    _swap(original, routed)


def uninstall() -> None:
    """Put mlx-lm's own attention back everywhere; bounded caches cannot attend afterwards."""
    global _original
    if _original is None:
        return
    original, _original = _original, None
    _swap(base.scaled_dot_product_attention, original)


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


def _swap(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, _NAME, None) is old:
            setattr(module, _NAME, new)
