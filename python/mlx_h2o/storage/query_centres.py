"""Mean queries of a layer before RoPE (query centres): constants of a model's heads.

Before RoPE the queries of a head lie around one point, wherever in a text they are. So the mean
logit of a key at any distance can be computed without a query: from that point, turned to the
query's position (TriAttention, arXiv 2604.04921). `calibration/centres_build.py` computes the
points from a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o.storage.rope import Rope


@dataclass(frozen=True, eq=False)
class QueryCentres:
    """Query centres of one layer: G query heads for each of H KV heads.

    Attributes:
        centre: The mean query before RoPE, `[H, G, D]`; kept in float32.
        spread: For each rotary pair of channels, the mean length minus the mean's length, which is
            0 where all queries are equal, `[H, G, dims / 2]`; kept in float32.
        rope: The RoPE that queries and keys get afterwards.

    Raises:
        ValueError: The shapes do not fit together, or numbers are not finite or a spread is
            negative.
    """

    centre: mx.array
    spread: mx.array
    rope: Rope

    def __post_init__(self) -> None:
        for name in ("centre", "spread"):
            part = mx.array(getattr(self, name)).astype(mx.float32)
            object.__setattr__(self, name, mx.contiguous(part))
        fits = self.centre.ndim == 3 and self.rope.dims <= self.centre.shape[-1]
        if not fits or self.spread.shape != (*self.centre.shape[:2], self.rope.dims // 2):
            raise ValueError(
                "Query centres are [KV heads, query heads of each, key width] and their spread "
                "[KV heads, query heads of each, half of the RoPE's channels]; got "
                f"{self.centre.shape} and {self.spread.shape} for {self.rope}."
            )
        finite = mx.isfinite(self.centre).all() & mx.isfinite(self.spread).all()
        if not (finite & (self.spread >= 0).all()).item():
            raise ValueError("Query centres are finite, their spread finite and not below 0.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QueryCentres) or self.rope != other.rope:
            return False
        pairs = zip(self.arrays, other.arrays, strict=True)
        return all(mx.array_equal(mine, theirs).item() for mine, theirs in pairs)

    def __hash__(self) -> int:
        return hash((self.centre.shape, self.rope))

    @classmethod
    def of(cls, queries: mx.array, heads: int, rope: Rope) -> QueryCentres:
        """The query centres of a text's queries.

        Args:
            queries: `[B, Hq, T, D]` with RoPE applied at positions 0 to T - 1.
            heads: The number of KV heads H.
            rope: The RoPE that was applied.
        """
        B, Hq, T, D = queries.shape
        back = mx.broadcast_to(-mx.arange(T), (B, Hq, T))
        bare = rope.turned(queries.astype(mx.float32), back)
        centre = bare.mean(axis=(0, 2))
        lengths = rope.pair_lengths(bare).mean(axis=(0, 2))
        spread = mx.maximum(lengths - rope.pair_lengths(centre), 0)
        shape = heads, Hq // heads, -1
        return cls(centre.reshape(shape), spread.reshape(shape), rope)

    def ahead(self, steps: Sequence[int], position: int) -> mx.array:
        """The query centres turned to `steps` after a position and averaged, `[H, G, D]`.

        Its dot product with a cached key is the mean of their logits, before the scale.
        """
        H, G, D = self.centre.shape
        at = mx.array([position + step for step in steps], mx.float32)[:, None, None]
        queries = mx.broadcast_to(self.centre, (len(steps), H, G, D))
        return self.rope.turned(queries, at).mean(axis=0)

    def of_heads(self, first: int, last: int) -> QueryCentres:
        """The centres of the KV heads first to last - 1."""
        if (first, last) == (0, self.centre.shape[0]):
            return self
        return QueryCentres(self.centre[first:last], self.spread[first:last], self.rope)

    @property
    def keys(self) -> tuple[int, int]:
        """Number of KV heads and width of the keys that the centres fit."""
        return self.centre.shape[0], self.centre.shape[2]

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """Centre and spread."""
        return self.centre, self.spread

    @property
    def nbytes(self) -> int:
        return self.centre.nbytes + self.spread.nbytes

    @property
    def head_bytes(self) -> int:
        """Bytes for each KV head."""
        return self.nbytes // self.centre.shape[0]

    def config(self) -> dict[str, Any]:
        """The settings beside the arrays, as JSON types."""
        return self.rope.config()


def most_bytes(group: int, width: int) -> int:
    """Most bytes of the centres of one KV head: those where RoPE turns all channels.

    Args:
        group: Query heads of a KV head, G.
        width: Width of a key, D.
    """
    return 4 * group * (width + width // 2)
