"""Slots that a caller gives each layer of a model, instead of one size for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.models.cache import KVCache

from mlx_h2o._utils import checks
from mlx_h2o._utils.cache_lists import entries

#: Slots: a number for every KV head of a layer, a list with each head's, or None for a cache that
#: does not grow.
OneLayer = int | Sequence[int] | None
#: A list with an entry for each of a model's own caches, or a function that gives it for a cache's
#: index and number of KV heads.
LayerBudgets = Sequence[OneLayer] | Callable[[int, int], OneLayer]


def slots_given(
    budgets: LayerBudgets, caches: Sequence[Any], heads: Sequence[int], uniform: bool
) -> list[list[int]]:
    """Slots of each KV head of each plain KV cache.

    Args:
        budgets: The caller's budgets.
        caches: The model's own caches.
        heads: KV heads of each plain KV cache, including members of a CacheList.
        uniform: Whether all layers must have the same number.

    Raises:
        ValueError: There is not one entry for each cache, or not one number for each head, numbers
            are not whole, or they differ where they must not.
    """
    if not callable(budgets) and len(budgets) != len(caches):
        raise ValueError(
            f"budgets has {len(budgets)} entries, and the model has {len(caches)} caches: give "
            "slots or None for each."
        )
    sizes: list[list[int]] = []
    for i, entry in enumerate(caches):
        plain = sum(type(member) is KVCache for _, member in entries([entry]))
        if not callable(budgets) and (budgets[i] is None) != (not plain):
            raise ValueError(
                f"budgets[{i}] is for a {type(entry).__name__}: it must be "
                f"{'slots, since its memory grows' if plain else 'None'}."
            )
        for of_cache in heads[len(sizes) : len(sizes) + plain]:
            given = budgets(i, of_cache) if callable(budgets) else budgets[i]
            sizes.append(_of_heads(f"budgets[{i}]", given, of_cache))
    if uniform and len({slots for of_layer in sizes for slots in of_layer}) > 1:
        raise ValueError(
            "One mask serves all layers of this model, so all its layers and heads need the same "
            "budget: give max_size."
        )
    return sizes


def _of_heads(name: str, given: OneLayer, heads: int) -> list[int]:
    """Slots of each KV head of one layer."""
    if not checks.is_list(given):
        return [checks.whole(name, given, 1)] * heads
    slots = checks.wholes(name, given, 1)
    if len(slots) != heads:
        raise ValueError(f"{name} has {len(slots)} entries for {heads} KV heads.")
    return list(slots)
