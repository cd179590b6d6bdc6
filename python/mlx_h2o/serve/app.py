"""The server's endpoints: an ASGI application that hands requests to the scheduler."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlx_h2o.caches.base import past_training_text
from mlx_h2o.serve import views
from mlx_h2o.serve.access import PAGE_ROOT, AccessMiddleware, AccessRules, error_response
from mlx_h2o.serve.errors import ApiError
from mlx_h2o.serve.page import page
from mlx_h2o.serve.pins import PinRequest
from mlx_h2o.serve.protocol import SEEDS, Chat, Completion, body_of, cache_settings
from mlx_h2o.serve.request import End, Event, Piece, Progress, Request, Start
from mlx_h2o.serve.responses import DONE, Choice, Format, event
from mlx_h2o.serve.scheduler import Scheduler
from mlx_h2o.serve.sessions import sync

CHATS = ("/v1/chat/completions", "/chat/completions")
TEXTS = ("/v1/completions",)
#: What there is in the place of other endpoints, of OpenAI's API and of Anthropic's.
ANTHROPIC = "Anthropic's API is not served: use OpenAI's, at /v1/chat/completions."
INSTEAD = {
    "/v1/messages": ANTHROPIC,
    "/v1/messages/count_tokens": ANTHROPIC,
    "/v1/responses": "/v1/responses is not served: use /v1/chat/completions.",
    "/v1/embeddings": "/v1/embeddings is not served: this server's models write text.",
    "/v1/audio/speech": "Audio is not served: this server's models write text.",
    "/v1/images/generations": "Images are not served: this server's models write text.",
}
#: The header that names a request's ignored fields.
IGNORED = "X-MLX-H2O-Ignored"
#: The header of answers beyond the length that the model was trained for.
PAST_TRAINING = "X-MLX-H2O-Past-Training"
#: The most ignored fields in one header, and in the log in all; and the form of names in a header.
MAX_IGNORED, MAX_WARNED = 16, 256
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
#: Headers of answers about the current state, which must not be cached.
NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
#: The status that /metrics counts if the client had gone before the answer (nginx's number).
CLIENT_GONE = 499
#: Seconds after which a look at the page's data is given up.
LOOK_PATIENCE = 30.0
DEFAULT_MODEL = "default_model"


@dataclass(frozen=True)
class Names:
    """What the models are called.

    Attributes:
        models: The names that answers have; the first is that of a request that names none.
        aliases: Further names by which requests may call them, each with the model's.
        fingerprint: The system's fingerprint.
    """

    models: Sequence[str]
    aliases: Mapping[str, str]
    fingerprint: str = ""

    @property
    def all(self) -> list[str]:
        """The names of the models, and the further ones."""
        return [*self.models, *self.aliases]

    def model(self, name: str | None) -> str:
        """The name of the model that a request calls by any of its names.

        Raises:
            ApiError: There is none of this name.
        """
        if name is None or name == DEFAULT_MODEL:
            return self.models[0]
        if name in self.all:
            return self.aliases.get(name, name)
        shown = name if len(name) <= 60 else f"{name[:57]}..."
        raise ApiError(
            404,
            f"The model {shown!r} does not exist; this server has "
            f"{', '.join(map(repr, self.all))}.",
            code="model_not_found",
        )


class Service:
    """All endpoints of one server.

    Args:
        scheduler: The thread that answers.
        rules: The access rules.
        names: What the models are called.

    Attributes:
        app: The ASGI application.
    """

    def __init__(self, scheduler: Scheduler, rules: AccessRules, names: Names):
        self._scheduler, self._rules, self._names = scheduler, rules, names
        self._created = int(time.time())
        self._warned: set[str] = set()
        self._requests: set[Request] = set()
        routes = [
            *(Route(path, self._chat, methods=["POST"]) for path in CHATS),
            *(Route(path, self._text, methods=["POST"]) for path in TEXTS),
            *(Route(path, self._instead, methods=["POST"]) for path in INSTEAD),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/", self._page, methods=["GET"]),
            Route(PAGE_ROOT + "{rest:path}", self._view, methods=["GET", "POST"]),
        ]
        origins = list(rules.origins)
        middleware = [
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[IGNORED, PAST_TRAINING, "Retry-After"],
            ),
            Middleware(AccessMiddleware, rules=rules),
        ]
        handlers: Any = {HTTPException: _no_route, ApiError: _refused, Exception: _failed}
        self._routes = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
        # A path with an extra slash is another path, and is not redirected.
        self._routes.router.redirect_slashes = False

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Every request; its status is counted. The arguments are ASGI's."""
        if scope["type"] != "http":
            return
        status = 0

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._routes(scope, receive, sending)
        finally:
            status = scope.get("state", {}).get("broke", status)
            logging.info("%s %s: %d", scope["method"], scope["path"], status)
            self._scheduler.metrics.answered(status)

    # -- completions ------------------------------------------------------------------------------

    async def _chat(self, http: HttpRequest) -> Any:
        return await self._completion(http, Chat)

    async def _text(self, http: HttpRequest) -> Any:
        return await self._completion(http, Completion)

    async def _completion(self, http: HttpRequest, kind: Any) -> Any:
        body = body_of(kind, await self._body(http))
        model = self._names.model(body.model)
        settings = self._scheduler.settings
        try:
            own = cache_settings(body.own_settings(), settings.defaults)
            own_pins = (body.mlx_h2o or {}).get("pins")
            pins = settings.pins if own_pins is None else PinRequest.of(own_pins)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        name = f"{'chatcmpl' if body.chat else 'cmpl'}-{uuid.uuid4()}"
        seed = secrets.randbits(64) if body.seed is None else body.seed
        seeds = [(seed + i) % SEEDS for i in range(body.n or 1)]
        request = Request(body, model, name, own, pins, seeds)
        shape = Format(body, name, model, self._names.fingerprint, int(time.time()))
        return Exchange(self, request, shape, self._warn(body.ignored))

    async def _body(self, http: HttpRequest) -> bytes:
        """A request's body, complete, within the size limit and in time.

        Raises:
            ApiError: The body is incomplete, too large or too late.
        """
        largest, patience = self._rules.largest, self._rules.patience
        close = {"Connection": "close"}
        length = http.headers.get("content-length")
        if length is None and "transfer-encoding" not in http.headers:
            raise ApiError(411, "The request has no Content-Length, and so no body.", headers=close)
        too_large = ApiError(
            413, f"The request's body may have {largest} bytes at most.", headers=close
        )
        if length is not None and int(length) > largest:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(patience):
                async for piece in http.stream():
                    body += piece
                    if len(body) > largest:
                        raise too_large
        except TimeoutError as error:
            why = f"The request's body did not come within {patience:g} seconds."
            raise ApiError(408, why, headers=close) from error
        except ClientDisconnect as error:
            raise ApiError(CLIENT_GONE, "The client went away.", headers=close) from error
        return bytes(body)

    def _warn(self, ignored: list[str]) -> dict[str, str]:
        """Log ignored fields once each; return the header that names them to the client."""
        if not ignored:
            return {}
        names = [name for name in ignored if NAME.fullmatch(name)][:MAX_IGNORED]
        for name in names:
            if name not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(name)
                logging.warning("Requests have a field %s, which is ignored.", name)
        return {IGNORED: ", ".join(names) or "fields with other names"}

    async def _instead(self, http: HttpRequest) -> Response:
        raise ApiError(404, INSTEAD[http.url.path])

    # -- what an exchange needs -------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Hand a request to the scheduler."""
        self._requests.add(request)
        self._scheduler.submit(request)

    def finish(self, request: Request, delivered: Sequence[str]) -> None:
        """A request is over.

        Args:
            request: The request.
            delivered: The names of its answers, if its client has all of them.
        """
        self._requests.discard(request)
        request.gone.set()
        # The scheduler looks at once which clients went away.
        self._scheduler.call(partial(self._scheduler.delivered, delivered))

    # -- reports ----------------------------------------------------------------------------------

    async def _models(self, http: HttpRequest) -> Response:
        """All models, or one by its name."""
        name = http.path_params.get("name")
        own = {"object": "model", "created": self._created, "owned_by": "mlx-h2o"}
        if name is None:
            data = [{"id": one} | own for one in self._names.all]
            return JSONResponse({"object": "list", "data": data})
        model = self._names.model(name)
        return JSONResponse({"id": name if name in self._names.all else model} | own)

    async def _health(self, http: HttpRequest) -> Response:
        scheduler = self._scheduler
        status = "ok" if scheduler.works else "failing"
        if not scheduler.is_alive:
            status = "unavailable"
        elif not scheduler.loaded.is_set():
            status = "loading"
        last = scheduler.last_failure or None
        report = {"status": status, "failures": scheduler.failures, "last_failure": last}
        return JSONResponse(report, 200 if status == "ok" else 503)

    async def _metrics(self, http: HttpRequest) -> Response:
        metrics = self._scheduler.metrics
        body = await asyncio.to_thread(metrics.text)
        headers = {"Content-Type": metrics.content_type}
        return Response(body, 200, headers)

    async def _page(self, http: HttpRequest) -> Response:
        """The page, for clients whose requests its endpoints would answer."""
        self._rules.require_page_reader(http)
        html = page()
        headers = {"Content-Type": "text/html; charset=utf-8"} | html.headers
        return Response(html.body, 200, headers)

    async def _view(self, http: HttpRequest) -> Response:
        """The data that the page reads, and the pins that are set there."""
        body = await self._body(http) if http.method == "POST" else b""
        self._rules.require_page_reader(http)
        path = http.scope["raw_path"].decode("ascii").partition("?")[0].removeprefix(PAGE_ROOT)
        start = http.query_params.get("from")
        try:
            fields = from_json(body) if body else None
            method = "GET" if http.method == "HEAD" else http.method
            look = views.view(method, path, start, fields)
            result = await look(self._scheduler, self._between_steps)
        except LookupError as error:
            # While an answer is watched its prompt is still read, or it was stopped just now.
            if start is not None and http.method == "GET":
                return JSONResponse(None, headers=NO_STORE)
            raise ApiError(404, str(error.args[0])) from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except TimeoutError as error:
            why = "The server is busy with a request; ask again later."
            raise ApiError(503, why) from error
        return JSONResponse(result, headers=NO_STORE)

    async def _between_steps(self, do: Callable[[], Any]) -> Any:
        """The result of a function that the scheduler calls between two steps."""
        async with asyncio.timeout(LOOK_PATIENCE):
            return await asyncio.wrap_future(self._scheduler.call(do))

    # -- the end ----------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether the model failed to load for good."""
        return self._scheduler.failure is not None

    def end(self) -> None:
        """Break off all answers; called in asyncio's loop."""
        for request in list(self._requests):
            request.deliver(0, ApiError(503, "The server is ending."))


class Exchange:
    """The answer to one request, as an ASGI application.

    Args:
        service: The endpoints.
        request: The request.
        shape: The objects that answer it.
        headers: Additional headers of the answer.
    """

    def __init__(self, service: Service, request: Request, shape: Format, headers: dict[str, str]):
        self._service, self._request = service, request
        self._format, self._headers = shape, headers
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._choices = [Choice(i) for i in range(request.count)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer as long as the client is there.

        Raises:
            ApiError: The request cannot be answered; nothing was sent.
        """
        loop = asyncio.get_running_loop()

        def deliver(index: int, event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed, and no one waits
                loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        self._request.deliver = deliver
        watch = asyncio.create_task(self._watch(receive))
        complete = False
        try:
            self._service.begin(self._request)
            if self._request.body.stream:
                await self._stream(scope, send)
            else:
                await self._whole(send)
            complete = "broke" not in scope.get("state", {})
        finally:
            watch.cancel()
            names = [self._request.answer_name(i) for i in range(self._request.count)]
            self._service.finish(self._request, names if complete else [])

    async def _watch(self, receive: Any) -> None:
        """Notice when the client goes away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._request.deliver(0, ApiError(CLIENT_GONE, "The client went away."))

    async def _news(self) -> AsyncIterator[tuple[int, Event]]:
        """The events of all answers, until the last is complete; the choices grow meanwhile.

        An answer's end comes once its conversation is on disk.

        Raises:
            ApiError: An answer broke off.
        """
        left = self._request.count
        while left:
            index, event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, End):
                left -= 1
                if event.file is not None:
                    with suppress(OSError):
                        await asyncio.to_thread(sync, event.file)
            self._choices[index].take(event)
            yield index, event

    async def _whole(self, send: Any) -> None:
        """The answer in one piece."""
        async for _ in self._news():
            pass
        answer = JSONResponse(self._format.whole(self._choices), headers=self._all_headers())
        await send({"type": "http.response.start", "status": 200, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _stream(self, scope: Any, send: Any) -> None:
        """The answer as it comes; nothing is sent before its prompt is read."""
        started = False
        try:
            async for piece in self._pieces():
                if not started:
                    await self._start(send)
                    started = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        except ApiError as error:
            if not started:
                raise
            scope.setdefault("state", {})["broke"] = error.status
            last = b"data: " + error.body() + b"\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": False})

    def _all_headers(self) -> dict[str, str]:
        """The headers given, and one if the tokens so far are beyond the model's training."""
        start = self._choices[0].start
        tokens = max(one.end.tokens if one.end else 0 for one in self._choices)
        if start is None or not start.trained or start.prompt + tokens <= start.trained:
            return self._headers
        past = past_training_text(start.prompt + tokens, start.trained)
        return self._headers | {PAST_TRAINING: past}

    async def _start(self, send: Any) -> None:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        raw = Response(headers=headers | self._all_headers()).raw_headers
        raw = [one for one in raw if one[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _pieces(self) -> AsyncIterator[bytes]:
        """The answer as it comes, without its end mark."""
        shape, body, named = self._format, self._request.body, False
        async for index, news in self._news():
            if isinstance(news, Progress):
                yield b": keepalive %d/%d\n\n" % (news.read, news.whole)
            if isinstance(news, Start | Progress):
                continue
            if not named and body.chat:
                # In the order of their numbers: some clients expect the first choice first.
                named = True
                for i in range(self._request.count):
                    yield event(shape.first(i))
            if isinstance(news, Piece):
                yield event(shape.piece(index, news))
            elif isinstance(news, End):
                yield event(shape.last(index, news))
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(shape.usage(self._choices))


async def _refused(http: HttpRequest, error: Any) -> Response:
    return error_response(error)


async def _no_route(http: HttpRequest, error: Any) -> Response:
    why = "There is nothing here."
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        why = f"{http.method} is not served here; {allowed} is."
    return error_response(ApiError(error.status_code, why, headers=error.headers))


async def _failed(http: HttpRequest, error: Exception) -> Response:
    return error_response(ApiError(500, f"{type(error).__name__}: {error}"))
