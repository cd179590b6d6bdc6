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

from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.budgets.cost import PLAIN_ELEMENT, RowWidths, slots_for_bytes
from mlx_h2o.budgets.plan import LayerKind, plain_bytes
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.integration.layer_probe import layer_kinds
from mlx_h2o.model_caches.make import bounded_caches
from mlx_h2o.storage.slot_store import FEW

#: Names of the arrays in which our caches hold rows.
ROWS = tuple(f"{place}.{rows}" for place in ("slots", "recent") for rows in ("keys", "values"))


def slots_in_16_bits(
    model: nn.Module, settings: ModelSettings, tokens: int, context: int | None
) -> int:
    """The `max_size` of bounded caches that takes the bytes of `tokens` plain 16-bit tokens.

    Args:
        model: The model that the caches are for.
        settings: The caches' settings; the size in them is not used.
        tokens: Tokens of a plain cache.
        context: Tokens that will come; None, if not known, counts as few.

    Raises:
        ValueError: The remainder alone takes more bytes.
    """
    kinds = layer_kinds(model)
    # One size serves all layers: the size for which no layer is too small.
    few = context is None or context <= FEW
    return min(_slots_of_layer(kind, kinds, settings, tokens, few) for kind in kinds)


def caches_in_16_bits(
    model: nn.Module, settings: ModelSettings, tokens: int, context: int | None
) -> list[Any]:
    """Bounded caches with the bytes of `tokens` plain 16-bit tokens, bits and slots by the profile.

    Args:
        model: The model that the caches are for.
        settings: The caches' settings; the size in them is not used. Bits that they name stay.
        tokens: Tokens of a plain cache.
        context: Tokens that will come.

    Raises:
        ValueError: The bytes are too few.
    """
    kinds = [replace(kind, widths=_in_16_bits(kind.widths)) for kind in layer_kinds(model)]
    given = tokens * sum(map(plain_bytes, kinds))
    sized = replace(settings, max_size=None, max_bytes=given, context=context)
    by_bytes = replace(sized, chooses_bits=not settings.packing.packs)
    return bounded_caches(model, by_bytes, kinds)


def _in_16_bits(widths: RowWidths) -> RowWidths:
    return replace(widths, key_size=PLAIN_ELEMENT, value_size=PLAIN_ELEMENT)


def _slots_of_layer(
    kind: LayerKind, kinds: Sequence[LayerKind], settings: ModelSettings, tokens: int, few: bool
) -> int:
    policy = settings.policy_for(all(k.routed for k in kinds))
    answers = settings.remainder and not any(k.derived for k in kinds)
    remembers = answers or policy.uses_evicted_mean
    own = replace(kind.widths, packing=settings.packing, undo=settings.undo)
    held = _in_16_bits(own.narrow if few else own)
    given = tokens * PLAIN_ELEMENT * (own.key + own.value)
    # The cache subtracts the remainder's slots from its size, counted in its own rows.
    return slots_for_bytes(given, 1, held, policy, remembers) + own.remainder_slots(remembers)


def bytes_in_16_bits(cache: Sequence[Any]) -> int:
    """Bytes of a model's caches, with 32-bit keys and values counted as 16-bit ones."""
    return sum(_bytes_of(entry) for _, entry in entries(cache))


def _bytes_of(entry: Any) -> int:
    if not isinstance(entry, BoundedKVCache):
        arrays = [array for _, array in cast(Any, tree_flatten(entry.state))]
        # mlx-lm keeps its offset there too.
        return sum(_row_bytes(array) for array in arrays if isinstance(array, mx.array))
    held = entry.arrays()
    rows = {name: array for name, array in held.items() if name.startswith(ROWS)}
    beside = entry.spill.waiting if entry.spill is not None else []
    queries = entry.back.queries if entry.back is not None else []
    # The bytes of the undo journal are not among the arrays, and count at their own size.
    # Rows that were read from the file are numpy's, with the dtypes of its model.
    numbers = [a for a in (*rows.values(), *beside, *queries) if isinstance(a, mx.array)]
    return entry.nbytes - sum(array.nbytes - _row_bytes(array) for array in numbers)


def _row_bytes(array: mx.array) -> int:
    return array.size * PLAIN_ELEMENT if array.dtype == mx.float32 else array.nbytes
