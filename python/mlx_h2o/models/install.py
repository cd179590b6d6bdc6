"""Installation: bounds every cache that mlx-lm or mlx-vlm makes, in server, chat and generate."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Unpack

import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o import _checks
from mlx_h2o.budgets.options import NAMES, CacheOptions
from mlx_h2o.budgets.settings import DEFAULTS, ModelSettings
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.host import Host
from mlx_h2o.hosts.loaded import for_each_host, forget, hosts
from mlx_h2o.hosts.patching import replace_everywhere
from mlx_h2o.hosts.refusals import NothingToBound
from mlx_h2o.hosts.stock_caches import makes_stock_caches, stock_caches
from mlx_h2o.models.make import bounded_caches

#: mlx-lm's caches that hold every token.
GROWING = ("KVCache", "QuantizedKVCache", "ConcatenateKVCache")
# mlx-lm's own function.
_stock_load: Any = mlx_lm_cache.load_prompt_cache
# The settings of every cache that is made, or None.
_settings: ModelSettings | None = None
# The functions that make bounded caches, by the library's name; each is made once.
_bounding: dict[str, Callable[..., list[Any]]] = {}


class NothingBounded(UserWarning):
    """`install()` was called without a size: the libraries' own caches grow as before."""


UNBOUNDED = (
    "install() without a size bounds nothing that mlx-lm or mlx-vlm makes: only caches from "
    "mlx_h2o.make_prompt_cache or H2OKVCache are bounded. Give max_size or max_bytes to bound all."
)


def install(max_size: int | None = None, **options: Unpack[CacheOptions]) -> None:
    """Route attention, and, with a size, bound every cache that a library makes from now on.

    With a size, `make_prompt_cache` of `mlx_lm.models.cache` and `mlx_vlm.models.cache` returns
    bounded caches, in every module that has imported it. mlx-vlm may be imported before or after
    this call, and need not be there. Models without a plain KV cache keep their own caches. A
    caller's `max_kv_size` replaces the size given here. A further call sets new options. A further
    call without arguments leaves them as they are, and warns if there are none.

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
    global _settings
    settings = ModelSettings.of(max_size, **options)
    routing.install()
    if _settings is None:
        for_each_host(_replace)
        replace_everywhere([(_stock_load, _load_bounded)])
    _settings = settings


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
    if _settings is None:
        warnings.warn(UNBOUNDED, NothingBounded, stacklevel=3)


def uninstall() -> None:
    """Restore the libraries' own functions everywhere.

    Functions imported or kept while ours were installed make the libraries' own caches from now on.
    Existing bounded caches cannot attend afterwards.
    """
    global _settings
    _settings = None
    forget(_replace)
    ours = [host for host in hosts() if host.name in _bounding]
    replace_everywhere(
        [(_load_bounded, _stock_load)]
        + [(_bounding[host.name], host.make_prompt_cache) for host in ours]
    )
    routing.uninstall()


def _replace(host: Host) -> None:
    """Put a function that makes bounded caches in the place of a library's own."""
    if host.name not in _bounding:
        _bounding[host.name] = _bounding_of(host)
    replace_everywhere([(host.make_prompt_cache, _bounding[host.name])])


def _bounding_of(host: Host) -> Callable[..., list[Any]]:
    """A library's `make_prompt_cache`, with caches of the installed settings as its result."""
    own = host.make_prompt_cache

    @functools.wraps(own)
    def make_prompt_cache(model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
        # Nothing is installed any more, or a model's own make_cache asks, for a part of it.
        if _settings is None or makes_stock_caches():
            return own(model, max_kv_size)
        settings = _settings if max_kv_size is None else _settings.of_size(max_kv_size)
        try:
            return bounded_caches(model, settings)
        except NothingToBound:
            return stock_caches(model)

    return make_prompt_cache


@functools.wraps(_stock_load)
def _load_bounded(file_name: Any, return_metadata: bool = False) -> Any:
    loaded = _stock_load(file_name, return_metadata)
    cache = loaded[0] if return_metadata else loaded
    growing = [type(entry).__name__ for _, entry in entries(cache)]
    growing = [name for name in growing if name in GROWING]
    if growing and _settings is not None:
        raise ValueError(
            f"{file_name} holds mlx-lm's {growing[0]}, which would grow without bound although "
            "mlx_h2o.install() bounds what mlx-lm makes. Read the prompt again into a cache of "
            "mlx_h2o.make_prompt_cache, or call mlx_h2o.uninstall() first."
        )
    return loaded
