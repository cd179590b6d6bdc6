"""What a caller gives for each of a model's own caches: slots, and key scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_h2o import _checks
from mlx_h2o.budgets.options import LayerBudgets, OneLayer
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.loaded import is_plain
from mlx_h2o.slots.key_scaling import Frame


def slots_of_caches(
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
        plain = sum(is_plain(member) for _, member in entries([entry]))
        if not callable(budgets) and (budgets[i] is None) != (not plain):
            raise ValueError(
                f"budgets[{i}] is for a {type(entry).__name__}: it must be "
                f"{'slots, since its memory grows' if plain else 'None'}."
            )
        for of_cache in heads[len(sizes) : len(sizes) + plain]:
            sizes_of_cache = budgets(i, of_cache) if callable(budgets) else budgets[i]
            sizes.append(_of_heads(f"budgets[{i}]", sizes_of_cache, of_cache))
    if uniform and len({slots for of_layer in sizes for slots in of_layer}) > 1:
        raise ValueError(
            "One mask serves all layers of this model, so all its layers and heads need the same "
            "budget: give max_size."
        )
    return sizes


def _of_heads(name: str, sizes: OneLayer, heads: int) -> list[int]:
    """Slots of each KV head of one layer."""
    if not _checks.is_list(sizes):
        return [_checks.whole(name, sizes, 1)] * heads
    slots = _checks.wholes(name, sizes, 1)
    if len(slots) != heads:
        raise ValueError(f"{name} has {len(slots)} entries for {heads} KV heads.")
    return list(slots)


def frames_of_caches(caches: Sequence[Any], frames: Any) -> list[Frame | None]:
    """The key scaling of each plain KV cache of a model's list, including members of a CacheList.

    Args:
        caches: The model's own caches.
        frames: As in `ModelSettings`.

    Raises:
        ValueError: There is not one entry for each cache, or one for a cache that is not plain KV.
    """
    by_cache = frames if isinstance(frames, tuple) else (None,) * len(caches)
    if len(by_cache) != len(caches):
        raise ValueError(
            f"frames has {len(by_cache)} entries, and the model has {len(caches)} caches: give a "
            "Frame or None for each."
        )
    of_plain: list[Frame | None] = []
    for i, (entry, frame) in enumerate(zip(caches, by_cache, strict=True)):
        plain = sum(is_plain(member) for _, member in entries([entry]))
        if frame is not None and not is_plain(entry):
            raise ValueError(
                f"frames[{i}] is for a {type(entry).__name__}, which is not a plain KV cache: "
                "it must be None."
            )
        of_plain += [frame] * plain
    return of_plain
