"""One request's completions: threads that wait for mlx-lm's generation, and the answer they give.

`BoundedGenerator.generate` blocks, so each answer has a thread; its results go into a queue that
asyncio awaits. When the client goes away, or the server ends, an event is set that the generator
checks between two tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from mlx_lm.server import GenerationContext

from mlx_h2o.serve.answers import Choice, Frame, error_body, event, usage_of
from mlx_h2o.serve.asking import Asked
from mlx_h2o.serve.failures import StepFailed, Unanswered
from mlx_h2o.serve.fields import check_for_model
from mlx_h2o.serve.generator import BoundedGenerator
from mlx_h2o.serve.grammar import Form, NotInstalled, form_of
from mlx_h2o.serve.served_model import NotLoaded
from mlx_h2o.serve.threads import Threads
from mlx_h2o.serve.ticket import HungUp, Ticket, Turn, title_of

Receive = Callable[[], Any]
Send = Callable[[Any], Any]
#: The status that /metrics counts if the client had gone before the answer (nginx's number).
CLIENT_GONE = 499
#: The end of one answer, in the queue.
DONE = object()
FINAL = b"data: [DONE]\n\n"


class Refused(Exception):
    """A request that is refused.

    Args:
        status: The answer's HTTP status.
        why: The message for the client.
        headers: Additional headers of the answer.
        close: Whether the connection ends with it: the body was not read whole.
    """

    def __init__(
        self,
        status: int,
        why: str,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ):
        super().__init__(why)
        self.status = status
        self.headers = dict(headers or {}) | ({"Connection": "close"} if close else {})


class Exchange:
    """The answer to one request, as an ASGI application.

    Args:
        generator: The server's generator.
        threads: Threads that wait for the generator.
        asked: The request.
        frame: The fields that all pieces of its answer share.
        headers: Additional headers of the answer.
    """

    def __init__(
        self,
        generator: BoundedGenerator,
        threads: Threads,
        asked: Asked,
        frame: Frame,
        headers: Mapping[str, str],
    ):
        self._generator, self._threads = generator, threads
        self._asked, self._frame, self._headers = asked, frame, headers
        self._gone, self._ended = threading.Event(), False
        self._told: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._choices: dict[int, Choice] = {}
        self._tickets = list[Ticket]()

    def end(self) -> None:
        """Stop generating for this request, because the server ends."""
        self._ended = True
        self._gone.set()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer as long as the client is there.

        Raises:
            Refused: The request cannot be answered; nothing was sent.
        """
        watch = asyncio.create_task(self._watch(receive))
        started = told = False
        tickets = list[Ticket]()
        waits = list[asyncio.Task[Any]]()
        try:
            form, tickets = await self._threads.result(self._prepared)
            self._tickets = tickets
            pumps = [partial(self._pump, i, ticket, form) for i, ticket in enumerate(tickets)]
            waits = [asyncio.create_task(self._threads.result(pump)) for pump in pumps]
            if not self._asked.stream:
                body = await self._whole()
                await self._send_whole(send, body)
                told = True
                return
            async for piece in self._pieces():
                if not started:
                    await self._send_start(send, "text/event-stream", {"Cache-Control": "no-cache"})
                    started = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": FINAL, "more_body": False})
            told = True
        except Exception as error:
            refused = self._refused(error)
            if not started:
                raise refused from error
            scope.setdefault("state", {})["broke"] = refused.status
            last = b"data: " + error_body(refused.status, str(refused)) + b"\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._gone.set()
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            await asyncio.gather(*waits, return_exceptions=True)
            for ticket in tickets:
                self._generator.accountant.leave(ticket)
                if ticket.noted is not None:
                    self._generator.conversations.noted(ticket.noted, told)

    def _refused(self, error: Exception) -> Refused:
        """The reason why there is no answer, or only a part of one."""
        match error:
            case Refused():
                return error
            case Unanswered():
                return Refused(error.status, str(error))
            case StepFailed():
                return Refused(500, str(error))
            case NotInstalled():
                return Refused(501, str(error))
            case HungUp() if self._ended:
                return Refused(503, "The server is ending.")
            case HungUp():
                return Refused(CLIENT_GONE, "The client went away.")
            case NotLoaded():
                return Refused(503, str(error))
            case ValueError():
                return Refused(400, str(error))
        logging.error("A request failed", exc_info=error)
        return Refused(500, f"{type(error).__name__}: {error}")

    # -- in threads -------------------------------------------------------------------------------

    def _prepared(self) -> tuple[Form | None, list[Ticket]]:
        """The form required of the answer, and a ticket for each answer, which wait from now on.

        Raises:
            ValueError: This model cannot do what the request asks for.
            NotLoaded: There is no model.
            Refused: The queue is full.
        """
        generator, asked = self._generator, self._asked
        model = generator.provider.require()
        tokenizer: Any = generator.provider.tokenizer
        check_for_model(asked.numbers, asked.biases, model, tokenizer)
        if asked.tools and not tokenizer.has_tool_calling:
            raise ValueError(
                "tools are not served with this model: its chat template, or mlx-lm, knows of no "
                "calls of tools."
            )
        form = form_of(
            asked.response_format, asked.tools, asked.tool_choice, asked.several, tokenizer
        )
        if form is not None:
            # Tokenizers are for the thread that generates.
            generator.between_steps(lambda: generator.grammars.tokenizer(tokenizer))
            generator.grammars.check(form)
        gone = self._gone.is_set
        tickets = [
            generator.ticket_for(asked.settings, gone, asked.pins) for _ in range(asked.answers)
        ]
        bound = generator.accountant.bound
        need = sum(ticket.need for ticket in tickets)
        if bound is not None and need > bound:
            raise ValueError(
                f"n={asked.answers} answers may take {need:,} bytes, and the server holds "
                f"{bound:,} in all: ask for fewer."
            )
        for ticket in tickets:
            ticket.beside = tuple(other for other in tickets if other is not ticket)
        if not generator.accountant.enter(tickets[0]):
            wait = generator.accountant.retry_after
            raise Refused(429, "The queue is full.", {"Retry-After": str(wait)})
        return form, tickets

    def _pump(self, place: int, ticket: Ticket, form: Form | None) -> None:
        """Put everything that one answer yields into the queue."""
        context: Any = None
        loop = self._loop

        def tell(what: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed, and no one waits
                loop.call_soon_threadsafe(self._told.put_nowait, (place, what))

        try:
            request = self._asked.request()
            name = self._frame.name if place == 0 else f"{self._frame.name}-{place}"
            ticket.turn, request.ticket = Turn(name, title_of(request)), ticket
            arguments = self._asked.arguments(self._frame.model, place, form)
            progress = (lambda done, whole: tell((done, whole))) if self._asked.stream else None
            context, responses = self._generator.generate(request, arguments, progress)
            tell(context)
            for response in responses:
                tell(response)
            tell(DONE)
        except Exception as error:
            self._gone.set()  # without this answer there is none at all
            tell(error)
        finally:
            if context is not None:
                context.stop()

    # -- in asyncio's loop ------------------------------------------------------------------------

    async def _watch(self, receive: Receive) -> None:
        """Note when the client goes away."""
        self._loop = asyncio.get_running_loop()
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone.set()

    async def _news(self) -> AsyncIterator[tuple[int, Any]]:
        """The responses of all answers, until the last is complete; the choices grow meanwhile.

        Raises:
            Exception: The error that broke an answer off.
        """
        asked, left = self._asked, self._asked.answers
        while left:
            place, what = await self._told.get()
            if isinstance(what, Exception):
                raise what
            if isinstance(what, GenerationContext):
                self._choices[place] = Choice(
                    self._frame, place, what, asked.tools, asked.several, asked.logprobs,
                    asked.numbers["top_logprobs"],
                )  # fmt: skip
            elif what is DONE:
                self._choices[place].finish()
                left -= 1
            elif not isinstance(what, tuple):
                self._choices[place].take(what)
            yield place, what

    async def _whole(self) -> bytes:
        """The answer in one piece."""
        async for _ in self._news():
            pass
        choices = [self._choices[place] for place in sorted(self._choices)]
        told = [choice.told(last=True) for choice in choices]
        return json.dumps(self._frame.around(told, usage=usage_of(choices))).encode()

    async def _pieces(self) -> AsyncIterator[bytes]:
        """The answer as it comes, without its end mark."""
        around = self._frame.around
        async for place, what in self._news():
            if what is DONE:
                yield event(around([self._choices[place].told(last=True)]))
            elif isinstance(what, tuple):
                logging.info("Prompt processing progress: %d/%d", *what)
                yield b": keepalive %d/%d\n\n" % what
            elif place in self._choices and self._choices[place].has_news:
                yield event(around([self._choices[place].told(last=False)]))
        if self._asked.usage:
            choices = [self._choices[place] for place in sorted(self._choices)]
            yield event(around([], usage=usage_of(choices)))

    async def _send_start(self, send: Send, kind: str, more: Mapping[str, str]) -> None:
        headers = {"Content-Type": kind, **more, **self._headers}
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _send_whole(self, send: Send, body: bytes) -> None:
        more = {"Content-Length": str(len(body))}
        await self._send_start(send, "application/json", more)
        await send({"type": "http.response.body", "body": body, "more_body": False})
