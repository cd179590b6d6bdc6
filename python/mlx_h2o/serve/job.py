"""Jobs for the thread that generates, which runs them between two of its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

#: Seconds after which a client is told that the server is busy.
PATIENCE = 30.0
#: Seconds between two checks that the thread is still there.
LOOK_EVERY = 0.5


class Busy(RuntimeError):
    """The thread that generates did not run the job in time."""


class Job:
    """A job that reads or changes caches, which only one thread may do.

    Args:
        do: The function to call.
    """

    def __init__(self, do: Callable[[], Any]):
        self._do = do
        self._given: Any = None
        self._error: Exception | None = None
        self._done, self._dropped = threading.Event(), False

    def run(self) -> None:
        """Run the job on the thread that generates; its errors go to the caller of `result`."""
        if self._dropped:
            return
        try:
            self._given = self._do()
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    def result(self, alive: Callable[[], bool]) -> Any:
        """The job's result, once it is done.

        Args:
            alive: Whether the thread that is to run it is there.

        Raises:
            Busy: The job was not run in time, and will not be.
            Exception: The job raised it.
        """
        waited = 0.0
        while not self._done.wait(LOOK_EVERY):
            waited += LOOK_EVERY
            if waited >= PATIENCE or not alive():
                self._dropped = True
                raise Busy("The server is busy with a request; ask again later.")
        if self._error is not None:
            raise self._error
        return self._given
