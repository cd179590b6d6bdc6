"""Ctrl-C and SIGTERM, by which people and their systems stop the command.

While the command imports its modules, Ctrl-C ends it at once and without a traceback: the package
imports this first. `cli.main` then handles Ctrl-C itself, puts Python's handler back, and lets
SIGTERM (of `kill`, of a job's time limit) end the work as Ctrl-C does.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

# What sys.argv begins with while the command is starting: its script's name, or that of -m, which
# is replaced by a path before any module outside this package runs.
COMMANDS = ("mlx_h2o", "-m")


class Terminated(KeyboardInterrupt):
    """SIGTERM came: what tidies up after Ctrl-C tidies up after this, too."""


@contextmanager
def terminating_tidily() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM, where it would end the process on the spot."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(*_: Any) -> NoReturn:
    raise Terminated


def end_quietly() -> None:
    """Let Ctrl-C end this process by the signal itself, if it is the command."""
    if (
        Path(sys.argv[0] if sys.argv else "").name in COMMANDS
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def handle_again() -> None:
    """Undo `end_quietly`, if it did anything."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)


end_quietly()
