"""HTTP: mlx-lm's endpoints with checks before them, and the server's own."""

from __future__ import annotations

import json
import logging
import select
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from mlx_lm.server import APIHandler

from mlx_h2o.serve import watching
from mlx_h2o.serve.failures import StepFailed, Unanswered
from mlx_h2o.serve.fields import check_body, check_for_model, pins_of, settings_of
from mlx_h2o.serve.generator import BoundedGenerator
from mlx_h2o.serve.page import page
from mlx_h2o.serve.sharing import processes, require_batchable
from mlx_h2o.serve.ticket import Turn, title_of

#: Seconds that a client may keep a read or a write waiting.
PATIENCE = 60
#: Bytes of a request where no other limit is set.
USUAL_REQUEST = 8 << 20
#: Of answers that say what is so now.
NOT_KEPT = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Refused(Exception):
    """A request that asks for what is not done; mlx-lm lets it through to us."""


class Handler(APIHandler):  # type: ignore[misc]
    """mlx-lm's handler: requests are checked whole before they reach it.

    Attributes:
        largest: Bytes that a request's body may have.
    """

    timeout = PATIENCE
    largest = USUAL_REQUEST
    response_generator: BoundedGenerator

    # -- what comes in ----------------------------------------------------------------------------

    def do_POST(self) -> None:
        """As in mlx-lm, for bodies of a known and moderate size from where they may come."""
        length = self.headers.get("Content-Length", "")
        origin = self.headers.get("Origin")
        if length and not length.isdecimal():
            self.refuse(400, "Content-Length must be a whole number.")
        elif length and int(length) > self.largest:
            self.refuse(413, f"The request has {length} bytes; {self.largest} are taken at most.")
        elif origin is not None and not self._welcome(origin):
            self.refuse(403, "Pages of other origins are not served; see --allowed-origins.")
        elif self.path.startswith(watching.ROOT):
            self._tell(lambda path: watching.posted(self.response_generator, path, self._read()))
        else:
            try:
                super().do_POST()
            except UnicodeDecodeError:
                self.refuse(400, "The body is not UTF-8.")
            except Refused as error:
                self.refuse(400, str(error))

    def _welcome(self, origin: str) -> bool:
        """Whether a page from there may ask: our own, or one that the command line names."""
        allowed = self.response_generator.cli_args.allowed_origins
        return (
            "*" in allowed or origin in allowed or urlsplit(origin).netloc == self.headers["Host"]
        )

    def _read(self) -> bytes:
        """The body, of the length that was told."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _tell(self, look: Callable[[str], dict[str, Any] | None]) -> None:
        """Answer with what a path's endpoint gives, or why it gives nothing."""
        try:
            watching.require_here(self.client_address[0], self.headers.get("Host", ""))
            origin, site = (self.headers.get(name) for name in ("Origin", "Sec-Fetch-Site"))
            watching.require_own_page(origin, site, self._welcome)
            told = look(self.path)
        except watching.NotHere as error:
            self.refuse(error.status, str(error))
        else:
            self.send_answer(200, "application/json", json.dumps(told).encode(), NOT_KEPT)

    def _show_page(self) -> None:
        """The page, to whom its endpoints would answer."""
        try:
            watching.require_here(self.client_address[0], self.headers.get("Host", ""))
        except watching.NotHere as error:
            self.refuse(error.status, str(error))
        else:
            self.send_answer(200, "text/html; charset=utf-8", page().body, page().headers)

    def validate_model_parameters(self) -> None:
        """As in mlx-lm; and what it would pass over, or break off at, is refused.

        Raises:
            Refused: The body asks for what is not done.
        """
        generator = self.response_generator
        provider = generator.provider
        try:
            check_body(self.body, self._names())
            if processes() > 1:
                require_batchable(self.body)
            super().validate_model_parameters()
            check_for_model(self.body, provider.require(), provider.tokenizer)
            self.settings = settings_of(self.body, generator.defaults)
            self.pins = pins_of(self.body, generator.pins)
        except ValueError as error:
            raise Refused(str(error)) from error
        # Whatever it was called: requests for different models do not share a batch.
        self.requested_model = self._names()[-1]
        self.requested_draft_model, self.adapter = "default_model", None

    def _names(self) -> tuple[str, ...]:
        """By which the model may be called."""
        served = str(self.response_generator.cli_args.model)
        return "default_model", served

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """As in mlx-lm, once there is a place in the queue."""
        generator = self.response_generator
        try:
            ticket = generator.ticket_for(self.settings, self._hung_up, self.pins)
        except ValueError as error:
            self.refuse(400, str(error))
            return
        if not generator.accountant.enter(ticket):
            wait = generator.accountant.retry_after
            self.refuse(429, "The queue is full.", {"Retry-After": str(wait)})
            return
        ticket.turn = Turn(self.request_id, title_of(request))
        request.ticket = ticket
        try:
            super().handle_completion(request, stop_words)
        except Unanswered as error:
            self.refuse(error.status, str(error))
        except StepFailed as error:
            self._break_off(error)
        else:
            self._count(200)
        finally:
            generator.accountant.leave(ticket)

    def _hung_up(self) -> bool:
        """Whether the client closed its connection."""
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    # -- what goes out ----------------------------------------------------------------------------

    def _break_off(self, error: StepFailed) -> None:
        """End an answer that will not be whole: by its status, or in a stream by its last event."""
        if not self.stream:
            self._headers_buffer = list[bytes]()  # of an answer with 200, not sent yet
            self.refuse(500, str(error))
            return
        self._count(500)
        self.close_connection = True
        self.wfile.write(b"data: " + _error(500, str(error)) + b"\n\n")

    def refuse(self, status: int, why: str, headers: dict[str, str] | None = None) -> None:
        """Answer with an error, in the form that OpenAI's clients read."""
        self._count(status)
        self.close_connection = True
        self.send_answer(status, "application/json", _error(status, why), headers)

    def send_answer(
        self, status: int, content_type: str, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        """A whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(body)

    def _count(self, status: int) -> None:
        text = "Requests, by the status of the answer."
        self.response_generator.metrics.count("requests", text, status=str(status))

    def do_GET(self) -> None:
        """/metrics, /v1/models, /health, the page and what it reads."""
        path = urlsplit(self.path).path
        if path == "/metrics":
            metrics = self.response_generator.metrics
            status = 200 if metrics.available else 501
            self.send_answer(status, metrics.content_type, metrics.text().encode())
        elif path == "/v1/models":
            model = {"id": self._names()[-1], "object": "model", "created": self.created}
            body = json.dumps({"object": "list", "data": [model | {"owned_by": "mlx-h2o"}]})
            self.send_answer(200, "application/json", body.encode())
        elif path == "/health":
            generator = self.response_generator
            told = generator.health.told(generator.provider.loaded.is_set(), generator.is_healthy)
            status = 200 if told["status"] == "ok" else 503
            self.send_answer(status, "application/json", json.dumps(told).encode())
        elif path == "/":
            self._show_page()
        elif path.startswith(watching.ROOT):
            self._tell(lambda path: watching.got(self.response_generator, path))
        else:
            self.refuse(404, "There is nothing here.")

    def log_message(self, format: str, *args: Any) -> None:
        """To the log, as mlx-lm's own lines."""
        logging.info(format, *args)


def _error(status: int, why: str) -> bytes:
    """An error as OpenAI's clients read it."""
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    kind = kinds.get(status, "invalid_request_error")
    return json.dumps({"error": {"message": why, "type": kind, "code": status}}).encode()


class Server(ThreadingHTTPServer):
    """A thread for each client; those that go away are no error, and closing sends all away."""

    # Threads that the interpreter cuts off in MLX at its end take the process with them.
    daemon_threads = False
    request_queue_size = 128

    def __init__(self, *args: Any, **kwargs: Any):
        self._clients: set[socket.socket] = set()
        if ":" in args[0][0]:
            self.address_family = socket.AF_INET6
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a client in a thread of its own."""
        self._clients.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A client was answered."""
        self._clients.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Send all clients away, and wait for their threads."""
        for client in list(self._clients):
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong with a request."""
        error = sys.exception()
        if isinstance(error, ConnectionError | TimeoutError):
            logging.info("A client went away: %s", error)
        else:
            logging.exception("A request failed")
