"""Listening: uvicorn, with deadlines and a largest number of connections.

uvicorn closes idle connections (`timeout_keep_alive`) and refuses requests, as plain text, beyond
`limit_concurrency`. It has no deadline for headers, and none for a client that does not read its
answer; those are here, with our own count of connections and errors in OpenAI's format.
"""

from __future__ import annotations

import asyncio
import http
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_h2o.serve.app import Service
from mlx_h2o.serve.errors import ApiError

#: Seconds that answers may take to end when the server ends; after that they are cancelled.
LONGEST_END = 30
BACKLOG = 512


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a connection.

    Attributes:
        connections: The most connections at one time.
        headers: The most seconds until a request's headers have arrived.
        reading: The most seconds that a client may leave an answer unread.
    """

    connections: int = 512
    headers: float = 20.0
    reading: float = 60.0


class Protocol(H11Protocol):
    """uvicorn's protocol, with limits for clients that are slow or many."""

    limits = ConnectionLimits()
    _headers_due: asyncio.TimerHandle | None = None
    _reading_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(
                503, f"There are {self.limits.connections} connections, which are the most."
            )
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """A client has disconnected."""
        self._headers_due = _off(self._headers_due)
        self._reading_due = _off(self._reading_due)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request have arrived."""
        super().data_received(data)
        self._await_headers()

    def on_response_complete(self) -> None:
        """An answer is complete; the next request may come."""
        super().on_response_complete()
        self._await_headers()

    def _await_headers(self) -> None:
        """Start the deadline of a request's headers, or stop it once they have arrived."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self._headers_due = _off(self._headers_due)
        elif self._headers_due is None:
            self._headers_due = self.loop.call_later(self.limits.headers, self._too_late)

    def _too_late(self) -> None:
        self._headers_due = None
        self._refuse(408, f"No request came within {self.limits.headers:g} seconds.")

    def pause_writing(self) -> None:
        """The client does not read as fast as the answer is sent."""
        super().pause_writing()
        self._reading_due = self.loop.call_later(self.limits.reading, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._reading_due = _off(self._reading_due)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP, in OpenAI's format."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # in the middle of an answer there is no room for another
        else:
            self._refuse(400, msg)

    def _refuse(self, status: int, why: str) -> None:
        """Answer without a request, and close the connection."""
        body = ApiError(status, why).body()
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _off(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Stop a timer; returns None in its place."""
    if timer is not None:
        timer.cancel()
    return None


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which reports when it listens, and breaks off answers when it ends."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]):
        super().__init__(config)
        self._service, self._ready = service, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; called ten times a second."""
        return await super().on_tick(counter) or self._service.failed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Disconnect all clients."""
        self._service.end()
        await super().shutdown(sockets)


@dataclass(frozen=True)
class Certificate:
    """The files of a certificate for TLS, with its chain, and of its key."""

    chain: Path
    key: Path


class Server:
    """A server on an already listening socket.

    Attributes:
        server_port: Its port.
    """

    def __init__(
        self,
        listening: socket.socket,
        service: Service,
        limits: ConnectionLimits,
        certificate: Certificate | None,
        ready: Callable[[Server], None],
    ):
        self._socket, self._service = listening, service
        self.server_port = int(listening.getsockname()[1])
        config = uvicorn.Config(
            service.app,
            http=type("LimitedProtocol", (Protocol,), {"limits": limits}),
            loop="asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the client is whoever is connected
            timeout_graceful_shutdown=LONGEST_END,
            ssl_certfile=certificate.chain if certificate else None,
            ssl_keyfile=certificate.key if certificate else None,
        )
        try:
            config.load()
        except OSError as error:  # ssl's errors are OSErrors too
            raise ValueError(f"--tls-cert and --tls-key cannot be used: {error}") from error
        self._server = _Uvicorn(config, service, lambda: ready(self))

    def serve(self) -> None:
        """Answer until `shutdown`, Ctrl-C or SIGTERM."""
        self._server.run(sockets=[self._socket])

    def shutdown(self) -> None:
        """End the server; any thread may call this."""
        self._server.should_exit = True


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ValueError: There is no such port or host, or it is in use.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port must be from 0 to 65535; got {port}.")
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"--host {host}: {error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise ValueError(f"Cannot listen on {host}, port {port}: {error.strerror}.") from error
    return made


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C in the main thread, and restore its handler afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt
