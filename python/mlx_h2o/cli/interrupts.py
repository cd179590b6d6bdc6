"""Ctrl-C and SIGTERM, which stop the command.

`cli.main` uses these; nothing here runs when a module is imported.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM came; the code that tidies up after Ctrl-C tidies up after it too."""


@contextmanager
def terminating_tidily() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM, which otherwise ends the process at once."""
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


@contextmanager
def after_this_step() -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C; raise the second, and SIGTERM, as ever.

    A step of the model that is interrupted leaves its caches between two states. So whoever
    generates asks after each token.

    Yields:
        A function that says whether Ctrl-C came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before, came = signal.getsignal(signal.SIGINT), False

    def note(*_: Any) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Ctrl-C or SIGTERM, if that is what an error reports.

    A signal's exception may be raised anywhere, also where Python wraps it in another one: until
    3.12 `__set_name__` turns it into a RuntimeError, so a signal that comes while a module defines
    its classes looks like an error of that module.
    """
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, KeyboardInterrupt):
        behind = behind.__cause__
    return behind


@contextmanager
def ending_quietly() -> Iterator[None]:
    """Let Ctrl-C end the process by the signal itself, without a traceback.

    The command imports its modules inside this block, which takes seconds. If a handler other than
    Python's own is set, or the thread is not the main one, nothing changes.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
