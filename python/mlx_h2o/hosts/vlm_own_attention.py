"""mlx-vlm's models whose attention does not say which cache the keys are of, or needs every token.

AFM's last layers attend to the keys that a cache's `state` gives, and ZAYA1 hands no cache over.
Inkling's attention needs the keys of all tokens, so it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mlx_h2o.hosts.attending import hand_out
from mlx_h2o.hosts.loaded import is_cache, library_of

Function = Callable[..., Any]


class _KeysAsState:
    """A cache whose `state` is what it hands out for attention, as that of mlx-vlm's `KVCache`."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @property
    def state(self) -> Any:
        return self._cache.keys_and_values()


def sharing(original: Function) -> Function:
    """`AFMModel.__call__`, wrapped to take the keys as mlx-lm's AFM takes them."""

    @functools.wraps(original)
    def call(self: Any, inputs: Any, inputs_embeds: Any = None, cache: Any = None) -> Any:
        if cache and library_of(cache[-1]) is None and hasattr(cache[-1], "keys_and_values"):
            cache = [*cache[:-1], _KeysAsState(cache[-1])]
        return original(self, inputs, inputs_embeds, cache)

    return call


class _FoundByKeys:
    """A cache that routing finds by the keys that it returned."""

    def __init__(self, cache: Any) -> None:
        self._cache, self._keys = cache, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        rows = self._cache.update_and_fetch(keys, values)
        self._keys = rows[0]
        hand_out(self, rows[0])
        return rows

    def handed_out(self, keys: Any) -> bool:
        return keys is self._keys


def unnamed(original: Function) -> Function:
    """`ZayaAttention.__call__`, wrapped to have a cache that can attend found by its keys."""

    @functools.wraps(original)
    def call(
        self: Any,
        hidden_states: Any,
        mask: Any = None,
        cca_mask: Any = None,
        image_mask: Any = None,
        cache: Any = None,
    ) -> Any:
        if is_cache(cache, "CacheList") and getattr(cache[0], "attending", False):
            cache = _FoundByKeys(cache[0]), cache[1]
        return original(self, hidden_states, mask, cca_mask, image_mask, cache)

    return call


def refusing(original: Function) -> Function:
    """Inkling's attention, wrapped to refuse caches that do not hold every token."""

    @functools.wraps(original)
    def call(self: Any, x: Any, cache: Any = None, conv_mask: Any = None) -> Any:
        if cache is not None and getattr(cache[0], "attending", False):
            raise ValueError("its attention adds a bias by the distance to every token")
        return original(self, x, cache, conv_mask)

    return call


#: The methods that are wrapped, by their module.
WRAPPED: dict[str, dict[str, Callable[[Function], Function]]] = {
    "mlx_vlm.models.afm7.language": {"AFMModel.__call__": sharing},
    "mlx_vlm.models.inkling.language": {"InklingAttention.__call__": refusing},
    "mlx_vlm.models.zaya1_vl.language": {"ZayaAttention.__call__": unnamed},
}
