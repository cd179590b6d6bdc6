"""mlx-vlm's AFM, whose last layers attend to the keys that a cache's `state` gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mlx_h2o.hosts.loaded import library_of

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


#: The methods that are wrapped, by their module.
WRAPPED: dict[str, dict[str, Callable[[Function], Function]]] = {
    "mlx_vlm.models.afm7.language": {"AFMModel.__call__": sharing},
}
