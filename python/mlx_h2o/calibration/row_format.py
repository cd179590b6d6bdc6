"""Rows as stores would pack them, to measure what packing changes."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import PackedRows


@dataclass(frozen=True)
class RowFormat:
    """Packs and unpacks rows, to measure what storing them changes.

    Attributes:
        k_bits: Bits of keys; None leaves them as they are.
        v_bits: Bits of values; None leaves them as they are.
        group_size: Elements that share a scale and a bias.
        by_range: Whether rows are packed as stores pack them; else by `mx.quantize`.
        frame: The layer's key scaling, or None.
        dtype: The dtype in which rows, scales and biases are stored.
    """

    k_bits: int | None = None
    v_bits: int | None = None
    group_size: int = 64
    by_range: bool = True
    frame: Frame | None = None
    dtype: mx.Dtype = mx.float16

    def keys(self, keys: mx.array) -> mx.array:
        """Keys `[B, H, L, D]` as attention gets them once stored."""
        if self.k_bits is None:
            return keys
        if self.frame is None:
            return self._restored(keys, self.k_bits).astype(keys.dtype)
        framed = self._restored(self.frame.enter(keys.astype(mx.float32)), self.k_bits)
        return self.frame.leave(framed).astype(keys.dtype)

    def values(self, values: mx.array) -> mx.array:
        """Values `[B, H, L, Dv]` as attention gets them once stored."""
        if self.v_bits is None:
            return values
        return self._restored(values, self.v_bits).astype(values.dtype)

    def _restored(self, rows: mx.array, bits: int) -> mx.array:
        rows = rows.astype(self.dtype)
        if self.by_range:
            return PackedRows.of(rows, bits, self.group_size).dequantized()
        quantized = mx.quantize(rows, group_size=self.group_size, bits=bits)
        return PackedRows(*quantized, bits, self.group_size).dequantized()
