"""Starting and ending the server: mlx-lm's main, with our classes in the places of its own."""

from __future__ import annotations

import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.server
from mlx_lm.server import stream_generate

from mlx_h2o.integration import routing
from mlx_h2o.serve.accountant import Accountant
from mlx_h2o.serve.app import Doors, Service
from mlx_h2o.serve.asked_pins import NO_PINS, AskedPins
from mlx_h2o.serve.batches import WEIGHED_EVERY, AccountedBatch
from mlx_h2o.serve.conversations import Conversations
from mlx_h2o.serve.generator import HERE, BoundedGenerator
from mlx_h2o.serve.listening import (
    Certificate,
    Limits,
    Server,
    bound_socket,
    say_address,
    sigterm_interrupts,
)
from mlx_h2o.serve.metrics import Metrics
from mlx_h2o.serve.served_model import ServedModel
from mlx_h2o.serve.sessions import Sessions
from mlx_h2o.serve.sharing import processes, require_shareable
from mlx_h2o.serve.ticket import still_there

#: The oldest mlx-lm whose server's classes can be subclassed here.
LEAST_MLX_LM = (0, 32, 2)


@dataclass(frozen=True)
class ServerSettings:
    """The server's settings beside mlx-lm's own options.

    Attributes:
        defaults: Settings of caches, as `ModelSettings.of` takes them.
        bound: Bytes of all conversations, prefixes and batches; None means no bound.
        queue: The most requests that may wait.
        sessions: The folder of saved conversations, or None.
        sessions_memory: The most bytes of its files, or None.
        sessions_days: The days for which a conversation is kept there without a new turn, or None.
        doors: The access rules.
        limits: The limits of a connection.
        certificate: The certificate for TLS, or None.
        pins: The pins of every prompt whose request gives none.
    """

    defaults: dict[str, Any] = field(default_factory=dict)
    bound: int | None = None
    queue: int = 32
    sessions: Path | None = None
    pins: AskedPins = NO_PINS
    sessions_memory: int | None = None
    sessions_days: float | None = None
    doors: Doors = field(default_factory=Doors)
    limits: Limits = field(default_factory=Limits)
    certificate: Certificate | None = None


def serve(
    settings: ServerSettings,
    options: Sequence[str],
    ready: Callable[[Server, BoundedGenerator], None] | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        settings: The server's own settings.
        options: mlx-lm's options, as its command line takes them.
        ready: Called once requests are answered.

    Raises:
        ValueError: mlx-lm is too old for our subclasses, or several processes that share the model
            do not support a setting.
    """

    _require_mlx_lm(mlx_lm.__version__)
    if processes() > 1:
        require_shareable(settings.bound is not None, settings.sessions is not None)

    def run(host: str, port: int, provider: ServedModel, **_: Any) -> None:
        if mx.distributed.init().rank() == 0:
            # The socket comes before any thread: an address that is in use is an error at once.
            with (
                sigterm_interrupts(),
                bound_socket(host, port) as listening,
                generating(provider, settings) as generator,
            ):
                listen(host, listening, generator, settings, ready)
            return
        with generating(provider, settings) as generator:
            # Ctrl-C in a terminal reaches all ranks; rank 0 tells them when it waits for none.
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
        model = str(provider.cli_args.model)
        sessions = Sessions(settings.sessions, model, *limits)
        held.enter_context(sessions.held())
    most = provider.cli_args.prompt_cache_size if settings.bound is None else None
    conversations = Conversations(most, sessions)
    accountant = Accountant(settings.bound, settings.queue)
    metrics = Metrics()
    with held, _instead(mlx_lm.server, PIECES):
        generator = BoundedGenerator(
            provider, conversations, accountant, metrics, usual, settings.pins
        )
        try:
            _watch(metrics, generator)
            if accountant.bound is not None:  # fails here, before the first request
                generator.ticket_for(usual, still_there, settings.pins)
            yield generator
        finally:
            generator.stop_and_join()


def _batch(*args: Any, **kwargs: Any) -> AccountedBatch:
    """A batch of the generator whose thread this is."""
    return AccountedBatch(*args, owner=HERE.generator, **kwargs)


def _processors(args: Any) -> list[Any]:
    """mlx-lm's logits processors of a request; the one of the answer's form comes last."""
    generator, form = HERE.generator, getattr(args, "form", None)
    stock = list(STOCK_PROCESSORS(args))
    if form is None:
        return stock
    tokenizer = generator.provider.tokenizer
    return [*stock, generator.grammars.processor(form, tokenizer, args.reasons)]


def _alone(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """mlx-lm's `stream_generate`, whose caches are measured."""
    for count, response in enumerate(stream_generate(*args, **kwargs)):
        if count % WEIGHED_EVERY == 0:
            HERE.generator.stepped_alone(kwargs["prompt_cache"])
        if response.finish_reason is not None:
            HERE.generator.answered_alone(kwargs["prompt_cache"])
        yield response


STOCK_PROCESSORS = vars(mlx_lm.server)["_make_logits_processors"]
#: Names in mlx-lm's module, and our replacements.
PIECES = {
    "BatchGenerator": _batch,
    "_make_logits_processors": _processors,
    "stream_generate": _alone,
}

#: The gauges of memory and queue for Prometheus.
GAUGES = {
    "kv_bytes_running": "Bytes of caches that are in use.",
    "kv_bytes_reserved": "Bytes that they may take.",
    "kv_bytes_idle": "Bytes of idle conversations.",
    "kv_bytes_peak": "Most bytes of both at once.",
    "kv_bytes_bound": "Bytes that all may take; 0: no bound.",
    "slots": "Tokens that running caches hold, mean over layers.",
    "running": "Requests that run.",
    "queue": "Requests that wait.",
    "idle": "Idle caches.",
    "shrunk": "How often an idle conversation shrank.",
    "forgotten": "Idle caches that made room.",
}


def _watch(metrics: Metrics, generator: BoundedGenerator) -> None:
    """Register the gauges of memory and queue."""
    accountant, conversations = generator.accountant, generator.conversations

    def look() -> dict[str, float]:
        held = accountant.bytes()
        return {
            "kv_bytes_running": held.running,
            "kv_bytes_reserved": held.reserved,
            "kv_bytes_idle": held.idle,
            "kv_bytes_peak": held.peak,
            "kv_bytes_bound": held.bound or 0,
            "slots": generator.slots if accountant.running else 0.0,
            "running": accountant.running,
            "queue": accountant.waiting,
            "idle": len(conversations),
            "shrunk": conversations.shrunk,
            "forgotten": conversations.forgotten,
        }

    metrics.gauges(GAUGES, look)


def listen(
    host: str,
    listening: socket.socket,
    generator: BoundedGenerator,
    settings: ServerSettings,
    ready: Callable[[Server, BoundedGenerator], None] | None = None,
) -> None:
    """Answer HTTP until Ctrl-C or SIGTERM.

    Args:
        host: The host name shown to the user.
        listening: The open socket.
        generator: The generator that answers.
        settings: The server's settings.
        ready: Called when the server listens.

    Raises:
        NotLoaded: There is no model.
    """
    fingerprint = mlx_lm.server.get_system_fingerprint()
    service = Service(generator, settings.doors, fingerprint)

    def begun(server: Server) -> None:
        say_address(host, server.server_port, settings.certificate is not None)
        if ready is not None:
            ready(server, generator)

    try:
        Server(listening, service, settings.limits, settings.certificate, begun).serve()
    except KeyboardInterrupt:
        print("Ending.", file=sys.stderr)
    if service.failed:
        generator.provider.require()  # raises with the reason


@contextmanager
def _instead(module: Any, pieces: dict[str, Any]) -> Iterator[None]:
    """Replace names of a module in the block."""
    before = {name: getattr(module, name) for name in pieces}
    vars(module).update(pieces)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    """Replace the process's arguments, which mlx-lm's main reads, in the block."""
    before, sys.argv = sys.argv, arguments
    try:
        yield
    finally:
        sys.argv = before
