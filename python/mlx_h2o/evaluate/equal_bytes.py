"""Bytes as a 16-bit model has them, whatever this one computes in.

On a CPU models compute in float32, against which packed rows would look twice as good as they are.
So a comparison at equal bytes gives each cache what it would get in a 16-bit model, and counts what
it holds as that model's: keys and values (scales and biases of packed ones) at 2 bytes a number,
and positions, scores and remainders as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.budgets.cost import RowWidths, slots_for_bytes
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.integration.layer_probe import LayerKind, layer_kinds
from mlx_h2o.model_caches.make import PLAIN_ELEMENT, bounded_caches, plain_bytes
from mlx_h2o.storage.query_centres import most_bytes
from mlx_h2o.storage.slot_store import FEW

#: Where a cache of ours has its rows, by the names of its arrays.
ROWS = tuple(f"{place}.{rows}" for place in ("slots", "recent") for rows in ("keys", "values"))


def slots_in_16_bits(
    model: nn.Module, settings: ModelSettings, tokens: int, context: int | None
) -> int:
    """The `max_size` of bounded caches that takes the bytes of so many plain 16-bit tokens.

    Args:
        model: Whose caches.
        settings: Of the caches; the size in them is not looked at.
        tokens: Of a plain cache.
        context: Tokens that will come; few, if that is not known.

    Raises:
        ValueError: The remainder alone takes more.
    """
    kinds = layer_kinds(model)
    # One size serves all layers: the one that no layer is too small for.
    few = context is None or context <= FEW
    return min(_slots_of_layer(kind, kinds, settings, tokens, few) for kind in kinds)


def caches_in_16_bits(
    model: nn.Module, settings: ModelSettings, tokens: int, context: int | None
) -> list[Any]:
    """Bounded caches with the bytes of so many plain 16-bit tokens, bits and slots by the profile.

    Args:
        model: Whose caches.
        settings: Of the caches; the size in them is not looked at. Bits that they name stay.
        tokens: Of a plain cache.
        context: Tokens that will come.

    Raises:
        ValueError: That is too few bytes.
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
    centres = most_bytes(kind.group, kind.widths.key) * policy.uses_query_centres
    own = replace(kind.widths, packing=settings.packing, undo=settings.undo, centre_bytes=centres)
    held = _in_16_bits(own.narrow if few else own)
    given = tokens * PLAIN_ELEMENT * (own.key + own.value)
    # The cache takes the remainder's slots off its size, in its own rows.
    return slots_for_bytes(given, 1, held, policy, remembers) + own.remainder_slots(remembers)


def bytes_in_16_bits(cache: Sequence[Any]) -> int:
    """Bytes that the caches of a model's layers hold, 32-bit keys and values as 16-bit ones."""
    return sum(_bytes_of(entry) for _, entry in entries(cache))


def _bytes_of(entry: Any) -> int:
    if not isinstance(entry, BoundedKVCache):
        arrays = [array for _, array in cast(Any, tree_flatten(entry.state))]
        # mlx-lm notes its offset there too.
        return sum(_row_bytes(array) for array in arrays if isinstance(array, mx.array))
    held = entry.arrays()
    rows = {name: array for name, array in held.items() if name.startswith(ROWS)}
    # What can be undone is beside the arrays, and as it is.
    return entry.nbytes - sum(array.nbytes - _row_bytes(array) for array in rows.values())


def _row_bytes(array: mx.array) -> int:
    return array.size * PLAIN_ELEMENT if array.dtype == mx.float32 else array.nbytes
