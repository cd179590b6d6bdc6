"""Whose rows an array is: caches whose rows several layers attend to recognize them again.

A layer that attends to another's keys and values gets them as arrays, often without the cache that
they came from. The arrays themselves tell: they are the very objects that were handed out.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx

_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()


def hand_out(cache: Any, keys: mx.array) -> None:
    """Note that these keys are a cache's; it must hold on to them as long as that is to be known.

    Args:
        cache: It has a method `handed_out`, which says whether keys are its own.
        keys: `[B, Hk, N, D]`.
    """
    _owners[id(keys)] = cache


def owner_of(keys: Any) -> Any:
    """The cache that handed these keys out, or None."""
    cache = _owners.get(id(keys))
    return cache if cache is not None and cache.handed_out(keys) else None
