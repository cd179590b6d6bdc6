"""Bounding every cache that mlx-lm makes: in its server, its chat, its generate, and for others."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.nn as nn

from mlx_h2o._utils import checks
from mlx_h2o._utils.patching import replace_everywhere
from mlx_h2o.budgets.layer_budgets import LayerBudgets
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.integration import routing
from mlx_h2o.integration.refusals import NothingToBound
from mlx_h2o.integration.stock_caches import asking, stock_caches, stock_function
from mlx_h2o.model_caches.make import bounded_caches
from mlx_h2o.policies import Policy
from mlx_h2o.storage.key_scaling import Frame
from mlx_h2o.storage.packed import DEFAULT_GROUP_SIZE

# What stands in the place of mlx-lm's function now.
_bounded: Callable[..., list[Any]] | None = None
# Arguments of `install` whose default is not None.
_UNSAID = {
    "remainder": True,
    "group_size": DEFAULT_GROUP_SIZE,
    "undo": 0,
    "positions": "absolute",
    "profile": "first use",
}


class NothingBounded(UserWarning):
    """`install()` was called without a size: mlx-lm's own caches grow as before."""


UNBOUNDED = (
    "install() without a size bounds nothing that mlx-lm makes: only caches from "
    "mlx_h2o.make_prompt_cache or H2OKVCache are bounded. Give max_size or max_bytes to bound all."
)


def install(
    max_size: int | None = None,
    *,
    max_bytes: int | str | None = None,
    context: int | None = None,
    policy: str | Policy | None = None,
    remainder: bool = True,
    budgets: str | Path | Profile | LayerBudgets | None = None,
    bits: int | None = None,
    k_bits: int | None = None,
    v_bits: int | None = None,
    group_size: int = DEFAULT_GROUP_SIZE,
    recent_bits: int | None = None,
    undo: int = 0,
    frames: Sequence[Frame | None] | Literal[False] | str | None = None,
    positions: str = "absolute",
    profile: str = "first use",
    **settings: Any,
) -> None:
    """Route mlx-lm's attention, and, with a size, bound every cache that mlx-lm makes from now on.

    With a size, `mlx_lm.models.cache.make_prompt_cache` gives bounded caches in every module that
    holds it. Models without a plain KV cache keep their own caches. A `max_kv_size` that a caller
    passes takes the place of the size given here. Called again, it puts new settings in force.
    Called without arguments, it leaves them as they are, and warns if there are none.

    Args:
        max_size: As in `make_prompt_cache`, which explains the others too.
        max_bytes: Likewise; for each list of caches that is made.
        context: Likewise.
        policy: Likewise.
        remainder: Likewise.
        budgets: Likewise.
        bits: Likewise.
        k_bits: Likewise.
        v_bits: Likewise.
        group_size: Likewise.
        recent_bits: Likewise.
        undo: Likewise.
        frames: Likewise.
        positions: Likewise.
        profile: Likewise.
        settings: Likewise.

    Raises:
        ValueError: Settings without a size, or ones that there are not.
    """
    stored = {"bits": bits, "k_bits": k_bits, "v_bits": v_bits, "group_size": group_size}
    given = {"policy": policy, "remainder": remainder, "budgets": budgets, **stored, **settings}
    given |= {"context": context, "recent_bits": recent_bits, "undo": undo, "frames": frames}
    given |= {"positions": positions, "profile": profile}
    of_layers = checks.is_list(budgets) or callable(budgets)
    if max_size is None and max_bytes is None and not of_layers:
        _install_without_a_size(given)
        return
    bound = bounding(ModelSettings.of(max_size, max_bytes=max_bytes, **given))
    routing.install()
    _replace(bound)


def _install_without_a_size(given: dict[str, Any]) -> None:
    """Route attention alone.

    Raises:
        ValueError: Settings were given, which need a size.
    """
    named = [name for name, value in given.items() if value != _UNSAID.get(name)]
    if named:
        names = inspect.signature(install).parameters
        near = checks.suggestion(named[0], names) if named[0] not in names else ""
        raise ValueError(f"install() needs max_size or max_bytes with {', '.join(named)}.{near}")
    routing.install()
    if _bounded is None:
        warnings.warn(UNBOUNDED, NothingBounded, stacklevel=3)


def uninstall() -> None:
    """Put mlx-lm's own functions back everywhere.

    What was imported or kept while ours was in place makes mlx-lm's own caches from now on. Bounded
    caches that exist cannot attend afterwards.
    """
    _replace(None)
    routing.uninstall()


def bounding(settings: ModelSettings) -> Callable[..., list[Any]]:
    """mlx-lm's `make_prompt_cache`, but giving bounded caches."""

    @functools.wraps(stock_function)
    def make_prompt_cache(model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
        if _bounded is None:  # kept by someone who took it before `uninstall`
            return list(stock_function(model, max_kv_size))
        if make_prompt_cache is not _bounded:  # or before other settings came into force
            return _bounded(model, max_kv_size)
        if asking():  # a model's own make_cache, for a part of it
            return list(stock_function(model, max_kv_size))
        own = settings
        if max_kv_size is not None:
            own = settings.of_size(max_kv_size)
        try:
            return bounded_caches(model, own)
        except NothingToBound:
            return stock_caches(model)

    return make_prompt_cache


def _replace(new: Callable[..., list[Any]] | None) -> None:
    """Put a function in the place of mlx-lm's, or mlx-lm's back."""
    global _bounded
    replace_everywhere(_bounded or stock_function, new or stock_function)
    _bounded = new
