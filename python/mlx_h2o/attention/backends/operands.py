"""The operands of one attention, as one value that all backends take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Required, TypedDict, TypeVar

import mlx.core as mx

from mlx_h2o.slots.packed import AnyRows, PackedRows, first_rows
from mlx_h2o.slots.softmax import Mask, block_of

#: One more softmax column, without a slot: logits `[B, Hq, L]` and values `[B, Hk, Dv]`, float32.
Seed = tuple[mx.array, mx.array]

#: First slot and number of slots of each KV head in flat keys and values.
Ranges = Sequence[tuple[int, int]]


# Arrays; packed rows as well; or rows of several kinds as well.
R = TypeVar("R", bound=AnyRows)


class Options(TypedDict, total=False):
    """The options beside q, k and v, by name, as the attributes of `Operands`."""

    scale: Required[float]
    mask: Mask
    sinks: mx.array | None
    seed: Seed | None
    ranges: Ranges | None
    softcap: float


@dataclass(frozen=True)
class Operands(Generic[R]):
    """Queries, keys, values and options.

    Attributes:
        q: `[B, Hq, L, D]`.
        k: `[B, Hk, N, D]`, or flat `[B, S, D]` with ranges.
        v: `[B, Hk, N, Dv]`, or flat `[B, S, Dv]` with ranges.
        scale: Factor on q.k.
        mask: None, "causal" or an array.
        sinks: Attention-sink logits `[Hq]`.
        seed: One more column, or None.
        ranges: The slots of heads with different lengths.
        softcap: c of logits capped softly, or 0; only the reference supports it.
    """

    q: mx.array
    k: R
    v: R
    scale: float
    mask: Mask = None
    sinks: mx.array | None = None
    seed: Seed | None = None
    ranges: Ranges | None = None
    softcap: float = 0.0

    @property
    def packed(self) -> bool:
        """Whether keys or values are packed."""
        return isinstance(self.k, PackedRows) or isinstance(self.v, PackedRows)

    @property
    def options(self) -> Options:
        """All operands except q, k and v."""
        return {
            "scale": self.scale,
            "mask": self.mask,
            "sinks": self.sinks,
            "seed": self.seed,
            "ranges": self.ranges,
            "softcap": self.softcap,
        }

    def of_heads(self) -> Iterator[Operands[mx.array]]:
        """Each KV head of flat, dense keys and values, as an attention of one head."""
        assert self.ranges is not None
        assert isinstance(self.k, mx.array)
        assert isinstance(self.v, mx.array)
        group = self.q.shape[1] // len(self.ranges)
        for h, (start, length) in enumerate(self.ranges):
            heads = slice(h * group, (h + 1) * group)
            seed = self.seed
            yield Operands(
                q=self.q[:, heads],
                k=self.k[:, None, start : start + length],
                v=self.v[:, None, start : start + length],
                scale=self.scale,
                mask=self.mask,
                sinks=None if self.sinks is None else self.sinks[heads],
                seed=None if seed is None else (seed[0][:, heads], seed[1][:, h : h + 1]),
                softcap=self.softcap,
            )

    def of_queries(self, count: int) -> Iterator[Operands[R]]:
        """Blocks of so many queries, each with the keys that they can attend to."""
        L, N = self.q.shape[2], self.k.shape[2]
        for start in range(0, L, count):
            end = min(start + count, L)
            block = block_of(self.mask, start, end, L, N, own=False)
            seed = self.seed
            yield replace(
                self,
                q=self.q[:, :, start:end],
                k=first_rows(self.k, block.keys),  # type: ignore[arg-type]  # of the same kind
                v=first_rows(self.v, block.keys),  # type: ignore[arg-type]
                mask=block.mask,
                seed=None if seed is None else (seed[0][:, :, start:end], seed[1]),
            )
