"""Progress of long work on stderr: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

#: Seconds between two lines in a file or pipe.
EVERY = 5.0

#: Told how much is done, and how much there is.
Told = Callable[[int, int], None]


@contextmanager
def progress_bar(title: str) -> Iterator[Told]:
    """Show how far something is while it goes on.

    Args:
        title: What goes on, as "calibrating".
    """
    if not sys.stderr.isatty():
        yield _lines(title)
        return
    columns = TextColumn(title), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("")
        yield lambda done, whole: bar.update(task, completed=done, total=whole)


def _lines(title: str) -> Told:
    """Writes a line every few seconds, with the time that is left by what it took so far."""
    began = told = time.monotonic()

    def tell(done: int, whole: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < EVERY or not 0 < done <= whole:
            return
        told = now
        left = (now - began) * (whole - done) / done
        print(f"{title}: {100 * done // whole} %, about {left:.0f} s left", file=sys.stderr)

    return tell
