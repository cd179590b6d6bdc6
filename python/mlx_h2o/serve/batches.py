"""mlx-lm's batch generator, which reports when a request begins, steps, ends, or breaks off."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import CacheList, make_prompt_cache

from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.caches.batch import BatchH2OKVCache
from mlx_h2o.serve.conversations import pieces_of
from mlx_h2o.serve.member import Member, Reading, generate_again, own_processors, own_sampler
from mlx_h2o.serve.ticket import Ticket, Turn

#: Steps without a new request between two measurements of the bytes, which grow slowly.
WEIGHED_EVERY = 8


class Owner(Protocol):
    """The object that a batch reports to."""

    def batched(self, batch: AccountedBatch) -> None:
        """Requests will run in this batch."""

    def begun(self) -> Ticket:
        """The request whose prompt is read next."""

    def stepped(self, seconds: float, prompted: int, generated: int) -> None:
        """A step of all sequences is done.

        Args:
            seconds: The step's duration in seconds.
            prompted: Prompt tokens that were read.
            generated: Tokens that were generated.
        """

    def weighed(self, nbytes: int, slots: float) -> None:
        """All caches of the batch were measured: their bytes, and the tokens of all sequences."""

    def snapped(self, cache: list[Any]) -> None:
        """These caches were copied midway."""

    def ended(self, ticket: Ticket, cache: list[Any] | None) -> None:
        """A sequence left the batch, with its cache if it was completed."""

    def failed(self, tickets: Sequence[Ticket], error: Exception) -> None:
        """A step raised, and the sequences of these requests are lost; none, if all go on."""

    def idle_pieces(self) -> Collection[int] | None:
        """Ids of arrays that idle conversations hold (`BoundedKVCache.pieces`); None: no bound."""


@dataclass(frozen=True)
class Answered:
    """A sequence in the middle of its answer.

    Attributes:
        turn: The answer's name, and how its conversation began.
        tokens: The tokens that its caches have read.
        caches: Its own caches, one for each layer, not copied: they change with the next step.
            Caches without a bound are those of the whole batch.
    """

    turn: Turn
    tokens: list[int]
    caches: list[Any]


def _of_sequence(entry: Any, place: int) -> Any:
    """One sequence's part of a batch's cache, members of a CacheList too."""
    if isinstance(entry, CacheList):
        return CacheList(*(_of_sequence(member, place) for member in entry.caches))
    return entry.caches[place] if isinstance(entry, BatchH2OKVCache) else entry


class Generating(GenerationBatch):  # type: ignore[misc]
    """mlx-lm's `GenerationBatch`, which notes whether its steps were completed.

    Attributes:
        said: The last step's responses, which must survive if a prompt fails after it.
        whole: Whether the last step, or the last joining, was completed.
        taken: The sequences at the beginning of the last step.
        pending: The token that the last step took in from each of them.
    """

    said: Sequence[Any] = ()
    whole = True
    taken: Sequence[int] = ()
    pending: mx.array | None = None

    def next(self) -> Any:
        """As in mlx-lm."""
        self.whole, self.taken, self.pending = False, list(self.uids), self._next_tokens
        self.said = super().next()
        self.whole = True
        return self.said

    def extend(self, batch: Any) -> None:
        """As in mlx-lm."""
        self.whole, self.taken, self.pending = False, (), None
        super().extend(batch)
        self.whole = True

    def settle(self) -> None:
        """Compute everything that is still lazy, so that an error in it comes to light."""
        mx.eval(self._next_tokens, self._next_logprobs, [c.state for c in self.prompt_cache])

    def pending_tokens(self) -> dict[int, int]:
        """The tokens that a failed step had taken in, by sequence; empty if they are lost too."""
        if self.pending is None:
            return {}
        try:
            tokens: Any = self.pending.tolist()
        except Exception:  # it was sampled lazily, and sampling raised
            return {}
        return dict(zip(self.taken, tokens, strict=True))


class Prompting(PromptProcessingBatch):  # type: ignore[misc]
    """mlx-lm's `PromptProcessingBatch`, which notes whether its steps were completed.

    Attributes:
        whole: Whether the last chunk, joining or leaving was completed.
    """

    whole = True

    def prompt(self, tokens: Any) -> None:
        """As in mlx-lm."""
        self.whole = False
        super().prompt(tokens)
        self.whole = True

    def extend(self, batch: Any) -> None:
        """As in mlx-lm."""
        self.whole = False
        super().extend(batch)
        self.whole = True

    def filter(self, keep: list[int]) -> None:
        """As in mlx-lm."""
        self.whole = False
        super().filter(keep)
        self.whole = True


class AccountedBatch(BatchGenerator):  # type: ignore[misc]
    """A `BatchGenerator` whose sequences have tickets, and whose steps may fail.

    A sampler or logits processor that raises ends only its own sequence. Any other step that
    raises leaves its sequences in an unknown state: the batch is taken apart, each sequence is
    computed again by itself (`member.py`), and those that fail alone are given up. If several
    processes share the model, all must do the same at the same time, so all sequences are given up.
    """

    def __init__(self, *args: Any, owner: Owner, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._owner = owner
        self._members: dict[int, Member] = {}
        self._lost: list[int] = []  # given up, and not yet reported to mlx-lm's loop
        self._broken: dict[int, Exception] = {}  # errors of their own samplers and processors
        self._steps = 0
        self._generation_batch = Generating.empty(self.model, self.sampler)
        self._prompt_batch = self._no_prompts()
        owner.batched(self)

    def _no_prompts(self) -> Prompting:
        empty: Prompting = Prompting.empty(
            self.model, self.sampler, prefill_step_size=self.prefill_step_size
        )
        return empty

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int] | None = None,
        caches: list[list[Any]] | None = None,
        all_tokens: list[list[int]] | None = None,
        samplers: list[Any] | None = None,
        logits_processors: list[Any] | None = None,
        stop_sequences: list[Any] | None = None,
    ) -> list[int]:
        """As in mlx-lm; sequences that cannot be taken in are given up."""
        ticket = self._owner.begun()
        count = len(segments)
        uids = [self._uid_count + i for i in range(count)]
        given: list[Any] = list(caches) if caches else [None for _ in uids]
        begin = [make_prompt_cache(self.model, self.max_kv_size) if c is None else c for c in given]
        failed = [partial(self._broken.__setitem__, uid) for uid in uids]
        # mlx-lm refuses lists that are too short, so they must stay too short.
        own = [
            own_sampler(sampler, of_own)
            for sampler, of_own in zip(samplers or [None] * count, failed, strict=False)
        ]
        asked = logits_processors or [self.logits_processors] * count
        of_logits = [
            own_processors(processors, of_own)
            for processors, of_own in zip(asked, failed, strict=False)
        ]
        try:
            super().insert_segments(
                segments, max_tokens, begin, all_tokens, own, of_logits, stop_sequences
            )
        except Exception as error:
            self._uid_count = uids[-1] + 1
            self._lost += uids
            self._owner.failed([ticket], error)
            return uids
        for uid, sequence in zip(uids, list(self._unprocessed_sequences)[-count:], strict=True):
            _, pieces, most, cache, known, sampler, processors, stop = sequence
            pieces = [list(piece) for piece in pieces]  # mlx-lm removes them as it reads
            self._members[uid] = Member(
                ticket, cache, list(known), pieces, sampler, processors, stop, most
            )
        self.let_go()
        return uids

    def next(self) -> tuple[list[Any], list[Any]]:
        """As in mlx-lm; sequences that are given up are reported among the prompts."""
        before, start = self._counters.prompt_tokens, time.perf_counter()
        self._generation_batch.said = ()
        try:
            prompted, generated = super().next()
        except Exception as error:
            logging.exception("A step failed")
            prompted, generated = [], list(self._generation_batch.said)
            with mx.stream(self._stream):
                self._take_apart(error, prompted, generated)
        else:
            seconds = time.perf_counter() - start
            tokens = self._counters.prompt_tokens - before
            self._owner.stepped(seconds, tokens, len(generated))
        if self._broken:
            prompted, generated = self._without_broken(prompted, generated)
        for response in prompted:
            self._members[response.uid].read = response.progress[0]
        for response in generated:
            self._members[response.uid].says(response.token)
        ended = [response for response in generated if response.finish_reason is not None]
        self._steps += 1
        if prompted or ended or self._lost or self._steps % WEIGHED_EVERY == 0:
            gone = sum(entry.nbytes for response in ended for entry in response.prompt_cache)
            self._owner.weighed(self.prompt_cache_nbytes + gone, self._slots())
        if ended or self._steps % WEIGHED_EVERY == 0:
            self.let_go()
        for response in ended:
            self._end(response.uid, response.prompt_cache)
        # mlx-lm's loop removes a reported sequence once its request has stopped.
        lost, self._lost = self._lost, []
        prompted += [PromptProcessingBatch.Response(uid, (0, 0), False, True) for uid in lost]
        return prompted, generated

    def let_go(self) -> None:
        """Release the caches that sequences began with, unless idle conversations hold them anyway.

        No bytes are reserved for them. A sequence without such caches can always be computed again.
        """
        continued = [m for m in self._members.values() if m.base is not None and m.known]
        idle = self._owner.idle_pieces() if continued else None
        if idle is None:
            return
        for member in continued:
            if not all(piece in idle for piece in pieces_of(member.base or [])):
                member.base = None

    # -- a step that raises -----------------------------------------------------------------------

    def _without_broken(
        self, prompted: list[Any], generated: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Give up sequences whose own sampler or processor raised; the others' responses."""
        broken, self._broken = self._broken, {}
        for uid, error in broken.items():
            if uid in self._members:
                logging.error("The sampler or a logits processor raised", exc_info=error)
                super().remove([uid])
                self._give_up(uid, error)
        return (
            [response for response in prompted if response.uid in self._members],
            [response for response in generated if response.uid in self._members],
        )

    def _give_up(self, uid: int, error: Exception) -> None:
        self._lost.append(uid)
        self._owner.failed([self._members.pop(uid).ticket], error)

    def _take_apart(self, error: Exception, prompted: list[Any], generated: list[Any]) -> None:
        """Find the sequences of a failed step that also fail alone; the others go on.

        Args:
            error: The step's error.
            prompted: Collects responses of the sequences whose prompts are read.
            generated: The responses before the error; collects those of the generating sequences.
        """
        pending: dict[int, int] = {}
        for uid in self._generation_batch.uids:  # a failed prompt came after they began to generate
            self._members[uid].read = self._members[uid].length
        kept = {response.uid for response in generated}
        kept |= {sequence[0] for sequence in self._unprocessed_sequences}
        if self._generation_batch.whole:
            kept |= set(self._generation_batch.uids)
        else:
            pending = self._generation_batch.pending_tokens()
            self._generation_batch = Generating.empty(self.model, self.sampler)
        if self._prompt_batch.whole:
            kept |= set(self._prompt_batch.uids)
            # Sequences whose caches could not be joined are not in the batch.
            del self._currently_processing[len(self._prompt_batch.uids) :]
        else:
            self._prompt_batch, self._currently_processing = self._no_prompts(), []
        suspects = [uid for uid in self._members if uid not in kept]
        alone = len(suspects) == 1 or mx.distributed.init().size() > 1
        failed = False
        for uid in suspects:
            member = self._members[uid]
            try:
                if alone or member.base is None:
                    raise error  # it was alone, or cannot be computed again
                if member.generates:
                    generated += self._generated_again(uid, member, pending.get(uid))
                else:
                    prompted.append(self._read_again(uid, member))
            except Exception as own:
                failed = True
                self._give_up(uid, own)
        if not failed:
            self._owner.failed([], error)

    def _generated_again(self, uid: int, member: Member, pending: int | None) -> Any:
        """Repeat a sequence's step by itself; the sequence then joins the generating ones."""
        batch, responses = generate_again(uid, member, self._prompt_batch, pending)
        if batch.uids:
            self._join(batch)
        return responses

    def _join(self, batch: GenerationBatch) -> None:
        """Let a sequence that was computed alone generate beside the others."""
        joining = Generating.empty(self.model, self.sampler)
        joining.extend(batch)
        joining.settle()
        self._generation_batch.extend(joining)

    def _read_again(self, uid: int, member: Member) -> Any:
        """Repeat a sequence's chunk by itself; the sequence then joins the others of its kind."""
        reading = Reading(uid, member, self._prompt_batch)
        reading.read_until(member.read)
        if reading.is_over:
            self._join(reading.settled().generate([reading.left[0]]))
            whole = (member.length, member.length)
            return PromptProcessingBatch.Response(uid, whole, True, True)
        reading.read_chunk()
        self._prompt_batch.extend(reading.settled())
        self._currently_processing.append([reading.left, reading.read, member.length])
        progress = (reading.read, member.length)
        ends = member.ends_segment(reading.read)
        return PromptProcessingBatch.Response(uid, progress, ends, False)

    def _slots(self) -> float:
        """The tokens that all sequences hold, mean over layers."""
        layers = [entry for _, entry in entries(self._generation_batch.prompt_cache)]
        bounded = [layer for layer in layers if isinstance(layer, BatchH2OKVCache)]
        held = sum(cache.size() for layer in bounded for cache in layer.caches)
        return held / len(bounded) if bounded else 0.0

    def answered(self, name: str) -> Answered | None:
        """The sequence that is generating the answer of this name; called between two steps."""
        batch = self._generation_batch
        for place, uid in enumerate(batch.uids):
            turn = self._members[uid].ticket.turn if uid in self._members else None
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
        member = self._members.pop(uid, None)
        if member is not None:
            self._owner.ended(member.ticket, cache)
