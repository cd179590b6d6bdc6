"""The thread that writes blocks to a file of rows.

A job is handed over once its arrays are evaluated (`row_file.RowFile`). The thread converts them to
bytes and writes, which releases Python's lock for most of its time. It ends when there was nothing
to do for a second, and starts again with the next job, so that idle conversations have no thread.
Rows that wait to be written hold memory, so there is room for few: a step that brings more waits
until enough of them are written (`wait_before`).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

#: Seconds without a job after which the thread ends.
IDLE = 1.0
#: Seconds for which a step waits for the disk before it counts as too slow and spilling stops. A
#: disk that starts to turn takes ten.
LONGEST_WAIT = 30.0


class Job(NamedTuple):
    """One block to write.

    Attributes:
        block: Its index.
        write: Writes it; raises OSError.
    """

    block: int
    write: Callable[[], None]


class BlockWriter:
    """A queue of blocks and the thread that writes them in order.

    Attributes:
        failure: Why writing stopped, or "".
    """

    def __init__(self) -> None:
        self.failure = ""
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy: Job | None = None

    def hand(self, job: Job) -> None:
        """Queue a block."""
        with self._changed:
            if self.failure:
                return
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mlx-h2o rows", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take_back(self, first_block: int) -> None:
        """Forget blocks from an index on, and wait for one of them that is being written."""
        with self._changed:
            self._jobs = deque(job for job in self._jobs if job.block < first_block)
            while self._busy:
                self._changed.wait()

    def wait_before(self, block: int) -> None:
        """Wait until what was handed over for the blocks before this one is written.

        If that takes longer than `LONGEST_WAIT`, writing stops for good.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._first >= block, LONGEST_WAIT):
                self._stop(f"the disk is too slow: a step waited {LONGEST_WAIT:g} s for it")

    @property
    def _first(self) -> float:
        """The first block that is not written; jobs come in the order of their blocks."""
        job = self._busy or next(iter(self._jobs), None)
        return math.inf if job is None or self.failure else job.block

    def wait(self) -> bool:
        """Wait until nothing is left to write; whether all was written."""
        with self._changed:
            while (self._jobs or self._busy) and not self.failure:
                self._changed.wait()
            return not self.failure

    def fail(self, why: str) -> None:
        """Stop for good; what waits is forgotten."""
        with self._changed:
            self._stop(why)

    def _stop(self, why: str) -> None:
        self.failure = self.failure or why
        self._jobs.clear()
        self._changed.notify_all()

    def _next(self) -> Job | None:
        """The next job, or None after a second without one; then the thread must end."""
        with self._changed:
            self._busy = None
            self._changed.notify_all()
            if not self._jobs and not self.failure:
                self._changed.wait(IDLE)
            if not self._jobs:
                self._thread = None
                return None
            self._busy = self._jobs.popleft()
            return self._busy

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.write()
            except Exception as error:  # whatever it is, the conversation goes on without a file
                self.fail(f"it could not be written: {error}")
            del job  # which holds the rows that it wrote
