"""mlx-vlm's prefix cache (APC) with bounded caches: it keeps them whole, as it keeps states.

What a bounded cache holds of a prefix cannot be put together from blocks of tokens. APC has another
way for recurrent states: it copies all caches at some token, and goes on from the copy. The copies
are bounded too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.loaded import hosts, language_model
from mlx_h2o.hosts.trimming import bounded

NO_DISK = (
    "The disk tier of mlx-vlm's prefix cache (APC) writes caches of its own only, and the caches "
    "here are bounded: set APC_DISK_ENABLED=0, or give APCManager no disk."
)

Function = Callable[..., Any]


def made_for(model: Any) -> list[Any]:
    """The caches that mlx-vlm's `make_prompt_cache` makes for a model now."""
    caches: list[Any] = hosts()[1].caches.make_prompt_cache(language_model(model))
    return caches


def coordinating(original: Function) -> Function:
    """`APCCoordinator.__init__`, wrapped to refuse a disk tier beside bounded caches."""

    @functools.wraps(original)
    def __init__(self: Any, manager: Any, model: Any) -> None:
        if getattr(manager, "disk", None) is not None and bounded(made_for(model)):
            raise ValueError(NO_DISK)
        original(self, manager, model)

    return __init__


def planning(original: Function) -> Function:
    """`build_prefix_cache_plan`, wrapped to plan for the caches that are made."""

    @functools.wraps(original)
    def plan(model: Any, overrides: Any = None) -> Any:
        ours = made_for(model)
        if not bounded(ours):
            return original(model, overrides)
        from mlx_vlm.apc_adapters import build_prefix_cache_plan_from_caches

        return build_prefix_cache_plan_from_caches(ours, overrides)

    return plan


def beginning(original: Function) -> Function:
    """`APCCoordinator.fresh_cache`, wrapped to give bounded caches."""

    @functools.wraps(original)
    def fresh_cache(self: Any) -> list[Any]:
        ours = made_for(self.model)
        return ours if bounded(ours) else list(original(self))

    return fresh_cache


def cloning(original: Function) -> Function:
    """`clone_cache_entry`, wrapped to copy bounded caches."""

    @functools.wraps(original)
    def clone(entry: Any, **options: Any) -> Any:
        return copy.deepcopy(entry) if _is_ours(entry) else original(entry, **options)

    return clone


def merging(original: Function) -> Function:
    """`merge_cache_entries`, wrapped to batch bounded caches; None, as there, if they cannot be."""

    @functools.wraps(original)
    def merge(rows: Sequence[Any], prefix_lens: Sequence[int]) -> Any:
        if not rows or not _is_ours(rows[0]):
            return original(rows, prefix_lens)
        kind = type(rows[0])
        return kind.merge(rows) if hasattr(kind, "merge") else None

    return merge


def shaping(original: Function) -> Function:
    """`_prompt_cache_is_batch_shaped`, wrapped to know batches of bounded caches."""

    @functools.wraps(original)
    def is_batch(caches: Sequence[Any]) -> bool:
        leaves = [entry for _, entry in entries(caches)]
        others = [entry for entry in leaves if not _is_ours(entry)]
        ours = [entry for entry in leaves if _is_ours(entry)]
        batches = all(hasattr(entry, "extract") for entry in ours)
        return bool(original(caches)) if not ours else batches and (not others or original(others))

    return is_batch


def _is_ours(entry: Any) -> bool:
    return bool(bounded([entry])) and hasattr(entry, "require_trimmable")


#: The functions and methods that are wrapped, by their module.
WRAPPED: dict[str, dict[str, Callable[[Function], Function]]] = {
    "mlx_vlm.apc_coordinator": {
        "APCCoordinator.__init__": coordinating,
        "APCCoordinator.fresh_cache": beginning,
    },
    "mlx_vlm.apc_adapters": {
        "build_prefix_cache_plan": planning,
        "clone_cache_entry": cloning,
        "merge_cache_entries": merging,
    },
    "mlx_vlm.apc": {"_prompt_cache_is_batch_shaped": shaping},
}
