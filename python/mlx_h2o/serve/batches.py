"""mlx-lm's batch generator, telling when a request begins, steps, ends, or breaks off."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import CacheList

from mlx_h2o.batch_cache import BatchH2OKVCache
from mlx_h2o.cache_lists import entries
from mlx_h2o.serve.ticket import Ticket, Turn

#: Steps without a newcomer between two looks at the bytes, which grow slowly.
WEIGHED_EVERY = 8


class Owner(Protocol):
    """Who is told."""

    def batched(self, batch: AccountedBatch) -> None:
        """Requests will run in this batch."""

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

    def failed(self, tickets: Sequence[Ticket], error: Exception) -> None:
        """A step raised, and these requests' sequences are lost by it."""


@dataclass(frozen=True)
class Answered:
    """A sequence whose answer is being given.

    Attributes:
        turn: Its answer's name, and how its conversation began.
        tokens: That its caches have read.
        caches: Its own, one for each layer, not copied: they go on with the next step. What
            bounds nothing is the whole batch's.
    """

    turn: Turn
    tokens: list[int]
    caches: list[Any]


def _of_sequence(entry: Any, place: int) -> Any:
    """One sequence's cache of a batch's, members of a CacheList too."""
    if isinstance(entry, CacheList):
        return CacheList(*(_of_sequence(member, place) for member in entry.caches))
    return entry.caches[place] if isinstance(entry, BatchH2OKVCache) else entry


class Generating(GenerationBatch):  # type: ignore[misc]
    """mlx-lm's `GenerationBatch`, of which is known whether it came through.

    Attributes:
        said: What its last step gave, which a prompt that fails after it must not take away.
        whole: Whether its last step, or the last joining, came to its end.
    """

    said: Sequence[Any] = ()
    whole = True

    def next(self) -> Any:
        """As in mlx-lm."""
        self.whole = False
        self.said = super().next()
        self.whole = True
        return self.said

    def extend(self, batch: Any) -> None:
        """As in mlx-lm."""
        self.whole = False
        super().extend(batch)
        self.whole = True


class AccountedBatch(BatchGenerator):  # type: ignore[misc]
    """A `BatchGenerator` whose sequences have tickets, and whose steps may fail.

    A step that raises leaves the sequences that were in it in no known state: they are given up,
    those that generate or those whose prompts are read, and the others go on.
    """

    def __init__(self, *args: Any, owner: Owner, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._owner = owner
        self._tickets: dict[int, Ticket] = {}
        self._lost: list[int] = []  # given up, of which mlx-lm's loop was not told yet
        self._steps = 0
        self._generation_batch = Generating.empty(self.model, self.sampler)
        owner.batched(self)

    def insert_segments(
        self, segments: list[list[list[int]]], *args: Any, **kwargs: Any
    ) -> list[int]:
        """As in mlx-lm; what it cannot take in is given up."""
        ticket = self._owner.begun()
        try:
            uids: list[int] = super().insert_segments(segments, *args, **kwargs)
        except Exception as error:
            uids = [self._uid_count + i for i in range(len(segments))]
            self._uid_count += len(segments)
            self._lost += uids
            self._owner.failed([ticket], error)
            return uids
        self._tickets |= dict.fromkeys(uids, ticket)
        return uids

    def next(self) -> tuple[list[Any], list[Any]]:
        """As in mlx-lm; sequences that are given up are among the prompts."""
        before, start = self._counters.prompt_tokens, time.perf_counter()
        self._generation_batch.said = ()
        try:
            prompted, generated = super().next()
        except Exception as error:
            logging.exception("A step failed")
            prompted, generated = [], list(self._generation_batch.said)
            self._give_up(error, {response.uid for response in generated})
        else:
            seconds = time.perf_counter() - start
            tokens = self._counters.prompt_tokens - before
            self._owner.stepped(seconds, tokens, len(generated))
        ended = [response for response in generated if response.finish_reason is not None]
        self._steps += 1
        if prompted or ended or self._lost or self._steps % WEIGHED_EVERY == 0:
            gone = sum(entry.nbytes for response in ended for entry in response.prompt_cache)
            self._owner.weighed(self.prompt_cache_nbytes + gone, self._slots())
        for response in ended:
            self._end(response.uid, response.prompt_cache)
        # mlx-lm's loop removes a sequence of which it hears once its request has stopped.
        lost, self._lost = self._lost, []
        prompted += [PromptProcessingBatch.Response(uid, (0, 0), False, True) for uid in lost]
        return prompted, generated

    def _give_up(self, error: Exception, answered: set[int]) -> None:
        """Let go of the sequences that a step which raised was about.

        Args:
            error: That it raised.
            answered: Sequences whose token of this step is out.
        """
        kept = answered | {sequence[0] for sequence in self._unprocessed_sequences}
        if self._generation_batch.whole:
            kept |= set(self._generation_batch.uids)
            self._prompt_batch = PromptProcessingBatch.empty(
                self.model, self.sampler, prefill_step_size=self.prefill_step_size
            )
            self._currently_processing = []
        else:
            kept |= set(self._prompt_batch.uids)
            self._generation_batch = Generating.empty(self.model, self.sampler)
        lost = [uid for uid in self._tickets if uid not in kept]
        self._lost += lost
        self._owner.failed([self._tickets.pop(uid) for uid in lost], error)

    def _slots(self) -> float:
        """Tokens that all sequences hold, mean over layers."""
        layers = [entry for _, entry in entries(self._generation_batch.prompt_cache)]
        bounded = [layer for layer in layers if isinstance(layer, BatchH2OKVCache)]
        held = sum(cache.size() for layer in bounded for cache in layer.caches)
        return held / len(bounded) if bounded else 0.0

    def answered(self, name: str) -> Answered | None:
        """The sequence whose answer of this name is being given; between two steps."""
        batch = self._generation_batch
        for place, uid in enumerate(batch.uids):
            turn = self._tickets[uid].turn if uid in self._tickets else None
            if turn is not None and turn.name == name:
                caches = [_of_sequence(entry, place) for entry in batch.prompt_cache]
                return Answered(turn, list(batch.tokens[place]), caches)
        return None

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
