"""The thread that writes blocks to a file of rows, for which no step waits.

A job is handed over once its arrays are evaluated (`row_file.RowFile`). The thread converts them to
bytes, computes checksums and writes; those release Python's lock for most of their time. It ends
when there was nothing to do for a second, and starts again with the next job, so that idle
conversations have no thread. Jobs that wait hold memory, so they have a greatest number of bytes:
beyond it the disk is too slow, and spilling stops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

#: Seconds without a job after which the thread ends.
IDLE = 1.0


class Job(NamedTuple):
    """One block to write.

    Attributes:
        block: Its index.
        nbytes: Bytes that it holds until it is written.
        write: Writes it; raises OSError.
    """

    block: int
    nbytes: int
    write: Callable[[], None]


class BlockWriter:
    """A queue of blocks and the thread that writes them in order.

    Args:
        most_bytes: Bytes that may wait.

    Attributes:
        failure: Why writing stopped, or "".
    """

    def __init__(self, most_bytes: int):
        self.failure = ""
        self._most_bytes = most_bytes
        self._jobs: deque[Job] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False

    def hand(self, job: Job) -> None:
        """Queue a block. If too many bytes wait already, writing stops for good."""
        with self._changed:
            if self.failure:
                return
            if self._waiting > self._most_bytes:
                self._stop(
                    f"the disk is too slow: {self._waiting / 1e6:.0f} MB waited to be written"
                )
                return
            self._jobs.append(job)
            self._waiting += job.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mlx-h2o rows", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take_back(self, first_block: int) -> None:
        """Forget blocks from an index on, and wait for one of them that is being written."""
        with self._changed:
            kept = [job for job in self._jobs if job.block < first_block]
            self._waiting -= sum(job.nbytes for job in self._jobs if job.block >= first_block)
            self._jobs = deque(kept)
            while self._busy:
                self._changed.wait()

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

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is the writer itself: the collector of garbage runs anywhere."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Forget what waits, and wait for the block that is being written."""
        with self._changed:
            self._stop(self.failure or "it is closed")
            while self._busy:
                self._changed.wait()

    def _stop(self, why: str) -> None:
        self.failure = self.failure or why
        self._jobs.clear()
        self._waiting = 0
        self._changed.notify_all()

    def _next(self) -> Job | None:
        """The next job, or None after a second without one; then the thread must end."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            if not self._jobs and not self.failure:
                self._changed.wait(IDLE)
            if not self._jobs:
                self._thread = None
                return None
            self._busy = True
            return self._jobs.popleft()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            failure = ""
            try:
                job.write()
            except Exception as error:  # whatever it is, the conversation goes on without a file
                failure = f"it could not be written: {error}"
            self._finished(job, failure)
            del job  # which holds the rows that it wrote

    def _finished(self, job: Job, failure: str) -> None:
        with self._changed:
            self._waiting = max(self._waiting - job.nbytes, 0)
            if failure:
                self._stop(failure)
