"""What one layer keeps so that evicted rows can come back (`layer/returning.py`)."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_h2o.slots.slot_store import Run
from mlx_h2o.spill.layout import Array
from mlx_h2o.spill.setting import Returns


class Credit(NamedTuple):
    """What the scores of a head's leased rows were raised by until the next return, `[M]` each."""

    positions: Array
    scores: Array


class ReturnState:
    """What one layer keeps so that rows can come back.

    Args:
        settings: How they come back.
        heads: The KV heads for which they do; None means all.

    Attributes:
        queries: The last queries of the heads that ask, `[1, asking * G, L, D]` each, in 16 bits
            and without key scaling.
        credits: The credit of the rows that have a lease, by KV head.
        returned: Rows that came back so far.
        rows_read: Rows that were read from the file so far.
    """

    def __init__(self, settings: Returns, heads: frozenset[int] | None = None):
        self.settings, self.heads = settings, heads
        self.queries: list[mx.array] = []
        self.credits: dict[int, Credit] = {}
        self.returned = self.rows_read = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the queries and credits."""
        credits = sum(part.nbytes for credit in self.credits.values() for part in credit)
        return sum(q.nbytes for q in self.queries) + credits

    def note(self, q: mx.array, heads: int) -> None:
        """Keep the last queries.

        They must be evaluated with the step, which else would stay in memory.

        Args:
            q: `[1, Hq, L, D]`, as the model made them.
            heads: KV heads, H.
        """
        queries = [*self.queries, self.newest(q, heads)]
        spare = sum(part.shape[2] for part in queries) - self.settings.window
        while spare >= queries[0].shape[2]:
            spare -= queries.pop(0).shape[2]
        if spare > 0:
            queries[0] = mx.contiguous(queries[0][:, :, spare:])
        self.queries = queries

    def newest(self, q: mx.array, heads: int) -> mx.array:
        """What is kept of queries `[1, Hq, L, D]`, with H `heads`: `[1, asking * G, W, D]`."""
        last = q[:, :, -self.settings.window :]
        if self.heads is not None:
            G = q.shape[1] // heads
            last = last[:, [head * G + i for head in sorted(self.heads) for i in range(G)]]
        # A copy, since a slice would keep all queries of its chunk in memory.
        return mx.contiguous(last if last.dtype == mx.bfloat16 else last.astype(mx.float16))

    def of_all(self, q: mx.array, heads: int) -> mx.array:
        """Queries `[1, Hq, W, D]`, zeros for heads that do not ask, of what is kept of them."""
        if self.heads is None:
            return q
        G, asking = q.shape[1] // len(self.heads), sorted(self.heads)
        whole = mx.zeros((1, heads * G, *q.shape[2:]), q.dtype)
        whole[:, [head * G + i for head in asking for i in range(G)]] = q
        return whole

    def asks(self, head: int) -> bool:
        """Whether rows come back for the sake of a KV head."""
        return self.heads is None or head in self.heads

    def asking_heads(self, heads: int) -> list[int]:
        """The KV heads for whose sake rows come back, of so many."""
        return list(range(heads)) if self.heads is None else sorted(self.heads)

    def has(self, run: Run) -> bool:
        """Whether rows come back to a run of heads."""
        return any(map(self.asks, range(run.first, run.last)))

    def __deepcopy__(self, memo: dict[int, Any]) -> ReturnState:
        """A copy; arrays are shared, as they never change."""
        new = copy.copy(self)
        memo[id(self)] = new
        new.queries, new.credits = list(self.queries), dict(self.credits)
        return new
