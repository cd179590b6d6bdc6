"""What a rival's cache made of a task: logits over the continuations, bytes and times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from benchmarks.board.tasks import Task
from mlx_h2o.budgets.plan import plain_bytes
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.reader import Reader, no_progress, read, step
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.models.free_memory import give_back
from mlx_h2o.slots import reserved_range


@dataclass
class Reading:
    """A task read through one cache.

    Attributes:
        logits: `[n, C - 1, vocabulary]`, float32: what is predicted after each token of the
            continuation but the last.
        counted: Bytes of one row's cache after the prompt, as a 16-bit model has them.
        held: Bytes of memory that one row's cache takes after the prompt, in this model's dtype.
        prompt_seconds: Seconds to read a row's prompt.
        token_seconds: The median seconds of a row's further token.
        peak: The greatest number of bytes of arrays beside the model while the prompt was read,
            with all that is computed on the way; None if several rows were read at once.
    """

    logits: mx.array
    counted: int
    held: int
    prompt_seconds: float
    token_seconds: float
    peak: int | None = None


#: Makes the caches that have read a task's prompts; the task may be one row of several.
After = Callable[[Reader, Task], list[Any]]
#: The same with a part of the bytes of the prompt's full 16-bit cache.
Sized = Callable[[Reader, Task, float], list[Any]]
#: Reads a task with such a part of the bytes.
Read = Callable[[Reader, Task, float], Reading]


def plain(model: nn.Module, tokens: int) -> int:
    """Bytes of a full 16-bit cache of so many tokens."""
    return tokens * sum(map(plain_bytes, layer_kinds(model)))


def counted_bytes(cache: Sequence[Any]) -> int:
    """Bytes of a model's caches as in 16 bits; the board's own caches count themselves."""
    own = [entry.counted for entry in cache if hasattr(entry, "counted")]
    return sum(own) if own else bytes_in_16_bits(cache)


def reading_of(
    reader: Reader,
    task: Task,
    after: After,
    one_by_one: bool = False,
    count: Callable[[Sequence[Any]], int] = counted_bytes,
) -> Reading:
    """Read a task's prompts, then its continuations token by token.

    Args:
        reader: The model.
        task: The prompts and continuations.
        after: Makes the cache that has read the prompts.
        one_by_one: Whether each row is read by itself, because a cache chooses for all rows of a
            batch alike.
        count: Counts the bytes of all rows' caches.

    Raises:
        ValueError: The cache's bytes are too few, or it does not suit the model.
    """
    n = len(task.prompts)
    parts = [task.row(i) for i in range(n)] if one_by_one else [task]
    readings = [_read(reader, part, after, count) for part in parts]
    return Reading(
        mx.concatenate([part.logits for part in readings]),
        max(part.counted for part in readings),
        max(part.held for part in readings),
        statistics.fmean(part.prompt_seconds for part in readings),
        statistics.fmean(part.token_seconds for part in readings),
        max((part.peak for part in readings if part.peak is not None), default=None),
    )


def through(
    caches: Sized,
    one_by_one: bool = False,
    count: Callable[[Sequence[Any]], int] = counted_bytes,
) -> Read:
    """How tasks are read through such caches; the arguments are those of `reading_of`."""

    def read(reader: Reader, task: Task, share: float) -> Reading:
        def after(reader: Reader, part: Task) -> list[Any]:
            return caches(reader, part, share)

        return reading_of(reader, task, after, one_by_one, count)

    return read


def _read(
    reader: Reader, task: Task, after: After, count: Callable[[Sequence[Any]], int]
) -> Reading:
    n = len(task.prompts)
    give_back()
    before, in_ranges = mx.get_active_memory(), reserved_range.bytes_held()
    mx.reset_peak_memory()
    start = time.perf_counter()
    cache = after(reader, task)
    # MLX does not count slots that lie in reserved memory.
    in_ranges = reserved_range.bytes_held() - in_ranges
    peak = mx.get_peak_memory() - before + in_ranges if n == 1 else None
    prompt_seconds = (time.perf_counter() - start) / n
    give_back()
    nbytes = (mx.get_active_memory() - before + in_ranges) // n
    counted = count(cache) // n
    tokens = mx.array(task.continuations)
    logits, seconds = [], []
    for i in range(tokens.shape[1] - 1):
        start = time.perf_counter()
        logits.append(step(reader.model, cache, tokens[:, i], no_progress).astype(mx.float32))
        seconds.append((time.perf_counter() - start) / n)
    stacked = mx.stack(logits, axis=1)
    mx.eval(stacked)
    return Reading(stacked, counted, nbytes, prompt_seconds, statistics.median(seconds), peak)


def having_read(reader: Reader, cache: list[Any], task: Task) -> list[Any]:
    """The cache, after a task's prompts were read through it in chunks."""
    read(reader.model, cache, mx.array(task.prompts), reader.chunk, no_progress)
    return cache
