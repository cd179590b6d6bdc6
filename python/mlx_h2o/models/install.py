"""Installation: bounds every cache that mlx-lm makes, in its server, its chat and its generate."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Unpack

import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o import _checks
from mlx_h2o.budgets.options import DEFAULTS, NAMES, CacheOptions
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.patching import replace_everywhere
from mlx_h2o.hosts.refusals import NothingToBound
from mlx_h2o.hosts.stock_caches import asking, stock_caches, stock_function
from mlx_h2o.models.make import bounded_caches

#: mlx-lm's caches that hold every token.
GROWING = ("KVCache", "QuantizedKVCache", "ConcatenateKVCache")
# mlx-lm's own function.
_stock_load: Any = mlx_lm_cache.load_prompt_cache
# The function that replaces mlx-lm's now, or None.
_bounded: Callable[..., list[Any]] | None = None


class NothingBounded(UserWarning):
    """`install()` was called without a size: mlx-lm's own caches grow as before."""


UNBOUNDED = (
    "install() without a size bounds nothing that mlx-lm makes: only caches from "
    "mlx_h2o.make_prompt_cache or H2OKVCache are bounded. Give max_size or max_bytes to bound all."
)


def install(max_size: int | None = None, **options: Unpack[CacheOptions]) -> None:
    """Route mlx-lm's attention, and, with a size, bound every cache that mlx-lm makes from now on.

    With a size, `mlx_lm.models.cache.make_prompt_cache` returns bounded caches, in every module
    that has imported it. Models without a plain KV cache keep their own caches. A caller's
    `max_kv_size` replaces the size given here. A further call sets new options. A further call
    without arguments leaves them as they are, and warns if there are none.

    Args:
        max_size: Tokens' worth of memory per KV head, on average, in each list of caches. The
            alternative is `max_bytes`.
        options: The options that `CacheOptions` explains.

    Raises:
        ValueError: Options without a size, or an unknown or invalid option.
    """
    budgets = options.get("budgets")
    of_layers = _checks.is_list(budgets) or callable(budgets)
    if max_size is None and options.get("max_bytes") is None and not of_layers:
        _install_without_a_size(options)
        return
    bound = bounding(ModelSettings.of(max_size, **options))
    routing.install()
    _replace(bound)


def _install_without_a_size(options: CacheOptions) -> None:
    """Route attention alone.

    Raises:
        ValueError: Options were given that need a size.
    """
    changed = [name for name, value in options.items() if value != DEFAULTS.get(name)]
    if changed:
        near = (
            _checks.suggestion(changed[0], ["max_size", *NAMES]) if changed[0] not in NAMES else ""
        )
        raise ValueError(f"install() needs max_size or max_bytes with {', '.join(changed)}.{near}")
    routing.install()
    if _bounded is None:
        warnings.warn(UNBOUNDED, NothingBounded, stacklevel=3)


def uninstall() -> None:
    """Restore mlx-lm's own functions everywhere.

    Functions imported or kept while ours were installed make mlx-lm's own caches from now on.
    Existing bounded caches cannot attend afterwards.
    """
    _replace(None)
    routing.uninstall()


def bounding(settings: ModelSettings) -> Callable[..., list[Any]]:
    """mlx-lm's `make_prompt_cache`, with bounded caches as its result."""

    @functools.wraps(stock_function)
    def make_prompt_cache(model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
        if _bounded is None:  # kept by a caller since before `uninstall`
            return list(stock_function(model, max_kv_size))
        if make_prompt_cache is not _bounded:  # or since before a further `install`
            return _bounded(model, max_kv_size)
        if asking():  # called by a model's own make_cache, for a part of it
            return list(stock_function(model, max_kv_size))
        own = settings
        if max_kv_size is not None:
            own = settings.of_size(max_kv_size)
        try:
            return bounded_caches(model, own)
        except NothingToBound:
            return stock_caches(model)

    return make_prompt_cache


@functools.wraps(_stock_load)
def _load_bounded(file_name: Any, return_metadata: bool = False) -> Any:
    loaded = _stock_load(file_name, return_metadata)
    cache = loaded[0] if return_metadata else loaded
    growing = [type(entry).__name__ for _, entry in entries(cache)]
    growing = [name for name in growing if name in GROWING]
    if growing and _bounded is not None:
        raise ValueError(
            f"{file_name} holds mlx-lm's {growing[0]}, which would grow without bound although "
            "mlx_h2o.install() bounds what mlx-lm makes. Read the prompt again into a cache of "
            "mlx_h2o.make_prompt_cache, or call mlx_h2o.uninstall() first."
        )
    return loaded


def _replace(new: Callable[..., list[Any]] | None) -> None:
    """Replace mlx-lm's `make_prompt_cache` by this one; None restores mlx-lm's."""
    global _bounded
    replace_everywhere(_bounded or stock_function, new or stock_function)
    loads = (_load_bounded, _stock_load)
    replace_everywhere(*(reversed(loads) if new else loads))
    _bounded = new
