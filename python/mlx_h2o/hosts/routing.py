"""Routing: how a model's attention reaches the cache.

Models of mlx-lm and mlx-vlm import `scaled_dot_product_attention` from their library's `base` by
name. `install` puts a wrapper there and into every loaded module that holds the original; modules
imported later pick the wrapper up by themselves. The wrapper asks a cache that can attend to do so
(where layers share keys, the cache that returned them), and calls the original untouched otherwise.
Meanwhile mlx-lm's `save_prompt_cache` refuses bounded caches, since it could not read its files of
them back, and functions that take tokens back are checked (`hosts/trimming.py`).
`hosts/own_attention.py` does the same for models that attend by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.hosts import loaded, own_attention, trimming
from mlx_h2o.hosts.attending import refusing, routed
from mlx_h2o.hosts.host import Host
from mlx_h2o.hosts.mlx_lm import MLX_LM
from mlx_h2o.hosts.patching import replace_everywhere
from mlx_h2o.loading.tested_versions import warn_if_newer

# Pairs of a function now in a library's place and the original one.
_replaced: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
# Methods of mlx-lm's LRU cache that are wrapped; the originals by name.
_LRU_METHODS = ("fetch_nearest_cache", "insert_cache")
_methods: dict[str, Callable[..., Any]] = {}


def installed() -> bool:
    """Whether attention is being routed."""
    return bool(_replaced)


def install() -> None:
    """Route the attention of all models; calling it twice changes nothing."""
    if installed():
        return
    warn_if_newer("mlx")
    warn_if_newer("mlx-lm")
    loaded.for_each_host(_route)
    own_attention.install()


def _route(host: Host) -> None:
    """Put wrappers in the place of a library's functions."""
    wrapped: list[tuple[Any, Callable[[Any], Any]]] = [(host.attention, routed)]
    if host is MLX_LM:
        functions = [
            (mlx_lm_cache, "save_prompt_cache", refusing),
            (mlx_lm_cache, "trim_prompt_cache", trimming.trimming),
            (mlx_lm_cache, "can_trim_prompt_cache", trimming.asking),
            (trimming.GENERATE, "speculative_generate_step", trimming.speculating),
        ]
        # A newer mlx-lm may lack some of them.
        wrapped += [(vars(m)[name], wrap) for m, name, wrap in functions if name in vars(m)]
        for name in _LRU_METHODS:
            if name in vars(getattr(mlx_lm_cache, "LRUPromptCache", object)):
                _methods[name] = getattr(mlx_lm_cache.LRUPromptCache, name)
                setattr(mlx_lm_cache.LRUPromptCache, name, trimming.by_any_number(_methods[name]))
    pairs = [(wrap(original), original) for original, wrap in wrapped]
    _replaced.extend(pairs)
    for new, original in pairs:
        replace_everywhere(original, new)


def uninstall() -> None:
    """Put the libraries' own functions back everywhere; bounded caches cannot attend afterwards."""
    loaded.forget(_route)
    while _replaced:
        replace_everywhere(*_replaced.pop())
    while _methods:
        setattr(mlx_lm_cache.LRUPromptCache, *_methods.popitem())
    own_attention.uninstall()
