"""Starting and ending the server: mlx-lm's main, with our pieces in the places of its own."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.server

from mlx_h2o import routing
from mlx_h2o.serve.accountant import Accountant
from mlx_h2o.serve.asked_pins import NO_PINS, AskedPins
from mlx_h2o.serve.batches import AccountedBatch
from mlx_h2o.serve.conversations import Conversations
from mlx_h2o.serve.generator import BoundedGenerator
from mlx_h2o.serve.handler import USUAL_REQUEST, Handler, Server
from mlx_h2o.serve.metrics import Metrics
from mlx_h2o.serve.served_model import ServedModel
from mlx_h2o.serve.sessions import Sessions
from mlx_h2o.serve.sharing import processes, require_shareable
from mlx_h2o.serve.ticket import still_there

#: The mlx-lm whose server's pieces are subclassed here.
LEAST_MLX_LM = (0, 32, 2)


@dataclass(frozen=True)
class ServerSettings:
    """What the server holds, beside what mlx-lm's own options say.

    Attributes:
        defaults: Settings of caches, as `ModelSettings.of` takes them.
        bound: Bytes of all conversations, prefixes and batches; None: no bound.
        queue: Requests that may wait.
        sessions: Folder of saved conversations, or None.
        sessions_memory: Bytes that its files may take, or None.
        sessions_days: For which a conversation is kept there without a new turn, or None.
        largest: Bytes of a request.
        pins: What of every prompt is pinned, where the request says nothing of that.
    """

    defaults: dict[str, Any] = field(default_factory=dict)
    bound: int | None = None
    queue: int = 32
    sessions: Path | None = None
    largest: int = USUAL_REQUEST
    pins: AskedPins = NO_PINS
    sessions_memory: int | None = None
    sessions_days: float | None = None


def serve(
    settings: ServerSettings,
    options: Sequence[str],
    ready: Callable[[Server, BoundedGenerator], None] | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        settings: Ours.
        options: mlx-lm's own, as its command line takes them.
        ready: Told once requests are answered.

    Raises:
        ValueError: mlx-lm is older than the one whose pieces these are, or several processes that
            share the model cannot keep to a setting.
    """

    _require_mlx_lm(mlx_lm.__version__)
    if processes() > 1:
        require_shareable(settings.bound is not None, settings.sessions is not None)

    def run(host: str, port: int, provider: ServedModel, **_: Any) -> None:
        with generating(provider, settings) as generator:
            if mx.distributed.init().rank() == 0:
                listen(host, port, generator, settings.largest, ready)
            else:
                # Ctrl-C in a terminal is said to all; rank 0 says when it waits for none.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                generator.join()

    routing.install()
    pieces = {"run": run, "ModelProvider": ServedModel}
    with _instead(mlx_lm.server, pieces), _arguments(["mlx_h2o serve", *options]):
        mlx_lm.server.main()


def _require_mlx_lm(version: str) -> None:
    """Raise ValueError unless mlx-lm is new enough."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < LEAST_MLX_LM:
        least = ".".join(map(str, LEAST_MLX_LM))
        raise ValueError(
            f"The server needs mlx-lm {least} or later; this is {version}. With an older one, "
            "mlx_h2o.install(max_size=...) before mlx_lm.server's own main() bounds its caches."
        )


@contextmanager
def generating(provider: ServedModel, settings: ServerSettings) -> Iterator[BoundedGenerator]:
    """The generator that answers, in a thread of its own; it ends with the block."""
    sessions, held, usual = None, ExitStack(), settings.defaults
    provider.measures = usual.get("max_bytes") is not None and usual.get("profile") != "never"
    if settings.sessions is not None:
        limits = settings.sessions_memory, settings.sessions_days
        sessions = Sessions(settings.sessions, str(provider.cli_args.model), *limits)
        held.enter_context(sessions.held())
    most = provider.cli_args.prompt_cache_size if settings.bound is None else None
    conversations = Conversations(most, sessions)
    accountant = Accountant(settings.bound, settings.queue)
    metrics = Metrics()
    made: list[BoundedGenerator] = []

    def batch(*args: Any, **kwargs: Any) -> AccountedBatch:
        return AccountedBatch(*args, owner=made[0], **kwargs)

    with held, _instead(mlx_lm.server, {"BatchGenerator": batch}):
        generator = BoundedGenerator(
            provider, conversations, accountant, metrics, settings.defaults, settings.pins, made
        )
        _watch(metrics, generator)
        try:
            if accountant.bound is not None:  # before the first request finds out
                generator.ticket_for(settings.defaults, still_there, settings.pins)
            yield generator
        finally:
            generator.stop_and_join()


def _watch(metrics: Metrics, generator: BoundedGenerator) -> None:
    """What Prometheus sees of memory and queue."""
    accountant, conversations = generator.accountant, generator.conversations
    bound = accountant.bound
    for name, text, value in (
        ("kv_bytes_running", "Bytes of caches that are in use.", lambda: generator.running_bytes),
        ("kv_bytes_reserved", "Bytes that they may take.", lambda: accountant.reserved),
        ("kv_bytes_idle", "Bytes of idle conversations.", lambda: conversations.nbytes),
        ("kv_bytes_peak", "Most bytes of both at once.", lambda: generator.peak),
        ("kv_bytes_bound", "Bytes that all may take; 0: no bound.", lambda: bound or 0),
        ("slots", "Tokens that running caches hold, mean over layers.", lambda: generator.slots),
        ("running", "Requests that run.", lambda: accountant.running),
        ("queue", "Requests that wait.", lambda: accountant.waiting),
        ("idle", "Idle caches.", lambda: len(conversations)),
        ("shrunk", "How often an idle conversation shrank.", lambda: conversations.shrunk),
        ("forgotten", "Idle caches that made room.", lambda: conversations.forgotten),
    ):
        metrics.gauge(name, text, value)


def listen(
    host: str,
    port: int,
    generator: BoundedGenerator,
    largest: int,
    ready: Callable[[Server, BoundedGenerator], None] | None = None,
) -> None:
    """Answer HTTP until Ctrl-C or SIGTERM."""
    fingerprint = mlx_lm.server.get_system_fingerprint()
    handler = type("SizedHandler", (Handler,), {"largest": largest})
    with Server((host, port), partial(handler, generator, system_fingerprint=fingerprint)) as httpd:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _interrupted)
        print(f"Serving on http://{host}:{httpd.server_port}", file=sys.stderr, flush=True)
        if ready is not None:
            ready(httpd, generator)
        try:
            httpd.serve_forever()
        except KeyboardInterrupt:
            print("Ending.", file=sys.stderr)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@contextmanager
def _instead(module: Any, pieces: dict[str, Any]) -> Iterator[None]:
    """Other things in a module's places."""
    before = {name: getattr(module, name) for name in pieces}
    vars(module).update(pieces)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    """Other arguments of the process, which mlx-lm's main reads."""
    before, sys.argv = sys.argv, arguments
    try:
        yield
    finally:
        sys.argv = before
