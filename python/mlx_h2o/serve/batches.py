"""mlx-lm's batch generator, telling when a request begins, steps and ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from mlx_lm.generate import BatchGenerator

from mlx_h2o.batch_cache import BatchH2OKVCache
from mlx_h2o.cache_lists import entries
from mlx_h2o.serve.ticket import Ticket

#: Steps without a newcomer between two looks at the bytes, which grow slowly.
WEIGHED_EVERY = 8


class Owner(Protocol):
    """Who is told."""

    def begun(self) -> Ticket:
        """The request whose prompt comes now."""

    def stepped(self, seconds: float, prompted: int, generated: int) -> None:
        """A step of all sequences is done, with so many tokens."""

    def weighed(self, nbytes: int, slots: float) -> None:
        """What all caches of the batch hold: bytes, and tokens of all sequences together."""

    def snapped(self, cache: list[Any]) -> None:
        """These caches were copied in mid-way."""

    def ended(self, ticket: Ticket, cache: list[Any] | None) -> None:
        """A request's sequence left the batch, with its cache if it came to its end."""


class AccountedBatch(BatchGenerator):  # type: ignore[misc]
    """A `BatchGenerator` whose sequences have tickets."""

    def __init__(self, *args: Any, owner: Owner, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._owner = owner
        self._tickets: dict[int, Ticket] = {}
        self._steps = 0

    def insert_segments(
        self, segments: list[list[list[int]]], *args: Any, **kwargs: Any
    ) -> list[int]:
        """As in mlx-lm."""
        uids: list[int] = super().insert_segments(segments, *args, **kwargs)
        ticket = self._owner.begun()
        self._tickets |= dict.fromkeys(uids, ticket)
        return uids

    def next(self) -> tuple[list[Any], list[Any]]:
        """As in mlx-lm."""
        before, start = self._counters.prompt_tokens, time.perf_counter()
        prompted, generated = super().next()
        seconds = time.perf_counter() - start
        tokens = self._counters.prompt_tokens - before
        self._owner.stepped(seconds, tokens, len(generated))
        ended = [response for response in generated if response.finish_reason is not None]
        self._steps += 1
        if prompted or ended or self._steps % WEIGHED_EVERY == 0:
            gone = sum(entry.nbytes for response in ended for entry in response.prompt_cache)
            self._owner.weighed(self.prompt_cache_nbytes + gone, self._slots())
        for response in ended:
            self._end(response.uid, response.prompt_cache)
        return prompted, generated

    def _slots(self) -> float:
        """Tokens that all sequences hold, mean over layers."""
        layers = [entry for _, entry in entries(self._generation_batch.prompt_cache)]
        bounded = [layer for layer in layers if isinstance(layer, BatchH2OKVCache)]
        held = sum(cache.size() for layer in bounded for cache in layer.caches)
        return held / len(bounded) if bounded else 0.0

    def extract_cache(self, uids: Sequence[int]) -> dict[int, Any]:
        """As in mlx-lm."""
        extracted: dict[int, Any] = super().extract_cache(uids)
        for cache, _ in extracted.values():
            self._owner.snapped(cache)
        return extracted

    def remove(self, uids: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """As in mlx-lm."""
        removed = super().remove(uids, *args, **kwargs)
        for uid in uids:
            self._end(uid, None)
        return removed

    def _end(self, uid: int, cache: list[Any] | None) -> None:
        ticket = self._tickets.pop(uid, None)
        if ticket is not None:
            self._owner.ended(ticket, cache)
