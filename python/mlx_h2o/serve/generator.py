"""mlx-lm's response generator within the bound: which requests run, with which caches, and when."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import Empty
from typing import Any
from weakref import ReferenceType, ref

from mlx_lm.server import ResponseGenerator

from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.model_caches.trained_length import past_training
from mlx_h2o.serve.accountant import Accountant
from mlx_h2o.serve.asked_pins import AskedPins
from mlx_h2o.serve.batches import AccountedBatch
from mlx_h2o.serve.conversations import Conversations
from mlx_h2o.serve.failures import Answers, Health, StepFailed, Unanswered
from mlx_h2o.serve.fields import label_of
from mlx_h2o.serve.going_on import GoingOn, restore, with_pins
from mlx_h2o.serve.grammar import Grammars
from mlx_h2o.serve.job import Job
from mlx_h2o.serve.metrics import Metrics
from mlx_h2o.serve.plans import Plans
from mlx_h2o.serve.served_model import ServedModel
from mlx_h2o.serve.sharing import Ended, any_failed
from mlx_h2o.serve.stop_texts import TextStops
from mlx_h2o.serve.threads import join
from mlx_h2o.serve.ticket import HungUp, Ticket, still_there
from mlx_h2o.serve.turn_text import TurnText, respelled

#: How often the loop of steps may break off in a row without any work.
MOST_TRIES = 3
#: Its `generator` is the one that runs on this thread, for functions that mlx-lm's loop calls.
HERE = threading.local()


class BoundedGenerator(ResponseGenerator):  # type: ignore[misc]
    """mlx-lm's `ResponseGenerator`, whose requests wait until their bytes are free.

    Args:
        provider: The provider of the model.
        conversations: Idle caches.
        accountant: The account of the bytes.
        metrics: The counters.
        defaults: The caches' settings for a request that gives none.
        pins: The pins of a prompt for a request that gives none.
    """

    def __init__(
        self,
        provider: ServedModel,
        conversations: Conversations,
        accountant: Accountant,
        metrics: Metrics,
        defaults: Mapping[str, Any],
        pins: AskedPins,
    ):
        self.provider, self.accountant, self.metrics = provider, accountant, metrics
        self.defaults, self.pins = defaults, pins
        self.conversations = conversations
        conversations.left = lambda: accountant.left_for_idle
        self._going_on, self._restored = GoingOn(conversations), False
        self._plans = Plans(provider, accountant.bound)
        self._line: deque[Any] = deque()
        self._current: Ticket | None = None
        self._batch: ReferenceType[AccountedBatch] | None = None
        self.slots = 0.0  # tokens that all running caches hold, mean over layers
        self.health, self.grammars = Health(), Grammars()
        self._said_long = False  # that a conversation is longer than the model was trained for
        self._answers: dict[Ticket, Answers] = {}  # by the tickets of all admitted requests
        super().__init__(provider, conversations)  # type: ignore[arg-type]

    # -- a request's bytes ------------------------------------------------------------------------

    def ticket_for(
        self, settings: Mapping[str, Any], gone: Callable[[], bool], pins: AskedPins
    ) -> Ticket:
        """A request's claim on memory.

        Args:
            settings: The caches' settings, as `ModelSettings.of` takes them.
            gone: Whether the client went away.
            pins: The pins of its prompt.

        Raises:
            ValueError: The model cannot have such caches, or they exceed the bound.
            NotLoaded: The model could not be loaded.
        """
        label = label_of(settings)
        return Ticket(label, settings, self._plans.of(label, settings)[1], pins, gone)

    # -- admission --------------------------------------------------------------------------------

    def _next_request(self, timeout: float | None = None) -> Any:
        """The next request whose bytes are free; mlx-lm asks between two steps.

        Raises:
            Ended: Rank 0 takes no more requests.
        """
        if not self.accountant.running:
            self.accountant.weighed(0, self.conversations.nbytes)
        came = self._share_request(self._admitted(timeout) if self._rank == 0 else None)
        if came is not None and came[1] is None:
            raise Ended
        return came

    def _admitted(self, timeout: float | None) -> Any:
        if not self._restored:
            self._restored = True
            restore(self.conversations, self._plans, self.provider, self.defaults)
        _line_up(self.requests, self._line, None if self._line else timeout)
        if timeout is not None and not self._line:  # nothing runs and nothing waits
            self.conversations.save_one()
        while self._line:
            answers, request, args = self._line[0]
            ticket = request.ticket
            if ticket.gone():
                self._line.popleft()
                self.accountant.release(ticket)
                answers.put(HungUp("The client went away."))
                continue
            if not self.accountant.can_admit(ticket):
                return None
            self.accountant.admit(ticket)
            ticket.admitted = time.monotonic()
            self.conversations.make_room(self.accountant.left_for_idle)
            if self.batch is not None:
                self.batch.let_go()
            self.metrics.observe(
                "queue_seconds", "Time until a request was let in.", ticket.admitted - ticket.came
            )
            self._line.popleft()
            self._answers[ticket] = Answers(answers)
            return self._answers[ticket], request, args
        return None

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """As in mlx-lm; the next caches looked up are for this request."""
        ticket = request.ticket
        tokenized: Any = None
        empty, error = list[Any](), None
        try:
            tokenized = super()._tokenize(tokenizer, request, args)
            tokenized = self._as_said(tokenizer, request, args, tokenized)
            if not tokenized[0]:
                raise ValueError("The prompt is empty.")
            empty = self._empty_for(request, tokenizer, tokenized[0])
        except Exception as raised:
            error = raised
        if self._is_distributed and any_failed(error is not None) and error is None:
            error = ValueError("Another process has no room for its heads' part: ask for more.")
        if error is not None:
            self.ended(ticket, None)
            raise error
        self._current = ticket
        self.conversations.begin(empty)
        args.reasons = tokenized[3] == "reasoning"
        return tokenized

    def _as_said(self, tokenizer: Any, request: Any, args: Any, tokenized: Any) -> Any:
        """mlx-lm's tokenized prompt, with the model's own earlier tokens where it said the text."""
        prompt, *_, vision = tokenized
        if vision is not None or not prompt:
            return tokenized
        own = self.provider.cli_args.chat_template_args
        said = request.ticket.said = TurnText.of(tokenizer, request, args, own, prompt)
        if self._rank == 0:
            said.tokens = self._going_on.spelled(said, partial(self._empty_for, request, tokenizer))
        if self._is_distributed:
            said.tokens = self._share_object(said.tokens)
        return respelled(tokenized, said.tokens)

    def _make_state_machine(
        self, model_key: Any, tokenizer: Any, stop_words: Sequence[str]
    ) -> tuple[Any, Any]:
        """As in mlx-lm, but stop texts are found in the answer's text."""
        tokens, text = super()._make_state_machine(model_key, tokenizer, [])
        return TextStops(tokens, tokenizer, stop_words) if stop_words else tokens, text

    def _empty_for(self, request: Any, tokenizer: Any, tokens: Sequence[int]) -> list[Any]:
        """Empty caches for a request's prompt, with its pins and its mark."""
        ticket = request.ticket
        pins = ticket.pins.in_prompt(tokenizer, tokens, request.messages)
        return with_pins(self._plans.of(ticket.label, ticket.settings)[0], ticket.label, pins)

    def stepped_alone(self, cache: list[Any]) -> None:
        """Note a step of a request that is served outside of batches."""
        self.weighed(sum(entry.nbytes for entry in cache), 0.0)

    def answered_alone(self, cache: list[Any]) -> None:
        """Note the last step of such a request."""
        self._look_at_length(cache)

    def _serve_single(self, request: Any, *args: Any) -> None:
        """As in mlx-lm, for requests that cannot be batched."""
        ticket = request[1].ticket
        self.conversations.ticket = ticket
        try:
            super()._serve_single(request, *args)
        finally:
            self.conversations.ticket = None
            ticket.kept.tell(None)  # if it broke off before the caches were kept
            self.ended(ticket, None)

    @property
    def batch(self) -> AccountedBatch | None:
        """The batch of the running requests, if there is one; for the thread that generates."""
        return self._batch() if self._batch is not None else None

    # -- the batch's reports ----------------------------------------------------------------------

    def batched(self, batch: AccountedBatch) -> None:
        """Requests will run in this batch."""
        self._batch = ref(batch)

    def begun(self) -> Ticket:
        """The request whose prompt is read next."""
        assert self._current is not None
        return self._current

    def weighed(self, nbytes: int, slots: float) -> None:
        """All caches of the batch were measured."""
        self.slots = slots
        self.accountant.weighed(nbytes, self.conversations.nbytes)

    def stepped(self, seconds: float, prompted: int, generated: int) -> None:
        """A step of all sequences is done.

        Args:
            seconds: The step's duration in seconds.
            prompted: Prompt tokens that were read.
            generated: Tokens that were generated.
        """
        if prompted or generated:
            self.health.worked()
        if prompted:
            self.metrics.count("prompt_tokens", "Prompt tokens read.", prompted)
        if generated:
            self.metrics.count("generated_tokens", "Tokens generated.", generated)
            if not prompted:
                text = "Time of one step of all that run, each of which gives one token."
                self.metrics.observe("token_seconds", text, seconds)

    def idle_pieces(self) -> set[int] | None:
        """Ids of the arrays that idle conversations hold; None if there is no bound."""
        if self.accountant.bound is None:
            return None
        return {piece for idle in self.conversations.idle for piece in idle.pieces}

    def snapped(self, cache: list[Any]) -> None:
        """These caches were copied midway."""
        self.conversations.snapped(cache)

    def _look_at_length(self, cache: list[Any]) -> None:
        """Warn once of a conversation that is longer than what the model was trained for."""
        model = self.provider.model
        said = None if self._said_long or model is None else past_training(model, cache)
        if said is not None:
            self._said_long = True
            logging.warning("A conversation is long: %s", said)

    def ended(self, ticket: Ticket, cache: list[Any] | None) -> None:
        """A request's sequence left the batch."""
        self._answers.pop(ticket, None)
        seconds = None
        if cache is not None:
            self.conversations.came_of(cache, ticket)
            self._look_at_length(cache)
            seconds = time.monotonic() - ticket.admitted
            self.metrics.count(
                "evicted_tokens", "Tokens evicted, mean over heads.", _evicted(cache)
            )
        self.accountant.release(ticket, seconds)

    def failed(self, tickets: Sequence[Ticket], error: Exception) -> None:
        """A step raised: these requests get no further answer, and their bytes are free."""
        self.health.failed(error)
        self.metrics.count("failed_steps", "Steps that raised.")
        for ticket in tickets:
            if ticket in self._answers:
                self._answers[ticket].fail(StepFailed(error))
            self.ended(ticket, None)

    def _run_generate(self) -> None:
        """As in mlx-lm; if its loop breaks off, running requests fail, and it starts again."""
        HERE.generator = self
        tries = 0
        while tries < MOST_TRIES:
            try:
                self._generate()
                self.conversations.end()
                if self._is_distributed and self._rank == 0:  # sent as an empty request
                    self._share_request((None, None, None))
                return
            except Ended:
                self.conversations.end()
                self.provider.reset()
                return
            except Exception as error:
                if self.provider.failure is not None:
                    logging.error("The model could not be loaded: %s", self.provider.failure)
                    break
                logging.exception("Generating broke off")
                # A loop that breaks off without any work is not restarted forever.
                tries = 0 if self._answers else tries + 1
                self.failed(list(self._answers), error)
                self.slots = 0.0
        self._generation_failed = True

    def stop_and_join(self) -> None:
        """End; the other ranks end with rank 0, which may still wait for them."""
        if self._rank == 0:
            self._stop = True
        join(self._generation_thread)

    # -- calls from handlers ----------------------------------------------------------------------

    def between_steps(self, do: Callable[[], Any]) -> Any:
        """The result of `do`, called by the thread that generates between two of its steps.

        Raises:
            Busy: The thread did not call it in time.
            Exception: `do` raised it.
        """
        job = Job(do)
        self.requests.put(job)
        return job.result(self.generation_available)

    def generate(
        self,
        request: Any,
        generation_args: Any,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple[Any, Iterator[Any]]:
        """As in mlx-lm, but generation ends when the client goes away.

        Raises:
            HungUp: The client went away.
            Unanswered: The request cannot be answered.
            StepFailed: A step raised in the middle of the answer.
        """
        if not hasattr(request, "ticket"):
            request.ticket = self.ticket_for(self.defaults, still_there, self.pins)
        ticket = request.ticket
        gone = ticket.gone
        stops = list(getattr(request, "stops", generation_args.stop_words) or ())
        generation_args.stop_words = stops

        def told(done: int, whole: int) -> None:
            if gone():
                raise HungUp("The client went away.")
            if progress_callback is not None:
                progress_callback(done, whole)

        try:
            context, responses = super().generate(request, generation_args, told)
        except HungUp:
            raise
        except Exception as error:
            raise Unanswered(error, self.is_healthy) from error

        told_as = self._going_on.told(
            *(responses, ticket, context, stops, self.provider.tokenizer),
            self.generation_available,
        )
        return context, _while_there(told_as, gone, self.health)


def _line_up(requests: Any, line: deque[Any], timeout: float | None) -> None:
    """Move requests that have come into the line; wait for the first if `timeout` is given."""
    try:
        while True:
            came = requests.get(timeout is not None, timeout)
            timeout = None
            if isinstance(came, Job):
                came.run()
            else:
                line.append(came)
    except Empty:
        return


def _while_there(
    responses: Iterator[Any], gone: Callable[[], bool], health: Health
) -> Iterator[Any]:
    """An answer, which ends when its client goes away."""
    try:
        for response in responses:
            if gone():
                raise HungUp("The client went away.")
            yield response
    except (ConnectionError, TimeoutError, StepFailed):
        raise
    except Exception as error:  # in a request served outside of batches
        health.failed(error)
        raise StepFailed(error) from error


def _evicted(cache: list[Any]) -> float:
    """The tokens that a list's bounded caches have evicted, mean over layers."""
    evicted = [e.evicted for _, e in entries(cache) if isinstance(e, BoundedKVCache)]
    return sum(evicted) / len(evicted) if evicted else 0.0
