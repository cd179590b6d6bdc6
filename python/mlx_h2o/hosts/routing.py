"""Routing: how a model's attention reaches the cache.

Models of mlx-lm and mlx-vlm import `scaled_dot_product_attention` from their library's `base` by
name. `install` puts a wrapper there and into every loaded module that holds the original; modules
imported later pick the wrapper up by themselves. The wrapper asks a cache that can attend to do so
(where layers share keys, the cache that returned them), and calls the original untouched otherwise.
Meanwhile mlx-lm's `save_prompt_cache` refuses bounded caches, since it could not read its files of
them back, and functions that take tokens back (`hosts/trimming.py`) or make caches beside
`make_prompt_cache` (`hosts/vlm_generation.py`) are checked.
`hosts/own_attention.py` does the same for models that attend by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mlx_h2o.hosts import loaded, own_attention, trimming, vlm_generation
from mlx_h2o.hosts.attending import refusing, routed
from mlx_h2o.hosts.host import Host
from mlx_h2o.hosts.mlx_lm import MLX_LM
from mlx_h2o.hosts.patching import replace_everywhere
from mlx_h2o.loading.tested_versions import warn_if_newer

Function = Callable[..., Any]

# What is wrapped in mlx-lm beside its attention, by module; names with dots are methods.
_IN_MLX_LM: dict[str, dict[str, Callable[[Any], Any]]] = {
    "mlx_lm.models.cache": {
        "save_prompt_cache": refusing,
        "trim_prompt_cache": trimming.trimming,
        "can_trim_prompt_cache": trimming.trimmability,
        "LRUPromptCache.fetch_nearest_cache": trimming.by_any_number,
        "LRUPromptCache.insert_cache": trimming.by_any_number,
    },
    "mlx_lm.generate": {"speculative_generate_step": trimming.speculating},
}
# Functions that were replaced together: each original, and what is in its place now.
_replaced: list[list[tuple[Function, Function]]] = []
# Classes with the name and the original of a wrapped method.
_methods: list[tuple[type, str, Function]] = []


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
    for module, wrappers in vlm_generation.WRAPPED.items():
        loaded.when_imported(module, _route, partial(_wrap, module, wrappers))
    own_attention.install()


def _route(host: Host) -> None:
    """Put wrappers in the place of a library's functions."""
    _replace([(host.attention, routed(host.attention))])
    if host is MLX_LM:
        for module, wrappers in _IN_MLX_LM.items():
            _wrap(module, wrappers)


def _wrap(module: str, wrappers: Mapping[str, Callable[[Any], Any]]) -> None:
    """Wrap a module's functions, and its classes' methods; a newer library may lack some."""
    functions = []
    for name, wrap in wrappers.items():
        owner: Any = sys.modules[module]
        *classes, function = name.split(".")
        for one in classes:
            owner = getattr(owner, one, None)
        original = vars(owner).get(function) if owner is not None else None
        if original is None:
            continue
        if classes:
            _methods.append((owner, function, original))
            setattr(owner, function, wrap(original))
        else:
            functions.append((original, wrap(original)))
    _replace(functions)


def _replace(functions: list[tuple[Function, Function]]) -> None:
    """Put functions in the place of others everywhere, in one pass over all modules."""
    if functions:
        _replaced.append(functions)
        replace_everywhere(functions)


def uninstall() -> None:
    """Put the libraries' own functions back everywhere; bounded caches cannot attend afterwards."""
    loaded.forget(_route)
    while _replaced:
        replace_everywhere((ours, original) for original, ours in _replaced.pop())
    while _methods:
        setattr(*_methods.pop())
    own_attention.uninstall()
