"""Progress of long work, on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

#: Called with the amount of work done, and the whole amount.
Progress = Callable[[int, int], Any]
#: Seconds between lines in a file or a pipe. Work that ends before the first line prints none.
EVERY = 5.0
#: Seconds before the first line: long enough to measure a speed.
FIRST = 2.0


def no_progress(done: int, whole: int) -> None:
    """Say nothing."""


class ProgressReport:
    """The progress of some work; call it with the amount done and the whole amount.

    Args:
        title: The work's name, as in "calibrating".
        unit: The unit counted, as in "tokens"; empty where the numbers mean nothing to a user.
    """

    def __init__(self, title: str, unit: str = ""):
        self.title, self.unit = title, unit
        self.part, self.done, self.whole = "", 0, 0
        self.began = time.monotonic()
        # Time and amount when counting began: loading, and work of earlier runs, come before it.
        self._first: tuple[float, int] | None = None

    def __call__(self, done: int, whole: int) -> None:
        """Note that `done` of `whole` is finished."""
        self.done, self.whole = done, whole
        if self._first is None or not done:
            self._first = time.monotonic(), done

    def about(self, part: str) -> None:
        """Name the part that is being worked at now."""
        self.part = part

    def seconds_left(self) -> float | None:
        """Seconds left at the mean speed since counting began; None if nothing was done since."""
        began, at = self._first or (0.0, 0)
        if self.done <= at:
            return None
        passed = time.monotonic() - began
        return passed * max(self.whole - self.done, 0) / (self.done - at)

    def line(self) -> str:
        """The progress in one line."""
        parts = [": ".join(filter(None, (self.title, self.part)))]
        if self.whole:
            share = f"{min(self.done / self.whole, 1):.0%}"
            counts = f"{self.done:,} of {self.whole:,} {self.unit} ({share})"
            parts.append(counts if self.unit else share)
        parts.append(f"{duration(time.monotonic() - self.began)} so far")
        if (left := self.seconds_left()) is not None:
            parts.append(f"about {duration(left)} left")
        return ", ".join(parts)


class OnTerminal(ProgressReport):
    """The progress shown as a bar."""

    def __init__(self, title: str, unit: str, bar: Bar):
        super().__init__(title, unit)
        self._bar, self._task = bar, bar.add_task(title, total=None)

    def __call__(self, done: int, whole: int) -> None:
        super().__call__(done, whole)
        self._bar.update(self._task, completed=done, total=whole)

    def about(self, part: str) -> None:
        super().about(part)
        self._bar.update(self._task, description=": ".join(filter(None, (self.title, part))))


@contextmanager
def progress_bar(title: str, unit: str = "", transient: bool = False) -> Iterator[ProgressReport]:
    """Show the progress of some work while it runs.

    Args:
        title: The work's name, as in "calibrating".
        unit: The unit counted, as in "tokens".
        transient: Whether a terminal's bar disappears at the end.

    Yields:
        The object to call with the progress.
    """
    # Imported here: the caches import this module, and few of them ever show a bar.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if console.is_terminal:
        counted = (MofNCompleteColumn(), TextColumn(unit)) if unit else ()
        share = TextColumn("{task.percentage:>3.0f}%")
        columns = TextColumn("{task.description}"), BarColumn(), *counted, share
        remaining = TimeRemainingColumn(), TextColumn("left")
        with Bar(*columns, *remaining, console=console, transient=transient) as bar:
            yield OnTerminal(title, unit, bar)
        return
    with progress_lines(title, unit) as report:
        yield report


@contextmanager
def progress_lines(title: str, unit: str = "") -> Iterator[ProgressReport]:
    """Show the progress in lines: where there is no terminal, or beside another program's bar."""
    report, ended = ProgressReport(title, unit), threading.Event()
    teller = threading.Thread(target=_tell, args=(report, ended), daemon=True)
    teller.start()
    try:
        yield report
    finally:
        ended.set()
        teller.join()


def _tell(report: ProgressReport, ended: threading.Event) -> None:
    """Print a line every few seconds, and one at the end if there was any before."""
    wait = FIRST
    while not ended.wait(wait):
        print(report.line(), file=sys.stderr, flush=True)
        wait = EVERY
    if wait == EVERY:
        passed = duration(time.monotonic() - report.began)
        print(f"{report.title}: ended after {passed}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """75 as "1 min 15 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
