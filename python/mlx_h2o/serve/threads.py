"""Threads beside asyncio's loop, and waiting until the system has ended them too.

MLX frees a thread's data after Python's part of that thread is over, and takes Python's lock for
it. Before Python 3.13 `join` returns earlier than that, and if the interpreter ends meanwhile, the
process aborts ("terminate called without an active exception").
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

#: Seconds that the system may take to end a thread whose Python part is over.
LONGEST_ENDING = 10.0
#: Seconds between two checks.
LOOK_EVERY = 0.002
#: Threads that ended lately and are waited for at the end; earlier ones are long gone.
MOST_ENDING = 256
#: The folder in which Linux lists a process's threads.
TASKS = "/proc/self/task"


def join(thread: threading.Thread) -> None:
    """Wait until a thread has ended, in the system too."""
    thread.join()
    if sys.version_info >= (3, 13) or not os.path.isdir(TASKS):
        return
    end = time.monotonic() + LONGEST_ENDING
    while os.path.exists(f"{TASKS}/{thread.native_id}") and time.monotonic() < end:
        time.sleep(LOOK_EVERY)


class Threads:
    """Calls that may block, each in a thread of its own, for asyncio's loop to await."""

    def __init__(self) -> None:
        self._running: set[threading.Thread] = set()
        self._ending: deque[threading.Thread] = deque(maxlen=MOST_ENDING)

    async def result(self, call: Callable[[], Any]) -> Any:
        """The result of a call, or its exception."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def tell(given: Any, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(given)
            else:
                done.set_exception(error)

        def run() -> None:
            given, error = None, None
            try:
                given = call()
            except BaseException as raised:
                error = raised
            finally:
                me = threading.current_thread()
                self._ending.append(me)
                self._running.discard(me)
                with suppress(RuntimeError):  # the loop is closed, and no one waits
                    loop.call_soon_threadsafe(tell, given, error)

        thread = threading.Thread(target=run, name="mlx_h2o serve")
        self._running.add(thread)
        thread.start()
        return await done

    def join(self) -> None:
        """Wait for all threads."""
        for thread in (*self._running, *self._ending):
            join(thread)
