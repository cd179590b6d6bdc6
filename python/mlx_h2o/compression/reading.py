"""How a conversation's prompt is read: once, or twice where eviction would cost more than time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import stream_generate

from mlx_h2o._progress import Progress, no_progress
from mlx_h2o.budgets.cost import bytes_by_stage
from mlx_h2o.caches.conversation import bounded_members
from mlx_h2o.compression.twice import (
    CHUNK,
    Reading,
    query_thinning,
    read_twice,
    require_readable,
)

#: "twice" reads what does not fit the memory twice, "auto" if that takes no more than `SECONDS`.
Readings = Literal["auto", "once", "twice"]
READINGS: tuple[Readings, ...] = ("auto", "once", "twice")
#: The longest prompt that "auto" reads twice: all its packed rows are held meanwhile, beside the
#: bound.
LONGEST = 2048
#: The most seconds that "auto" spends on a second reading.
SECONDS = 60.0
#: Tokens at the end of a prompt that are read once: the question, and what an answer goes on from.
#: Every head has room for them.
NEWEST = 16
#: Tokens of the request to repeat a text where no tokenizer is at hand; with most ones fewer.
REQUEST = 16
#: Bytes of the greatest weight that a row received.
WORTH = 4
#: The readings of "twice"; those of "auto" stop after SECONDS.
TWICE = Reading(room=NEWEST, within=True)


@dataclass(eq=False)
class TwoReadings:
    """New tokens of a conversation while they are read twice, chunk by chunk.

    Attributes:
        count: The tokens.
        done: The tokens read so far, of which there are two for each.
        is_twice: Whether they were read twice, once that is over; False if it took too long.
    """

    count: int
    steps: Generator[int, None, bool]
    done: int = 0
    is_twice: bool = False

    def step(self) -> bool:
        """Read a chunk, or choose the rows of a layer; False if nothing was left to do."""
        try:
            self.done += next(self.steps)
        except StopIteration as end:
            self.is_twice = end.value
            return False
        return True


def exceeds_slots(cache: Sequence[Any], length: int) -> bool:
    """Whether so many new tokens are more than a head's slots, in the mean."""
    budgets = [slots for entry in bounded_members(cache) for slots in entry.budgets or ()]
    return bool(budgets) and length > sum(budgets) / len(budgets)


def is_read_twice(model: nn.Module, cache: Sequence[Any], length: int, how: Readings) -> bool:
    """Whether so many new tokens are read twice; the arguments are those of `two_readings`.

    Raises:
        ValueError: "twice" where no second reading is possible.
    """
    longest = {"once": 0, "auto": LONGEST}.get(how, length)
    if length > longest or not exceeds_slots(cache, length):
        return False
    try:
        require_readable(model, cache, length, TWICE)
    except ValueError:
        if how == "twice":
            raise
        return False
    return True


def two_readings(
    model: nn.Module,
    tokenizer: Any,
    tokens: Sequence[int],
    cache: Sequence[Any],
    how: Readings,
    chunk: int = CHUNK,
) -> TwoReadings | None:
    """Two readings of new tokens, or None where they are to be read once.

    They are read twice if some would be evicted: a short turn after a long one is read once.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        tokens: The new tokens.
        cache: The conversation's caches, from `make_prompt_cache`.
        how: "once", "twice" or "auto". Where the model or the settings allow no second reading,
            "auto" reads once.
        chunk: Tokens that go through the model at once.

    Raises:
        ValueError: "twice" where no second reading is possible.
    """
    length = len(tokens)
    if not is_read_twice(model, cache, length, how):
        return None
    reading = replace(TWICE, chunk=chunk, seconds=SECONDS if how == "auto" else None)
    ids = mx.array([list(tokens)])
    return TwoReadings(length, read_twice(model, tokenizer, ids, cache, reading))


def most_of_two_readings(
    model: nn.Module,
    cache: Sequence[Any],
    length: int,
    begun: bool,
    chunk: int = CHUNK,
    request: int = REQUEST,
) -> int:
    """The most bytes, between two chunks, of bounded caches while new tokens are read twice.

    Those of the rows, of the weight that each received, and of the queries by which values are
    fitted.

    Args:
        model: The model.
        cache: Empty caches, which know their shares.
        length: The new tokens.
        begun: Whether the caches will hold tokens from before.
        chunk: Tokens that go through the model at once.
        request: Tokens of the request to repeat the text.
    """
    group, every = query_thinning(model, length)
    seen = min(chunk, length) + request
    queries = -(-length // chunk) * -(-seen // every) * group
    most = 0
    for entry in bounded_members(cache):
        if entry.share is None:
            continue
        older = entry.budgets or () if begun else (0,) * entry.share.heads
        rows = [slots + length + NEWEST for slots in older]
        widths = entry.share.widths
        most += bytes_by_stage(entry.resized_settings(rows), widths)[-1]
        most += WORTH * sum(rows) + queries * len(rows) * widths.key * widths.key_size
    return most


def read_prompt(
    model: nn.Module,
    tokenizer: Any,
    tokens: Sequence[int],
    cache: Sequence[Any],
    how: Readings,
    progress: Progress = no_progress,
) -> tuple[int, int]:
    """Read the beginning of new tokens twice if that is worth while; the others are still to come.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        tokens: The new tokens; the last NEWEST are left to the caller.
        cache: The conversation's caches, from `make_prompt_cache`.
        how: As in `two_readings`.
        progress: Called with the tokens done, of which there are two for each token read twice, and
            all of them.

    Returns:
        How many of the tokens were read, and how often: none, and 1, where they are to be read
        once.

    Raises:
        ValueError: As in `two_readings`.
    """
    readings = two_readings(model, tokenizer, tokens[:-NEWEST], cache, how)
    if readings is None:
        return 0, 1
    while readings.step():
        progress(readings.done, 2 * readings.count)
    return readings.count, 2 if readings.is_twice else 1


def read_and_generate(
    model: nn.Module,
    tokenizer: Any,
    tokens: Sequence[int],
    cache: Sequence[Any],
    how: Readings,
    progress: Progress = no_progress,
    **options: Any,
) -> tuple[Iterator[Any], int]:
    """Read new tokens, and generate.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        tokens: The new tokens.
        cache: The conversation's caches, from `make_prompt_cache`.
        how: As in `two_readings`.
        progress: As in `read_prompt`; of tokens read once, mlx-lm tells it.
        options: Further options of mlx-lm's `stream_generate`.

    Returns:
        Its responses, and how often the beginning was read.

    Raises:
        ValueError: As in `two_readings`.
    """
    count, readings = read_prompt(model, tokenizer, tokens, cache, how, progress)
    responses = stream_generate(
        model,
        tokenizer,
        list(tokens[count:]),
        prompt_cache=cache,
        prompt_progress_callback=no_progress if count else progress,
        **options,
    )
    return responses, readings
