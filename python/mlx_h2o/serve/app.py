"""The server's endpoints as an ASGI application: access checks, reading bodies, and routes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_h2o.serve import watching
from mlx_h2o.serve.answers import Frame, error_body
from mlx_h2o.serve.asking import asked_of
from mlx_h2o.serve.bodies import parsed
from mlx_h2o.serve.exchange import CLIENT_GONE, Exchange, Receive, Refused, Send
from mlx_h2o.serve.generator import BoundedGenerator
from mlx_h2o.serve.page import page
from mlx_h2o.serve.sharing import processes, require_batchable
from mlx_h2o.serve.threads import Threads

#: The default limit of a request's bytes.
USUAL_REQUEST = 8 << 20
#: Headers of answers about the current state, which must not be cached.
NOT_KEPT = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
#: The header that names a request's ignored fields.
IGNORED = "X-MLX-H2O-Ignored"
#: The most of them in one header, and in the log in all; and the form of names in a header.
MOST_IGNORED, MOST_WARNED = 16, 256
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
#: Paths that need no key.
FREE = ("/health",)
CHATS = ("/v1/chat/completions", "/chat/completions")
TEXTS = ("/v1/completions",)


@dataclass(frozen=True)
class Doors:
    """Access rules: who may send requests, and how large they may be.

    Attributes:
        largest: The most bytes of a request's body.
        patience: Seconds that a body may take to arrive.
        strict: Whether unknown fields are refused.
        key: The key that every request needs, or None.
    """

    largest: int = USUAL_REQUEST
    patience: float = 60.0
    strict: bool = False
    key: str | None = None


class Service:
    """All endpoints of one server.

    Args:
        generator: The generator that answers.
        doors: The access rules.
        fingerprint: The system's fingerprint, as mlx-lm forms it.

    Attributes:
        app: The ASGI application.
    """

    def __init__(self, generator: BoundedGenerator, doors: Doors, fingerprint: str):
        self._generator, self._doors = generator, doors
        self._fingerprint, self._created = fingerprint, int(time.time())
        self._threads = Threads()
        self._warned: set[str] = set()
        self._exchanges: set[Exchange] = set()
        routes = [
            *(Route(path, self._completion, methods=["POST"]) for path in (*CHATS, *TEXTS)),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/", self._page, methods=["GET"]),
            Route(watching.ROOT + "{rest:path}", self._watched, methods=["GET", "POST"]),
        ]
        handlers: Any = {HTTPException: _no_route, Refused: _refused, Exception: _failed}
        self._routes = Starlette(routes=routes, exception_handlers=handlers)
        # A path with an extra slash is another path, and is not redirected.
        self._routes.router.redirect_slashes = False

    # -- access -----------------------------------------------------------------------------------

    async def app(self, scope: Any, receive: Receive, send: Send) -> None:
        """Every request: checks before its endpoint, headers after it; arguments are ASGI's."""
        if scope["type"] != "http":
            return
        request = Request(scope)
        origin, status = request.headers.get("origin"), 0
        more = [(name.encode(), value.encode()) for name, value in self._cors(origin).items()]

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = message | {"headers": [*message.get("headers", []), *more]}
            await send(message)

        if request.method == "OPTIONS":
            refusal: Response | None = Response(status_code=204)
        else:
            refusal = self._refusal(request, origin)
        await (refusal or self._routes)(scope, receive, sending)
        status = scope.get("state", {}).get("broke", status)
        logging.info("%s %s: %d", request.method, request.url.path, status)
        text = "Requests, by the status of the answer."
        self._generator.metrics.count("requests", text, status=str(status))

    def _refusal(self, request: Request, origin: str | None) -> Response | None:
        """The refusal of a client or a browser's page; None if it may ask."""
        # The body was not read.
        close = {"Connection": "close"}
        if request.method == "POST" and origin is not None and not self._welcome(request, origin):
            return answer(
                403, "Pages of other origins are not served; see --allowed-origins.", close
            )
        path = request.url.path
        if self._doors.key is None or path in FREE or self._has_key(request):
            return None
        # A browser asks its user for a name, which may be anything, and for the key.
        own_page = path == "/" or path.startswith(watching.ROOT)
        way = 'Basic realm="mlx-h2o", charset="UTF-8"' if own_page else "Bearer"
        why = "This server needs its key: Authorization: Bearer KEY."
        return answer(401, why, {"WWW-Authenticate": way, **close})

    def _has_key(self, request: Request) -> bool:
        """Whether a request has the key; the time that takes reveals nothing about the key."""
        way, _, given = request.headers.get("authorization", "").partition(" ")
        said = given.strip().encode("latin-1", "replace")
        if way.lower() == "basic":
            try:
                said = base64.b64decode(said, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return False
        elif way.lower() != "bearer":
            return False
        assert self._doors.key is not None
        return hmac.compare_digest(said, self._doors.key.encode())

    def _welcome(self, request: Request, origin: str) -> bool:
        """Whether a page of this origin may ask: our own, or one that the command line names."""
        allowed = self._generator.cli_args.allowed_origins
        own = urlsplit(origin).netloc == request.headers.get("host", "")
        return "*" in allowed or origin in allowed or own

    def _cors(self, origin: str | None) -> dict[str, str]:
        """The CORS headers for pages that may ask."""
        allowed = self._generator.cli_args.allowed_origins
        headers = {"access-control-allow-methods": "*", "access-control-allow-headers": "*"}
        if "*" in allowed:
            headers["access-control-allow-origin"] = "*"
        elif origin and origin in allowed:
            headers |= {"access-control-allow-origin": origin, "vary": "Origin"}
        return headers

    # -- completions ------------------------------------------------------------------------------

    def _names(self) -> tuple[str, ...]:
        """The names by which requests may call the model."""
        return "default_model", str(self._generator.cli_args.model)

    async def _completion(self, request: Request) -> Any:
        """Chats, and texts to complete."""
        generator = self._generator
        body = await self._body(request)
        try:
            told = parsed(body)
            chat = request.url.path in CHATS
            asked = asked_of(
                told, chat, self._names(), generator.cli_args, generator.defaults,
                generator.pins, self._doors.strict,
            )  # fmt: skip
            if processes() > 1:
                require_batchable(told)
        except ValueError as error:
            raise Refused(400, str(error)) from error
        frame = Frame(chat, asked.stream, self._names()[-1], self._fingerprint)
        headers = self._warn(asked.ignored)
        exchange = Exchange(generator, self._threads, asked, frame, headers)

        async def answered(scope: Any, receive: Receive, send: Send) -> None:
            self._exchanges.add(exchange)
            try:
                await exchange(scope, receive, send)
            finally:
                self._exchanges.discard(exchange)

        return answered

    async def _body(self, request: Request) -> bytes:
        """A request's body, complete, within the size limit and in time.

        Raises:
            Refused: The body is incomplete, too large or too late.
        """
        largest, patience = self._doors.largest, self._doors.patience
        length = request.headers.get("content-length")
        if length is None and "transfer-encoding" not in request.headers:
            raise Refused(411, "The request has no Content-Length, and so no body.", close=True)
        if length is not None and int(length) > largest:
            why = f"The request has {int(length)} bytes; {largest} are taken at most."
            raise Refused(413, why, close=True)
        body = bytearray()
        try:
            async with asyncio.timeout(patience):
                async for piece in request.stream():
                    body += piece
                    if len(body) > largest:
                        why = f"The request has more than {largest} bytes, which are the most."
                        raise Refused(413, why, close=True)
        except TimeoutError as error:
            why = f"The request's body did not come within {patience:g} seconds."
            raise Refused(408, why, close=True) from error
        except ClientDisconnect as error:
            raise Refused(CLIENT_GONE, "The client went away.", close=True) from error
        return bytes(body)

    def _warn(self, ignored: list[str]) -> dict[str, str]:
        """Log ignored fields once each; return the header that names them to the client."""
        if not ignored:
            return {}
        names = [name for name in ignored if NAME.fullmatch(name)][:MOST_IGNORED]
        for name in names:
            if name not in self._warned and len(self._warned) < MOST_WARNED:
                self._warned.add(name)
                logging.warning("Requests have a field %s, which is ignored.", name)
        return {IGNORED: ", ".join(names) or "fields with other names"}

    # -- reports ----------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        """The model, in a list or by its name."""
        name = request.path_params.get("name")
        own = {"id": self._names()[-1], "object": "model", "created": self._created}
        own |= {"owned_by": "mlx-h2o"}
        if name is None:
            return json_answer({"object": "list", "data": [own]})
        if name not in self._names():
            raise Refused(404, f"There is no model {name[:200]!r}; this server has {own['id']!r}.")
        return json_answer(own)

    async def _health(self, request: Request) -> Response:
        generator = self._generator
        told = generator.health.told(generator.provider.loaded.is_set(), generator.is_healthy)
        return json_answer(told, 200 if told["status"] == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        metrics = self._generator.metrics
        body = await self._threads.result(metrics.text)
        headers = {"Content-Type": metrics.content_type}
        return Response(body, 200 if metrics.available else 501, headers)

    async def _page(self, request: Request) -> Response:
        """The page, for clients whose requests its endpoints would answer."""
        self._require_here(request)
        return Response(
            page().body, 200, {"Content-Type": "text/html; charset=utf-8"} | page().headers
        )

    async def _watched(self, request: Request) -> Response:
        """The data that the page reads, and the pins that are set there."""
        body = await self._body(request) if request.method == "POST" else b""
        self._require_here(request)
        origin, site = (request.headers.get(name) for name in ("origin", "sec-fetch-site"))
        path = request.scope["raw_path"].decode("ascii")
        query = request.scope["query_string"].decode("latin-1")
        whole = f"{path}?{query}" if query else path
        generator = self._generator

        def look() -> Any:
            watching.require_own_page(origin, site, lambda of: self._welcome(request, of))
            if request.method == "POST":
                return watching.posted(generator, whole, body)
            return watching.got(generator, whole)

        try:
            told = await self._threads.result(look)
        except watching.NotHere as error:
            raise Refused(error.status, str(error)) from error
        return json_answer(told, headers=NOT_KEPT)

    def _require_here(self, request: Request) -> None:
        """Let through clients on this machine.

        Raises:
            Refused: The request comes from another machine.
        """
        peer = request.client.host if request.client else ""
        try:
            watching.require_here(peer, request.headers.get("host", ""))
        except watching.NotHere as error:
            raise Refused(error.status, str(error)) from error

    # -- the end ----------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether the model failed to load for good."""
        return self._generator.provider.failure is not None

    def end(self) -> None:
        """Break off all answers; called in asyncio's loop."""
        for exchange in list(self._exchanges):
            exchange.end()

    def join(self) -> None:
        """Wait for the threads of all requests."""
        self._threads.join()


def json_answer(told: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An object as JSON.

    Args:
        told: The object.
        status: The HTTP status.
        headers: Additional headers.
    """
    more = {"Content-Type": "application/json", **(headers or {})}
    return Response(json.dumps(told).encode(), status, more)


def answer(status: int, why: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in the format that OpenAI's clients read.

    Args:
        status: The HTTP status.
        why: The message.
        headers: Additional headers.
    """
    more = {"Content-Type": "application/json", **(headers or {})}
    return Response(error_body(status, why), status, more)


async def _refused(request: Request, error: Refused) -> Response:
    return answer(error.status, str(error), error.headers)


async def _no_route(request: Request, error: HTTPException) -> Response:
    why = "There is nothing here."
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        why = f"{request.method} is not served here; {allowed} is."
    return answer(error.status_code, why, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return answer(500, f"{type(error).__name__}: {error}")
