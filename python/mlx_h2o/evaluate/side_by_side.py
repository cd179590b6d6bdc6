"""Several caches read through one model side by side, each with its own part of the batch.

A step of a small batch is spent on reading the model's weights. Caches under comparison read the
same tokens, so they can share the matrix products: the batch is cut at attention, where each cache
gets its rows, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.attention.call import AttentionCall, Looking
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.own_attention import attend

# Caches that hold nothing but rows of attention, and take the masks of their own `make_mask`.
SERVED = (
    mlx_lm_cache.KVCache,
    mlx_lm_cache.QuantizedKVCache,
    mlx_lm_cache.RotatingKVCache,
    H2OKVCache,
)

Masks = list[Any]


class SideBySide(Looking):
    """The caches of one layer, as one cache.

    Args:
        parts: The caches of equal parts of the batch, in this order.
        masks: The masks of all layers, one for each part: the model asks only its first layer's
            cache.
    """

    def __init__(self, parts: Sequence[Any], masks: Masks):
        self.parts, self.masks = list(parts), masks
        self._handed: list[tuple[Any, Any]] = []

    @property
    def offset(self) -> int:
        """The next logical position, the same in all parts."""
        offset: int = self.parts[0].offset
        return offset

    @property
    def state(self) -> list[Any]:
        """The states of all parts."""
        return [part.state for part in self.parts]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of the first part, arguments as there; every part gets its own in `look`."""
        self.masks[:] = [
            part.make_mask(N, return_array=return_array, window_size=window_size)
            for part in self.parts
        ]
        return self.masks[0]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Give each part its rows of `[A * B, H, L, D]`."""
        rows = zip(*(self._cut(x) for x in (keys, values)), strict=True)
        self._handed = [
            part.update_and_fetch(*of_part) for part, of_part in zip(self.parts, rows, strict=True)
        ]
        return keys, values

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Attention `[A * B, Hq, L, Dv]`, computed by each part for itself.

        Args:
            call: Queries of all parts, and the keys that they see.
            keys: `[A * B, H, L, D]`.
            values: `[A * B, H, L, Dv]`.
        """
        each = zip(self.parts, self._cut(call.q), self._handed, self.masks, strict=True)
        if call.softcap:
            outs = [
                attend(part, queries, *rows, call.scale, own, call.softcap)
                for part, queries, rows, own in each
            ]
            return mx.concatenate(outs)
        attention: Any = base.scaled_dot_product_attention
        return mx.concatenate(
            [
                attention(queries, *rows, cache=part, scale=call.scale, mask=own, sinks=call.sinks)
                for part, queries, rows, own in each
            ]
        )

    def _cut(self, x: mx.array) -> list[mx.array]:
        cut: Any = mx.split(x, len(self.parts))  # a list, whatever its type says
        return list(cut)


def side_by_side(caches: Sequence[list[Any]]) -> list[Any]:
    """One list of caches for a model, made of several lists.

    Args:
        caches: Empty lists, each for the same model; `can_share` says whether they can be joined.
    """
    if len(caches) == 1:
        return caches[0]
    routing.install()
    masks: Masks = []
    return [SideBySide(layer, masks) for layer in zip(*caches, strict=True)]


def can_share(cache: Sequence[Any]) -> bool:
    """Whether a model's caches can share a batch with others: rows of attention, no state."""
    return all(type(entry) in SERVED for entry in cache)
