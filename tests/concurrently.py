"""Work in several threads at once."""

import threading
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx


def in_threads(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Each job's result, computed at once, each in a thread and on a stream of its own."""
    results: list[Any] = [None] * len(jobs)

    def work(i: int) -> None:
        try:
            with mx.stream(mx.new_stream(mx.cpu)):
                results[i] = jobs[i]()
        except Exception as error:
            results[i] = error

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    # A thread that has used MLX still ends for a moment after it was joined, and one that is caught
    # at that by the interpreter's own end aborts the process.
    time.sleep(0.1)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
