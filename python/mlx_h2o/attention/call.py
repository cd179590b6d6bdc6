"""The arguments of one attention call: queries, scale, mask, sinks and softcap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import mlx.core as mx

from mlx_h2o.attention.tracing import REFUSED, tracing
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

    def with_mask(self, mask: Mask) -> AttentionCall:
        """The same call with another mask."""
        return self._replace(mask=mask)

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
    """A cache that receives routed attention calls, each as one `AttentionCall`."""

    #: Whether attention is routed to this cache.
    attending: ClassVar[bool] = True
    #: Whether it works within mx.compile, mx.grad and mx.vmap (`attention/tracing.py`).
    traceable: ClassVar[bool] = True

    @abstractmethod
    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Take one attention call; return its output `[B, Hq, L, Dv]`.

        Args:
            call: Queries `[B, Hq, L, D]`, scale, mask, sinks and softcap.
            keys: The keys that `update_and_fetch` returned, or keys derived from them.
            values: The values that `update_and_fetch` returned, or values derived from them.
        """

    def attend(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
        softcap: float = 0.0,
    ) -> mx.array:
        """Attend to the rows of the cache, the new ones included: the entry point of routing.

        Args:
            q: Queries `[B, Hq, L, D]`.
            keys: The keys that `update_and_fetch` returned, or keys derived from them.
            values: The values that `update_and_fetch` returned, or values derived from them.
            scale: Factor on q.k.
            mask: None, "causal" or an array, of which bounded caches read only the last L columns,
                since kept slots are always visible.
            sinks: Attention-sink logits `[Hq]`.
            softcap: c of logits capped softly, or 0 (`AttentionCall`).

        Returns:
            `[B, Hq, L, Dv]`.

        Raises:
            RuntimeError: Within mx.compile, mx.grad or mx.vmap, unless the cache is traceable;
                there are no rows to attend to; or the keys are not those that were returned.
        """
        if not self.traceable and tracing():
            raise RuntimeError(REFUSED)
        return self.look(AttentionCall(q, scale, mask, sinks, softcap), keys, values)
