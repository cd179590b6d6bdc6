"""Bytes as in a 16-bit model, whichever dtype this one computes in.

On a CPU models compute in float32, against which packed rows would look twice as good as they are.
So a comparison at equal bytes gives each cache the bytes that it would get in a 16-bit model, and
counts its bytes as in that model: keys and values (scales and biases of packed ones) at 2 bytes a
number, and positions, scores and remainders at their own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_h2o.budgets.cost import PLAIN_ELEMENT
from mlx_h2o.budgets.plan import plain_bytes
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.models.make import bounded_caches

#: Names of the arrays in which our caches hold rows: in slots, and in the recent window.
SLOTS = ("slots.keys", "slots.values")
RECENT = ("recent.keys", "recent.values")


def caches_in_16_bits(
    model: nn.Module, settings: ModelSettings, tokens: int, context: int | None
) -> list[Any]:
    """Bounded caches with the bytes of `tokens` plain 16-bit tokens, as a 16-bit model has them.

    Args:
        model: The model that the caches are for.
        settings: The caches' settings; the size in them is not used. They say whether the profile
            chooses bits.
        tokens: Tokens of a plain cache.
        context: Tokens that will come.

    Raises:
        ValueError: The bytes are too few.
    """
    kinds = [
        replace(kind, widths=replace(kind.widths, key_size=PLAIN_ELEMENT, value_size=PLAIN_ELEMENT))
        for kind in layer_kinds(model)
    ]
    size = tokens * sum(map(plain_bytes, kinds))
    sized = replace(settings, max_size=None, max_bytes=size, context=context)
    return bounded_caches(model, sized, kinds)


def bytes_in_16_bits(cache: Sequence[Any], sequences: int = 1) -> int:
    """Bytes of one sequence's part of a model's caches, 32-bit keys and values counted as 16-bit.

    Args:
        cache: The model's caches.
        sequences: The sequences that they hold side by side; what serves all is counted for each.
    """
    return sum(_one_of(entry, _in_16_bits(entry), sequences) for _, entry in entries(cache))


def bytes_of(cache: Sequence[Any], sequences: int = 1) -> int:
    """The same in the dtype of the model: `nbytes`."""
    return sum(_one_of(entry, entry.nbytes, sequences) for _, entry in entries(cache))


def _one_of(entry: Any, nbytes: int, sequences: int) -> int:
    """One sequence's bytes, of those of all."""
    frame = entry.frame if isinstance(entry, BoundedKVCache) else None
    constants = frame.nbytes if frame is not None else 0
    return constants + (nbytes - constants) // sequences


def _in_16_bits(entry: Any) -> int:
    if not isinstance(entry, BoundedKVCache):
        # mlx-lm keeps its offset there too.
        of_entry = [array for _, array in cast(Any, tree_flatten(entry.state))]
        return sum(_row_bytes(array) for array in of_entry if isinstance(array, mx.array))
    arrays, store = entry.arrays(), entry.store
    # Slots may lie in a reserved range, of which only the pages in use are counted.
    more = sum(
        _excess(array, store.nbytes_of(name.removeprefix("slots.")))
        for name, array in arrays.items()
        if store is not None and name.startswith(SLOTS)
    )
    rows = [array for name, array in arrays.items() if name.startswith(RECENT)]
    beside = entry.spill.waiting if entry.spill is not None else []
    queries = entry.back.queries if entry.back is not None else []
    # The bytes of the undo journal are not among the arrays, and count at their own size.
    # Rows that were read from the file are numpy's, with the dtypes of its model.
    numbers = [a for a in (*rows, *beside, *queries) if isinstance(a, mx.array)]
    return entry.nbytes - more - sum(_excess(array, array.nbytes) for array in numbers)


def _excess(array: mx.array, nbytes: int) -> int:
    """The bytes of an array, or of the part of it in use, beyond those of a 16-bit model."""
    return nbytes // 2 if array.dtype == mx.float32 else 0


def _row_bytes(array: mx.array) -> int:
    return array.size * PLAIN_ELEMENT if array.dtype == mx.float32 else array.nbytes
