"""The arguments of one attention call: queries, scale, mask, sinks and softcap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from mlx_h2o.slots.softmax import Mask


class AttentionCall(NamedTuple):
    """One call of a model's attention, without keys and values.

    Attributes:
        q: `[B, Hq, L, D]`.
        scale: Factor on q.k.
        mask: None, "causal" or an array over the new rows' columns.
        sinks: Attention-sink logits `[Hq]`.
        softcap: c of logits capped softly, c tanh(logits / c) before the mask; 0 for no cap.
    """

    q: mx.array
    scale: float
    mask: Mask = None
    sinks: mx.array | None = None
    softcap: float = 0.0

    def with_queries(self, q: mx.array) -> AttentionCall:
        """The same call with other queries."""
        return self._replace(q=q)

    def of_sequence(self, q: mx.array, mask: Mask) -> AttentionCall:
        """The call with one sequence's queries `[1, Hq, L, D]` and its own mask."""
        return self._replace(q=q, mask=mask)

    def of_heads(self, first: int, last: int) -> AttentionCall:
        """The call of the query heads first to last - 1."""
        sinks = None if self.sinks is None else self.sinks[first:last]
        return self._replace(q=self.q[:, first:last], sinks=sinks)

    def token(self, index: int, mask: Mask) -> AttentionCall:
        """The call of one query, with its own mask."""
        return self._replace(q=self.q[:, :, index : index + 1], mask=mask)


class Looking(ABC):
    """A cache that receives routed attention calls as one `AttentionCall`."""

    attending: ClassVar[bool] = True

    @abstractmethod
    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Take one attention call with its new rows; return its output `[B, Hq, L, Dv]`.

        Args:
            call: Queries `[B, Hq, L, D]`, scale, mask, sinks and softcap.
            keys: `[B, H, L, D]`.
            values: `[B, H, L, Dv]`.
        """

    def attend(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: Any,
        softcap: float = 0.0,
    ) -> mx.array:
        """The entry point of routing (`H2OKVCache.attend`).

        Args:
            q: Queries `[B, Hq, L, D]`.
            keys: `[B, H, L, D]`.
            values: `[B, H, L, Dv]`.
            scale: Factor on q.k.
            mask: None, "causal" or an array.
            sinks: Attention-sink logits `[Hq]`.
            softcap: c of logits capped softly, or 0.
        """
        return self.look(AttentionCall(q, scale, mask, sinks, softcap), keys, values)
