"""What a model asks of a layer: queries, and how they are to see the keys."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_h2o.masks import Mask


class AttentionCall(NamedTuple):
    """One call of a model's attention, keys and values apart.

    Attributes:
        q: `[B, Hq, L, D]`.
        scale: Factor on q.k.
        mask: None, "causal" or an array over the new rows' columns.
        sinks: Attention-sink logits `[Hq]`.
        softcap: c of logits capped softly, c tanh(logits / c) before the mask; 0: they are not.
    """

    q: mx.array
    scale: float
    mask: Mask = None
    sinks: mx.array | None = None
    softcap: float = 0.0

    @property
    def length(self) -> int:
        """L, the queries."""
        return self.q.shape[2]

    def with_queries(self, q: mx.array) -> AttentionCall:
        """The same of other queries."""
        return self._replace(q=q)

    def of_sequence(self, q: mx.array, mask: Mask) -> AttentionCall:
        """The same of one sequence's queries `[1, Hq, L, D]`, with a mask of its own."""
        return self._replace(q=q, mask=mask)

    def of_heads(self, first: int, last: int) -> AttentionCall:
        """The call of the query heads first to last - 1."""
        if (first, last) == (0, self.q.shape[1]):
            return self
        sinks = None if self.sinks is None else self.sinks[first:last]
        return self._replace(q=self.q[:, first:last], sinks=sinks)

    def token(self, index: int, mask: Mask) -> AttentionCall:
        """The call of one query, with a mask of its own."""
        return self._replace(q=self.q[:, :, index : index + 1], mask=mask)
