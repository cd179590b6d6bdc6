"""A frame for packed keys: each channel's centre and scale, taken off before packing.

A few key channels carry large, constant offsets, and one of them in a group of 64 leaves the others
hardly a level. With k' = (k - centre) / scale, per channel and KV head, each has the part of its
group's range that it is worth to queries (`calibration/scaling_fit.py`). A query q meets packed
keys as q' = scale q: q.k = q'.k' + q.centre, and the last term is the same for every slot, so the
softmax never sees it. Values need no frame. Related: SmoothAttention (QServe, arXiv 2405.04532; a
scale alone), KIVI, KVQuant.

A cache with a frame works in it throughout: keys and queries enter at its door (`engine/step.py`),
and slots, recent window, remainder, distances and files know no other keys. What comes out needs
nothing back: the remainder's logit moves by q.centre too, and its second-order term, of q'^2 and
var(k'), is the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from mlx_h2o.storage.packed import PackedRows

# A channel that never moves keeps a scale that can be divided by.
LEAST_SCALE = 1e-4


@dataclass(frozen=True, eq=False)
class Frame:
    """One layer's frame.

    Attributes:
        centre: Of each channel, `[H, D]`; kept in float32.
        scale: Of each channel, `[H, D]`, above 0; kept in float32.

    Raises:
        ValueError: The two have another or different shapes, or numbers that no key can be put
            into.
    """

    centre: mx.array
    scale: mx.array

    def __post_init__(self) -> None:
        for name in ("centre", "scale"):
            part = mx.array(getattr(self, name)).astype(mx.float32)
            object.__setattr__(self, name, mx.contiguous(part))
        if self.centre.ndim != 2 or self.centre.shape != self.scale.shape:
            raise ValueError(
                "A frame's centre and scale are [KV heads, key width] each; got "
                f"{self.centre.shape} and {self.scale.shape}."
            )
        finite = mx.isfinite(self.centre).all() & mx.isfinite(self.scale).all()
        if not (finite & (self.scale > 0).all()).item():
            raise ValueError("A frame's centre is finite, its scale finite and above 0.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and all(
            mx.array_equal(mine, theirs).item()
            for mine, theirs in zip(self.arrays, other.arrays, strict=True)
        )

    def __hash__(self) -> int:
        return hash(self.centre.shape)

    @classmethod
    def of(cls, *parts: mx.array, centred: bool = True) -> Frame:
        """Mean and greatest distance of keys as they are cached, with RoPE applied.

        Where nothing is known of the queries, each channel fills the range alike.

        Args:
            parts: Keys `[B, H, n, D]` of a text like those to come, read one after the other.
            centred: Whether it may move logits: not beside attention sinks, which do not move.
        """
        count = sum(part.shape[0] * part.shape[2] for part in parts)
        seen = []
        for part in parts:
            keys = part.astype(mx.float32)
            seen.append([keys.sum(axis=(0, 2)), keys.min(axis=(0, 2)), keys.max(axis=(0, 2))])
            mx.eval(seen[-1])
        sums, lows, highs = (mx.stack(list(of)) for of in zip(*seen, strict=True))
        centre = sums.sum(axis=0) / count if centred else mx.zeros(sums.shape[1:])
        distance = mx.maximum(highs.max(axis=0) - centre, centre - lows.min(axis=0))
        return cls(centre, mx.maximum(distance, LEAST_SCALE))

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """Centre and scale."""
        return self.centre, self.scale

    @property
    def nbytes(self) -> int:
        return self.centre.nbytes + self.scale.nbytes

    @cached_property
    def moves(self) -> bool:
        """Whether it has a centre, by which it moves all of a query's logits alike."""
        return bool((self.centre != 0).any().item())

    def enter(self, keys: mx.array) -> mx.array:
        """Keys `[B, H, T, D]` as they are packed, in their dtype."""
        framed = (keys.astype(mx.float32) - self.centre[:, None]) / self.scale[:, None]
        return framed.astype(keys.dtype)

    def enter_queries(self, queries: mx.array) -> mx.array:
        """Queries `[B, Hq, T, D]` as they meet such keys, in their dtype."""
        scale = mx.repeat(self.scale, queries.shape[1] // self.scale.shape[0], axis=0)
        return (queries.astype(mx.float32) * scale[:, None]).astype(queries.dtype)

    def leave(self, keys: mx.array, first: int = 0) -> mx.array:
        """Keys of the KV heads from `first` on as the model made them, `[B, heads, T, D]`, in
        float32."""
        heads = slice(first, first + keys.shape[1])
        return keys.astype(mx.float32) * self.scale[heads, None] + self.centre[heads, None]


@dataclass(frozen=True)
class RowFormat:
    """What rows become when they are stored, for measuring: packed, and unpacked again.

    Attributes:
        k_bits: Of keys; None leaves them as they are.
        v_bits: Of values; None leaves them as they are.
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
        """Values `[B, H, L, Dv]` as attention will see them."""
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
