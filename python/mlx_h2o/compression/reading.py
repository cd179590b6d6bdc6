"""How a conversation's prompt is read: once, or twice where eviction would cost more than time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o._progress import Progress, no_progress
from mlx_h2o.caches.conversation import bounded_members
from mlx_h2o.compression.twice import Reading, observable, read_twice

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


def is_read_twice(cache: Sequence[Any], length: int, how: Readings) -> bool:
    """Whether so many new tokens are read twice into a cache: if some would be evicted.

    Args:
        cache: The conversation's caches.
        length: The new tokens.
        how: What the caller wants.
    """
    members = bounded_members(cache)
    if how == "once" or not members:
        return False
    budgets = [slots for entry in members for slots in entry.budgets or ()]
    # A short turn after a long one is read once: what a second reading would choose is few rows.
    return members[0].offset + length > sum(budgets) / max(len(budgets), 1) < length


def read_prompt(
    model: nn.Module,
    tokenizer: Any,
    tokens: Sequence[int],
    cache: Sequence[Any],
    how: Readings,
    progress: Progress = no_progress,
) -> int:
    """Read the beginning of new tokens twice if that is worth while; the others are still to come.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        tokens: The new tokens; at least the last one is left to the caller.
        cache: The conversation's caches, from `make_prompt_cache`.
        how: "once", "twice" or "auto". Where the model or the settings allow no second reading,
            "auto" reads once.
        progress: Called with the tokens done, of which there are two for each token read twice, and
            all of them.

    Returns:
        How many of the tokens were read; 0 where they are to be read once.

    Raises:
        ValueError: "twice" where no second reading is possible.
    """
    if not is_read_twice(cache, len(tokens) - NEWEST, how):
        return 0
    if how == "auto":
        if len(tokens) > LONGEST:
            return 0
        try:
            observable(model, cache)
        except ValueError:
            return 0
    seconds = SECONDS if how == "auto" else None
    reading = Reading(room=NEWEST, within=True, seconds=seconds)
    count, done = len(tokens) - NEWEST, 0
    for more in read_twice(model, tokenizer, mx.array([list(tokens[:count])]), cache, reading):
        done += more
        progress(done, 2 * count)
    return count
