"""Starting and ending the server."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import mlx_lm
from mlx_lm.server import get_system_fingerprint

from mlx_h2o._byte_size import Share, size_text
from mlx_h2o.serve import ranks
from mlx_h2o.serve.access import AccessRules, is_loopback
from mlx_h2o.serve.app import Names, Service
from mlx_h2o.serve.errors import NotLoaded
from mlx_h2o.serve.listening import (
    Certificate,
    ConnectionLimits,
    Server,
    bound_socket,
    sigterm_interrupts,
)
from mlx_h2o.serve.metrics import Metrics
from mlx_h2o.serve.scheduler import Scheduler
from mlx_h2o.serve.sessions import in_use
from mlx_h2o.serve.settings import EngineSettings

#: The oldest mlx-lm whose tokenizers and caches have all that is used here.
LEAST_MLX_LM = (0, 32, 2)
#: Seconds that the system may take to end a thread whose Python part is over.
THREAD_PATIENCE = 10.0
#: The folder in which Linux lists a process's threads.
TASKS = "/proc/self/task"


@dataclass(frozen=True)
class ServerSettings:
    """The server's settings.

    Attributes:
        engine: What the thread that generates needs to know.
        host: The address to listen on.
        port: The port; 0: any that is free.
        aliases: Further names of models, each with the model's.
        rules: The access rules.
        limits: The limits of a connection.
        certificate: The certificate for TLS, or None.
    """

    engine: EngineSettings
    host: str = "127.0.0.1"
    port: int = 8080
    aliases: Mapping[str, str] = field(default_factory=dict)
    rules: AccessRules = field(default_factory=AccessRules)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    certificate: Certificate | None = None


def serve(
    settings: ServerSettings, ready: Callable[[Server, Scheduler], None] | None = None
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        settings: The server's settings.
        ready: Called once the server listens.

    Raises:
        ValueError: mlx-lm is too old, the address cannot be used, the model cannot be loaded or
            bounded, or several processes that share the model do not support a setting.
    """
    _require_mlx_lm(mlx_lm.__version__)
    engine = settings.engine
    if ranks.processes() > 1:
        ranks.require_shareable(
            len(engine.models), engine.bound is not None, engine.sessions is not None
        )
    with ExitStack() as until_end:
        if engine.sessions is not None:
            until_end.enter_context(in_use(engine.sessions))
        if ranks.rank() > 0:
            # Ctrl-C in a terminal reaches all ranks; rank 0 tells them to end.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with generating(engine) as scheduler:
                scheduler.thread.join()
            _require_loaded(scheduler)
            return
        until_end.enter_context(sigterm_interrupts())
        # The socket comes before any thread: an address that is in use is an error at once.
        listening = until_end.enter_context(bound_socket(settings.host, settings.port))
        scheduler = until_end.enter_context(generating(engine))
        try:
            _listen(settings, listening, scheduler, ready)
        except KeyboardInterrupt:
            print("Ending.", file=sys.stderr)
        _require_loaded(scheduler)


def _require_mlx_lm(version: str) -> None:
    """Raise ValueError unless mlx-lm is new enough."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < LEAST_MLX_LM:
        least = ".".join(map(str, LEAST_MLX_LM))
        raise ValueError(
            f"The server needs mlx-lm {least} or later; this is {version}. With an older one, "
            "mlx_h2o.install(max_size=...) before mlx_lm.server's own main() bounds its caches."
        )


def _require_loaded(scheduler: Scheduler) -> None:
    """Raise what kept the model from being loaded."""
    failure = scheduler.failure
    if isinstance(failure, ValueError):
        raise failure
    if failure is not None:
        raise NotLoaded(f"The model could not be loaded: {failure}") from failure


@contextmanager
def generating(engine: EngineSettings) -> Iterator[Scheduler]:
    """The scheduler, in a thread of its own; it ends with the block."""
    metrics = Metrics()
    scheduler = Scheduler(engine, metrics)
    metrics.watch(partial(_gauges, scheduler))
    scheduler.start()
    try:
        yield scheduler
    finally:
        if ranks.rank() == 0:
            scheduler.stop()
        _join(scheduler.thread)


def _join(thread: threading.Thread) -> None:
    """Wait until a thread has ended, in the system too.

    MLX frees a thread's data after Python's part of that thread is over, and takes Python's lock
    for it. Before Python 3.13 `join` returns earlier than that, and if the interpreter ends
    meanwhile, the process aborts ("terminate called without an active exception").
    """
    thread.join()
    if sys.version_info >= (3, 13) or not os.path.isdir(TASKS):
        return
    end = time.monotonic() + THREAD_PATIENCE
    while os.path.exists(f"{TASKS}/{thread.native_id}") and time.monotonic() < end:
        time.sleep(0.002)


def _listen(
    settings: ServerSettings,
    listening: socket.socket,
    scheduler: Scheduler,
    ready: Callable[[Server, Scheduler], None] | None,
) -> None:
    """Answer HTTP until Ctrl-C or SIGTERM; arguments as in `serve`."""
    names = Names(settings.engine.models, settings.aliases, get_system_fingerprint())
    service = Service(scheduler, settings.rules, names)

    def begun(server: Server) -> None:
        print(_greeting(settings, server.server_port), file=sys.stderr, flush=True)
        if ready is not None:
            ready(server, scheduler)

    Server(listening, service, settings.limits, settings.certificate, begun).serve()


def _greeting(settings: ServerSettings, port: int) -> str:
    """What a user should know of the server that has begun."""
    host, engine = settings.host, settings.engine
    scheme = "https" if settings.certificate is not None else "http"
    shown = f"[{host}]" if ":" in host else host
    bound = "no bound"
    if isinstance(engine.bound, Share):
        bound = f"{engine.bound.part:.0%} of a 16-bit cache for all"
    elif engine.bound is not None:
        bound = f"{size_text(engine.bound)} for all"
    key = "needs the key" if settings.rules.key else "no key"
    page = host if is_loopback(host) else "THIS_MACHINE"
    lines = [
        f"Serving on {scheme}://{shown}:{port}",
        f"  model: {', '.join((*engine.models, *settings.aliases))}; KV memory: {bound}; {key}",
        f"  page: {scheme}://{page}:{port}/" + (" (any name, and the key)" if settings.rules.key
         else " (on this machine)"),
    ]  # fmt: skip
    if not is_loopback(host) and settings.rules.key is None:
        lines.append(
            "  Warning: other machines can use this server, and there is no key: --api-key KEY."
        )
    return "\n".join(lines)


def _gauges(scheduler: Scheduler) -> dict[str, float]:
    """The gauges of memory and queue (`metrics.GAUGES`)."""
    ledger, idle = scheduler.ledger, scheduler.conversations
    current = ledger.current
    return {
        "kv_bytes_running": current.running,
        "kv_bytes_reserved": ledger.reserved,
        "kv_bytes_idle": current.idle,
        "kv_bytes_peak": ledger.peak,
        "kv_bytes_bound": ledger.bound or 0,
        "slots": scheduler.slots if ledger.running else 0.0,
        "running": ledger.running,
        "queue": scheduler.waiting,
        "idle": len(idle),
        "shrunk": idle.shrunk,
        "forgotten": idle.forgotten,
    }
