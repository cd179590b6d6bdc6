"""The thread that owns the model, its caches and all arrays: which request runs, and when.

Between two steps it takes in what came: requests, looks from the page, clients that went away. A
turn of its loop gives every running answer one token, and reads one chunk of one prompt.
"""

from __future__ import annotations

import copy
import gc
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_h2o._byte_size import Share
from mlx_h2o.caches.conversation import bounded_members, past_training, pin
from mlx_h2o.caches.describe import describe
from mlx_h2o.compression.reading import TWICE, TwoReadings
from mlx_h2o.compression.twice import require_readable
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.serve import ranks, reading
from mlx_h2o.serve.batch import Batch
from mlx_h2o.serve.conversations import Conversations, can_trim
from mlx_h2o.serve.errors import ApiError, NotLoaded
from mlx_h2o.serve.inputs import sequences_of
from mlx_h2o.serve.keys import Place, key_of, token_count
from mlx_h2o.serve.memory import Ledger
from mlx_h2o.serve.metrics import Metrics
from mlx_h2o.serve.model import ServedModel, TooLarge
from mlx_h2o.serve.models import Models, machine_bytes
from mlx_h2o.serve.request import End, Request, Start
from mlx_h2o.serve.sequence import Sequence, evicted
from mlx_h2o.serve.sessions import Sessions, Turn
from mlx_h2o.serve.settings import EngineSettings
from mlx_h2o.slots.pins import without

#: Answers that are computed in one call of the model.
MAX_BATCH = 32
#: Steps between two measurements of the bytes, which grow slowly.
WEIGHED_EVERY = 8
#: Steps after which MLX's free memory is given back.
CLEARED_EVERY = 512
#: How often the loop may break off in a row without any work.
MAX_TRIES = 3
#: Seconds for which the loop waits for something to come where other processes wait for it.
SHARED_WAIT = 0.1


class Scheduler:
    """The thread that generates, and what others may ask of it.

    Args:
        settings: The engine's settings.
        metrics: The counters.

    Attributes:
        loaded: Set once the first model is loaded, or cannot be.
        failure: Why it cannot be loaded, or None.
        models: The models.
        conversations: The idle conversations.
        ledger: The bytes.
        works: Whether the last step was completed.
        failures: The number of steps that raised.
        last_failure: The last error's message; empty if there was none.
        thread: The thread.
    """

    models: Models

    def __init__(self, settings: EngineSettings, metrics: Metrics):
        self.settings, self.metrics = settings, metrics
        self.ledger, self.works = Ledger(), True
        self.failures, self.last_failure = 0, ""
        self.conversations = Conversations(lambda: self.ledger.left_for_idle, self._awaits)
        self.loaded = threading.Event()
        self.failure: Exception | None = None
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Requests that wait for their model, and answers that wait for their bytes.
        self._arrived: deque[Request] = deque()
        self._waiting: deque[list[Sequence]] = deque()
        self._reading: list[Sequence] = []
        self._batches: list[Batch] = []
        # Sequences whose last token was drawn in this step, until their answers are complete.
        self._ending: list[Sequence] = []
        self._steps = 0
        self._passed = self._warned = self._dead = False
        self.thread = threading.Thread(target=self._run, name="mlx_h2o generates")

    # -- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the model, and answer."""
        self.thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self.thread.is_alive() and not self._dead

    @property
    def waiting(self) -> int:
        """The number of answers that are not admitted yet."""
        return len(self._arrived) + sum(len(group) for group in list(self._waiting))

    @property
    def slots(self) -> float:
        """The tokens that all running caches hold, mean over layers."""
        return sum(batch.slots for batch in list(self._batches))

    def submit(self, request: Request) -> None:
        """Answer a request; its events are delivered as they come."""
        if not self.is_alive:
            reason = f"The server cannot answer: {self.failure or self.last_failure}"
            request.deliver(0, ApiError(503, reason))
        self._inbox.put(request)

    def call(self, do: Callable[[], Any]) -> Future[Any]:
        """The result of a function that the thread calls between two steps."""
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(do())
                except Exception as error:
                    future.set_exception(error)

        self._inbox.put(run)
        return future

    def stop(self) -> None:
        """End after the step that is being computed."""
        self._inbox.put(None)

    # -- the loop ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._begin()
        except Exception as error:
            self.failure = error
            return
        finally:
            self.loaded.set()
        tries = 0
        while tries < MAX_TRIES:
            busy = self._is_busy
            try:
                if not self._turn():
                    break
                tries = 0
            except Exception as error:
                logging.exception("Generating broke off")
                # A loop that breaks off without any work is not restarted forever.
                tries = 0 if busy else tries + 1
                self._abandon(error)
        self._dead = tries >= MAX_TRIES
        self._abandon(ApiError(503, "The server is ending."))
        # The arrays go in the thread that made them.
        self.conversations.clear()
        self.models.clear()
        gc.collect()

    def _begin(self) -> None:
        settings = self.settings
        routing.install()
        if settings.sessions is not None:
            self.conversations.sessions = Sessions(settings.sessions, settings.limits)
        memory = settings.memory
        if memory is None and len(settings.models) > 1:
            memory = machine_bytes()
        self.models = Models(settings.models, memory, self._load)
        self.models.use(settings.models[0], ())

    def _load(self, name: str) -> ServedModel:
        """A model, once its conversations are known and its caches can be had."""
        settings = self.settings
        served, bound = ServedModel(name, settings.chunk, settings.measures), settings.bound
        if self.ledger.bound is None and bound is not None:
            if isinstance(bound, Share):
                bound = served.in_bytes(bound, settings.defaults.get("context"))
            self.ledger.bound = bound
            self.models.reserve(bound)
        served.bound = self.ledger.bound
        try:
            empty = served.plan(settings.defaults).empty
        except TooLarge as error:
            raise ValueError(
                f"--kv-memory is too small: it is {served.bound:,} bytes, and one conversation may "
                f"take {error.need:,}. Make it at least {error.need}, or make --max-kv-size or "
                "--conversation-memory smaller."
            ) from error
        if settings.reading == "twice":
            require_readable(served.model, empty, 1, TWICE)
        memory = describe(empty).memory
        if ranks.rank() == 0:
            of = f" of {name}" if len(settings.models) > 1 else ""
            print(f"  a conversation{of}: {memory}", file=sys.stderr, flush=True)
        self.conversations.add_model(name, served.fingerprint)
        return served

    @property
    def _is_busy(self) -> bool:
        return bool(self._batches or self._reading or self._waiting or self._arrived)

    def _turn(self) -> bool:
        """One turn of the loop; False if it was the last."""
        requests, goes_on = self._arrivals()
        gone = [one.name for one in self._all() if one.request.gone.is_set() and not one.over]
        gone += [request.name for request in self._arrived if request.gone.is_set()]
        requests, gone, goes_on = ranks.shared_by_first((requests, gone, goes_on))
        for request in requests:
            self._arrive(request)
        for one in [one for one in self._all() if one.name in gone]:
            self._end(one, ApiError(499, "The client went away."))
        self._arrived = deque(one for one in self._arrived if one.name not in gone)
        self._take_in()
        self._admit()
        for batch in list(self._batches):
            self._decode(batch)
        # A first token comes before any more of a prompt is read.
        if all(one.generated for batch in self._batches for one in batch.sequences):
            self._read()
        return bool(goes_on)

    def _arrivals(self) -> tuple[list[Request], bool]:
        """The requests that came, and whether more may come; waits if there is nothing to do."""
        requests, wait = list[Request](), not self._is_busy
        if ranks.rank() > 0:
            return [], True
        timeout = SHARED_WAIT if ranks.processes() > 1 else None
        try:
            while True:
                came = self._inbox.get(wait, timeout)
                wait = False
                if came is None:
                    return requests, False
                if isinstance(came, Request):
                    requests.append(came)
                else:
                    came()
        except queue.Empty:
            return requests, True

    def _all(self) -> list[Sequence]:
        """All sequences that wait or run."""
        running = [one for batch in self._batches for one in batch.sequences]
        return [*(one for group in self._waiting for one in group), *self._reading, *running]

    def _awaits(self, place: Place) -> bool:
        """Whether the answer to a prompt is not complete yet; of the caches at its end."""
        running = [*self._all(), *self._ending]
        return any(not one.over and one.prompt_end == place for one in running)

    def _abandon(self, error: Exception) -> None:
        """End everything that waits or runs."""
        if not isinstance(error, ApiError):
            self._note_failure(error)
        for one in self._all():
            self._end(one, error)
        for request in self._arrived:
            request.deliver(0, as_api_error(error))
        self._arrived.clear()
        self._waiting.clear()
        self._reading.clear()
        self._batches.clear()

    # -- arrival and admission --------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        """Let a request wait for its model, behind those that came before."""
        if self.waiting > self.settings.queue:
            request.deliver(0, self._full())
        else:
            self._arrived.append(request)

    def _take_in(self) -> None:
        """Load the models of the requests that arrived, as far as running ones leave room."""
        while self._arrived:
            request = self._arrived[0]
            try:
                served = self.models.use(request.model, {one.served for one in self._all()})
            except Exception as raised:
                logging.error("A model cannot be loaded: %s", raised)
                error: Exception | None = ApiError(503, f"The model cannot be loaded: {raised}")
            else:
                if served is None:
                    return
                error = self._accept(request, served)
            self._arrived.popleft()  # a client that hears of an error is no longer counted
            if error is not None:
                request.deliver(0, as_api_error(error))

    def _full(self) -> ApiError:
        wait = {"Retry-After": str(self.ledger.retry_after)}
        return ApiError(429, "The queue is full.", headers=wait)

    def _accept(self, request: Request, served: ServedModel) -> Exception | None:
        """Let a request wait for its bytes, or say why its model cannot answer it."""
        error: Exception | None = None
        group = list[Sequence]()
        try:
            group = sequences_of(request, served, self.conversations, self.settings)
        except Exception as raised:
            error = raised
        if ranks.any_failed(error is not None) and error is None:
            error = ValueError("Another process has no room for its heads' part: ask for more.")
        if error is None:
            error = self._exceeds_bound(group)
            full = sum(map(len, self._waiting)) + len(group) > self.settings.queue
            if error is None and full and (self._waiting or not self._has_room(group)):
                error = self._full()
        if error is None:
            self._waiting.append(group)
        return error

    def _need(self, one: Sequence) -> int:
        """The most bytes of an answer, also while its prompt is read; others copy its caches."""
        bound = self.ledger.bound
        if one.reading == "once" or one.index or bound is None:
            return one.plan.need
        prefix = (
            len(one.tokens) if one.cache else self.conversations.prefix_length(self._wanted(one))
        )
        need = reading.most_while_read(one, prefix)
        return one.plan.need if one.reading == "auto" and need > bound else need

    def _exceeds_bound(self, group: list[Sequence]) -> ApiError | None:
        """Why a request can never run, if it cannot."""
        bound, need = self.ledger.bound, sum(map(self._need, group))
        if bound is None or need <= bound:
            return None
        doing, instead = f"n={len(group)} answers", "ask for fewer"
        if need > sum(one.plan.need for one in group):
            doing, instead = "While its prompt is read twice this request", "ask to read it once"
        return ApiError(
            400,
            f"{doing} may take {need:,} bytes, and the server holds {bound:,} in all: {instead}.",
        )

    def _has_room(self, group: list[Sequence]) -> bool:
        running = len(self._reading) + sum(map(len, self._batches))
        need = sum(map(self._need, group))
        return running + len(group) <= MAX_BATCH and self.ledger.has_room(need)

    def _admit(self) -> None:
        """Let in the requests whose bytes are free, first come, first served."""
        while self._waiting:
            group = self._waiting[0]
            # The conversation that it would have gone on from may have gone.
            if (error := self._exceeds_bound(group)) is not None:
                self._end(group[0], error)
                continue
            if not self._has_room(group):
                return
            self._waiting.popleft()
            for one in group:
                self.ledger.reserve(one, self._need(one))
                one.admitted = time.monotonic()
            self._reading += group
            if group[0].reading != "once":
                # What a second reading takes follows from these caches, so they must stay.
                self._attempt(self._open, group[0])
            waited = one.admitted - one.request.arrival
            self.metrics.observe("queue_seconds", waited)
            self.conversations.make_room()

    # -- prompts ----------------------------------------------------------------------------------

    def _next_prompt(self) -> Sequence | None:
        """The prompt of which a chunk is read now.

        That of which the least is left, so that a short one does not wait for a long one; but once
        the one that came first was passed over, it is next, so that a long one is read in the end.
        The further answers to a request wait until its first one has read the prompt.
        """
        first = {one.request for one in self._reading if one.index == 0}
        ready = [one for one in self._reading if one.index == 0 or one.request not in first]
        if not ready:
            return None
        chosen = ready[0] if self._passed else min(ready, key=self._left_to_read)
        self._passed = chosen is not ready[0]
        return chosen

    def _left_to_read(self, one: Sequence) -> int:
        prefix = 0 if one.cache is not None else self.conversations.prefix_length(self._wanted(one))
        return one.unread - prefix

    def _wanted(self, one: Sequence) -> Place:
        return Place(one.mark, key_of(one.prompt.tokens))

    def _read(self) -> None:
        """Read a chunk of a prompt; let its sequence generate if that was the last."""
        one = self._next_prompt()
        if one is None:
            return
        if one.cache is None:
            self._attempt(self._open, one)
        if not one.over:
            self._attempt(self._read_chunk, one)
        if one.over:
            return
        if one.left == 1:
            copies = [other for other in self._reading if other.request is one.request]
            for other in copies:
                self._reading.remove(other)
                if one.reading != "once":  # what a second reading took is free again
                    self.ledger.reserve(other, other.plan.need)
                if other is not one:  # all answers go on from the same caches
                    self._begin_at(other, copy.deepcopy(one.cache or []), len(one.tokens))
            for other in copies:
                self._start(other)
        self._weigh()

    def _attempt(self, do: Callable[[Sequence], None], one: Sequence) -> None:
        """Read for a sequence, which ends if that fails."""
        try:
            do(one)
        except ApiError as error:
            self._end(one, error)
        except Exception as error:
            logging.exception("A prompt cannot be read")
            self._note_failure(error)
            self._end(one, step_failed(error))

    def _open(self, one: Sequence) -> None:
        cache, prefix = self.conversations.take(self._wanted(one), one.empty)
        # Requested pins may have been removed by hand since.
        bounded = bounded_members(cache)
        more = without(one.mark.pins, bounded[0].pins) if bounded else ()
        if more:
            pin(cache, more)
        self._begin_at(one, cache, prefix)

    def _begin_at(self, one: Sequence, cache: list[Any], prefix: int) -> None:
        one.open(cache, prefix)
        if not one.replay:
            trained = 0 if one.plan.rolls else one.served.trained
            one.deliver(Start(len(one.prompt.tokens), prefix, trained))

    def _read_chunk(self, one: Sequence) -> None:
        assert one.cache is not None
        one.readings = one.readings or self._begin_twice(one)
        if (readings := one.readings) is not None:
            before = readings.done
            if not readings.step():
                one.tokens = one.prompt.tokens[: len(one.tokens) + readings.count]
                one.twice += readings.count if readings.is_twice else 0
                one.readings = None
            count = readings.done - before
        elif chunk := one.next_chunk(one.served.chunk):
            one.served.model(mx.array([chunk]), cache=one.cache)
            one.tokens += chunk
            count = len(chunk)
        else:
            count = 0
        if count or readings is not None:
            mx.eval([entry.state for entry in one.cache])
            mx.clear_cache()
            self.works = True
        if count:
            self.metrics.count("prompt_tokens", count)
            one.deliver(one.progress)
        copied = one.snapshot()
        if copied is not None:
            self.conversations.keep(one.place, *copied)

    def _begin_twice(self, one: Sequence) -> TwoReadings | None:
        """Two readings of the part of a prompt that begins now, or None where it needs one.

        Raises:
            ApiError: The caches can read no prompt twice, or the conversation that it was to go on
                from is lost, and there is no room for the rows of all.
        """
        try:
            readings = reading.begin(one)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        if readings is None:
            return None
        most = reading.most_while_read(one, len(one.tokens))
        more = most - self.ledger.reserved_by(one)
        if more > 0 and self.ledger.bound is not None:
            if not self.ledger.has_room(more):
                if one.reading == "auto":
                    return None
                wait = {"Retry-After": str(self.ledger.retry_after)}
                why = "There is no room now to read the conversation twice: ask again later."
                raise ApiError(503, why, headers=wait)
            self.ledger.reserve(one, most)
            self.conversations.make_room()
        one.again += readings.count
        return readings

    # -- answers ----------------------------------------------------------------------------------

    def _start(self, one: Sequence) -> None:
        """Let a sequence whose prompt is read generate, beside others if it can."""
        joins = one.plan.batches
        batch = None
        if joins and not one.suspect:
            shared = (b for b in self._batches if b.joins and b.model is one.served.model)
            batch = next((b for b in shared if not b.sequences[0].suspect), None)
        if batch is None:
            batch = Batch(one.served.model, joins)
            self._batches.append(batch)
        try:
            batch.add(one)
        except Exception as error:
            logging.exception("A sequence cannot join")
            self._recover(batch, error, also=one)

    def _decode(self, batch: Batch) -> None:
        """Give every sequence of a batch a token."""
        start = time.perf_counter()
        try:
            generated = batch.step()
        except Exception as error:
            logging.exception("A step failed")
            self._recover(batch, error)
            return
        self.works = True
        endings = {}
        for one, token, row in generated:
            if one.error is None and (reason := self._take(one, token, row)):
                endings[one] = reason
        if generated:
            self.metrics.count("generated_tokens", len(generated))
            self.metrics.observe("token_seconds", time.perf_counter() - start)
        for one in [one for one in batch.sequences if one.error is not None]:
            assert one.error is not None
            logging.error("The sampler or a logits processor raised", exc_info=one.error)
            self._note_failure(one.error)
            self._end(one, step_failed(one.error))
        self._ending = list(endings)
        caches = batch.remove(endings.keys())
        self._batches = [one for one in self._batches if len(one)]
        for one, reason in endings.items():
            self._finish(one, reason, caches[one])
        self._ending = []
        self._steps += 1
        if endings or self._steps % WEIGHED_EVERY == 0:
            self._weigh()
        if self._steps % CLEARED_EVERY == 0:
            mx.clear_cache()

    def _take(self, one: Sequence, token: int, row: mx.array | None) -> str | None:
        """A sequence generated a token; why it ends with it, or None."""
        one.generated.append(token)
        if one.repeats:
            return None
        one.suspect = False
        ends = token in one.served.tokenizer.eos_token_ids
        if not ends:
            piece = one.text.add(token, one.logprob(token, row))
            if piece or piece.logprobs:
                one.deliver(piece)
        if ends or one.text.stops:
            return "stop"
        return "length" if len(one.generated) >= one.limit else None

    def _finish(self, one: Sequence, reason: str, cache: list[Any]) -> None:
        """An answer is complete: its conversation is kept, and saved, before its client hears."""
        piece, shown = one.text.finish(reason)
        if piece or piece.logprobs:
            one.deliver(piece)
        self.metrics.count("evicted_tokens", evicted(cache))
        self._look_at_length(one, cache)
        seconds = one.seconds()
        one.over = True
        self.ledger.release(one, seconds)
        file = self._keep(one, cache)
        one.deliver(End(shown, len(one.generated), one.twice, file))

    def _keep(self, one: Sequence, cache: list[Any]) -> Path | None:
        """Keep the caches of a complete answer; the file that its conversation is in, or None.

        They are kept for the tokens that some text spells exactly. If the caches have read more,
        and that cannot be taken back, the conversation goes on from the end of its prompt.
        """
        count = len(one.generated)
        ends = bool(one.generated) and one.generated[-1] in one.served.tokenizer.eos_token_ids
        texts = one.prompt.continuations(one.text, ends)
        prompt = len(one.prompt.tokens)
        most = max((number for _, number in texts), default=None)
        messages = one.prompt.answered(one.text.content) if one.prompt.messages else ()
        turn = Turn(
            one.name, one.request.title, tuple((text, prompt + number) for text, number in texts),
            tuple(messages),
        )  # fmt: skip
        place, extra = one.place, 0 if most is None else count - most
        is_stored = False
        if most is not None and (not extra or can_trim(cache, extra)):
            if extra:
                trim(cache, extra)
                place = Place(one.mark, key_of(one.tokens[:-extra]))
            is_stored = self.conversations.keep(place, cache, "turn", turn)
        if not is_stored:
            place, spelling = one.prompt_end, one.prompt.spelling
            before = token_count(place.key)
            texts = [spelling] if spelling is not None and spelling[1] <= before else []
            turn = replace(turn, texts=tuple(texts))
            self.conversations.name(place, turn)
        return self.conversations.file_of(place)

    def delivered(self, names: Iterable[str]) -> None:
        """A client has these answers: the files of their conversations' earlier turns go."""
        for name in names:
            self.conversations.delivered(name)

    def _look_at_length(self, one: Sequence, cache: list[Any]) -> None:
        """Warn once of a conversation that is longer than what the model was trained for."""
        warning = None if self._warned else past_training(one.served.model, cache)
        if warning is not None:
            self._warned = True
            logging.warning("A conversation is long: %s", warning)

    # -- ends and failures ------------------------------------------------------------------------

    def _end(self, one: Sequence, error: Exception) -> None:
        """End a sequence without an answer, and all others of its request."""
        for other in {one, *(o for o in self._all() if o.request is one.request)}:
            for group in self._waiting:
                if other in group:
                    group.remove(other)
            if other in self._reading:
                self._reading.remove(other)
            for batch in self._batches:
                if other in batch.sequences:
                    batch.remove([other])
            other.over = True
            self.ledger.release(other)
        self._waiting = deque(group for group in self._waiting if group)
        self._batches = [batch for batch in self._batches if len(batch)]
        one.deliver(as_api_error(error))

    def _recover(self, batch: Batch, error: Exception, also: Sequence | None = None) -> None:
        """A step raised, and its caches are in an unknown state: compute each sequence again.

        Each is computed by itself up to the next step, so that only those fail that fail alone.
        Where processes share the model, all of them fail: others do not know of the error.
        """
        self._note_failure(error)
        if batch in self._batches:
            self._batches.remove(batch)
        members = [*batch.sequences, *([also] if also and also not in batch.sequences else [])]
        alone = len(members) == 1 or ranks.processes() > 1
        for one in members:
            if alone:
                self._end(one, step_failed(error))
            elif not one.over:
                one.restart()
                self._reading.append(one)

    def _note_failure(self, error: Exception) -> None:
        self.failures += 1
        self.last_failure, self.works = f"{type(error).__name__}: {error}", False
        self.metrics.count("failed_steps")

    def _weigh(self) -> None:
        """Measure all caches."""
        running = sum(batch.nbytes for batch in self._batches)
        running += sum(entry.nbytes for one in self._reading for entry in one.cache or ())
        self.ledger.weigh(running, self.conversations.nbytes)

    # -- the page ---------------------------------------------------------------------------------

    def running(self, name: str) -> tuple[Sequence, list[Any]] | None:
        """The sequence that generates the answer of this name, and its caches."""
        for batch in self._batches:
            for one in batch.sequences:
                if one.name == name:
                    return one, batch.view(one)
        return None


def trim(cache: list[Any], count: int) -> None:
    """Take back the last tokens of a list of caches."""
    for _, entry in entries(cache):
        entry.trim(count)


def step_failed(error: Exception) -> ApiError:
    """What a client hears of a step that raised."""
    return ApiError(500, f"Generating broke off: {type(error).__name__}: {error}")


def as_api_error(error: Exception) -> ApiError:
    """An error as a client hears it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NotLoaded):
        return ApiError(503, str(error))
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    logging.error("A request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}")
