"""Jobs of a measurement on all cores at once, in processes of their own that Ctrl-C ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx

from mlx_h2o._utils import blas

#: Called with the number of tokens done since the last call.
Tell = Callable[[int], None]


class Work(Protocol):
    """Work that can be cut into numbered jobs; it is pickled once for each process."""

    def run(self, job: int, tell: Tell) -> Any:
        """Do one job, and return a value that can be pickled."""


# A worker's own state, set once when it starts.
_work: Work
_counter: Any = None  # counts the tokens that all processes have done


def _start(counter: Any, work: Work, openblas: bool) -> None:
    global _counter, _work
    if openblas:
        blas.use_openblas()
    end_with_parent()
    _counter, _work = counter, work


def end_with_parent() -> None:
    """End this worker when its parent process is gone, even if that was killed."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _tell(tokens: int) -> None:
    with _counter.get_lock():
        _counter.value += tokens


def _run(job: int) -> Any:
    return _work.run(job, _tell)


def cores() -> int:
    """Processes that measure side by side: one a core, or 0 if all share one GPU."""
    if mx.default_device() != mx.Device(mx.cpu):
        return 0
    if hasattr(os, "sched_getaffinity"):  # the cores on which this process may run
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def finished(
    work: Work,
    jobs: Sequence[int],
    progress: Callable[[int], None],
    workers: int,
    fresh: bool = False,
) -> Iterator[tuple[int, Any]]:
    """Yield jobs with their results, as they end.

    Args:
        work: The work that the jobs belong to.
        jobs: The jobs' numbers, the longest first, so that no core idles at the end.
        progress: Called now and then with the tokens done so far.
        workers: The number of processes; 0 means this one alone.
        fresh: Whether each job gets a new process.

    Raises:
        Exception: A job raised it. All processes are ended then, as after Ctrl-C.
    """
    if not workers:
        yield from _in_this_process(work, jobs, progress)
        return
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    pool = ProcessPoolExecutor(
        workers,
        context,
        _start,
        (counter, work, blas.in_use()),
        max_tasks_per_child=1 if fresh else None,
    )
    try:
        with postponing_interrupts():
            numbers: dict[Future[Any], int] = {pool.submit(_run, job): job for job in jobs}
        pending = set(numbers)
        while pending:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            progress(counter.value)
            for future in done:
                yield numbers[future], future.result()
    except BaseException:  # after Ctrl-C too, no process may run on in the background
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _in_this_process(
    work: Work, jobs: Sequence[int], progress: Callable[[int], None]
) -> Iterator[tuple[int, Any]]:
    done = 0

    def tell(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done)

    for job in jobs:
        yield job, work.run(job, tell)


@contextmanager
def postponing_interrupts() -> Iterator[None]:
    """Postpone Ctrl-C and SIGTERM to the end of the block; new processes never see Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():  # other threads get no Ctrl-C
        yield
        return
    came: list[int] = []

    def note(number: int, _: Any) -> None:
        came.append(number)

    # New processes inherit the mask; other threads of this process may let the signal through.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # SIGTERM is not blocked: it is the signal that ends the processes themselves.
    handlers = {of: signal.signal(of, note) for of in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for of, handler in handlers.items():
            signal.signal(of, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number in came[:1]:
        signal.raise_signal(number)
