"""A frame for packed keys: each channel's centre and greatest distance, taken off before packing.

A few key channels carry large, constant offsets, and one of them in a group of 64 leaves the others
hardly a level. With k' = (k - centre) / scale, per channel and KV head, every channel fills its
group's range alike. A query q meets packed keys as q' = scale q: q.k = q'.k' + q.centre, and the
last term is the same for every slot, so the softmax never sees it. Values need no frame. Related:
SmoothAttention (QServe, arXiv 2405.04532; a scale alone), KIVI, KVQuant.

This is the definition in plain ops; no store uses it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.packed import PackedRows
from mlx_h2o.stock import stock_caches

# A channel that never moves keeps a scale that can be divided by.
LEAST_SCALE = 1e-4


@dataclass(frozen=True)
class Frame:
    """One layer's frame.

    Attributes:
        centre: Each channel's mean, `[H, D]` float32.
        scale: Its greatest distance from that, `[H, D]` float32, at least `LEAST_SCALE`.
    """

    centre: mx.array
    scale: mx.array

    @classmethod
    def of(cls, keys: mx.array) -> Frame:
        """The frame of keys `[B, H, T, D]` as they are cached, with RoPE applied."""
        keys = keys.astype(mx.float32)
        centre = keys.mean(axis=(0, 2))
        distance = mx.abs(keys - centre[:, None]).max(axis=(0, 2))
        return cls(centre, mx.maximum(distance, LEAST_SCALE))

    def enter(self, keys: mx.array) -> mx.array:
        """Keys `[B, H, T, D]` as they are packed, in their dtype."""
        framed = (keys.astype(mx.float32) - self.centre[:, None]) / self.scale[:, None]
        return framed.astype(keys.dtype)

    def leave(self, keys: mx.array) -> mx.array:
        """Keys as the model made them, `[B, H, T, D]` float32."""
        return keys.astype(mx.float32) * self.scale[:, None] + self.centre[:, None]


def frames_of(model: nn.Module, passes: Sequence[mx.array]) -> list[Frame | None]:
    """A frame for each layer, from calibration passes at positions 0 and on.

    Args:
        model: An mlx-lm model.
        passes: Token ids `[B, T]`.

    Returns:
        One entry a layer; None where the layer has no plain `KVCache`.
    """
    seen: list[list[mx.array | None]] = []
    for tokens in passes:
        caches = stock_caches(model)
        mx.eval(model(tokens, cache=caches))
        seen.append([_cached_keys(entry) for entry in caches])
    frames: list[Frame | None] = []
    for layer in zip(*seen, strict=True):
        keys = [rows for rows in layer if rows is not None]
        frames.append(Frame.of(mx.concatenate(keys, axis=2)) if keys else None)
    return frames


def _cached_keys(entry: object) -> mx.array | None:
    """A copy of a plain cache's keys: its buffer is larger, and would stay alive."""
    if type(entry) is not mlx_lm_cache.KVCache or entry.keys is None:
        return None
    keys = mx.contiguous(entry.keys[:, :, : entry.offset])
    mx.eval(keys)
    return keys


@dataclass(frozen=True)
class RowFormat:
    """What rows become when they are stored, for measuring: packed, and unpacked again.

    Attributes:
        k_bits: Of keys; None leaves them as they are.
        v_bits: Of values, likewise.
        group_size: Elements that share a scale and a bias.
        by_range: Whether rows are packed as stores pack them, or by `mx.quantize`.
        frame: The keys' frame, or None.
        dtype: In which rows, scales and biases are stored.
    """

    k_bits: int | None = None
    v_bits: int | None = None
    group_size: int = 64
    by_range: bool = True
    frame: Frame | None = None
    dtype: mx.Dtype = mx.float16

    def keys(self, keys: mx.array) -> mx.array:
        """Keys `[B, H, L, D]` as attention will see them."""
        if self.k_bits is None:
            return keys
        if self.frame is None:
            return self._restored(keys, self.k_bits).astype(keys.dtype)
        framed = self._restored(self.frame.enter(keys.astype(mx.float32)), self.k_bits)
        return self.frame.leave(framed).astype(keys.dtype)

    def values(self, values: mx.array) -> mx.array:
        """Values `[B, H, L, Dv]`, likewise."""
        if self.v_bits is None:
            return values
        return self._restored(values, self.v_bits).astype(values.dtype)

    def _restored(self, rows: mx.array, bits: int) -> mx.array:
        rows = rows.astype(self.dtype)
        if self.by_range:
            return PackedRows.of(rows, bits, self.group_size).dequantized()
        quantized = mx.quantize(rows, group_size=self.group_size, bits=bits)
        return PackedRows(*quantized, bits, self.group_size).dequantized()

    def row_bytes(self, key_width: int, value_width: int) -> int:
        """Bytes of one slot's key and value."""
        total = 0
        for bits, width in ((self.k_bits, key_width), (self.v_bits, value_width)):
            if bits is None:
                total += width * self.dtype.size
            else:
                total += width * bits // 8 + 2 * self.dtype.size * (width // self.group_size)
        return total
