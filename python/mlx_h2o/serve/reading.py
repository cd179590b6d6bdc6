"""Which parts of a request's prompt are read twice, and what that takes meanwhile.

A prompt is read up to the end of its system prompt, which chats share, then up to its last tokens.
A part that exceeds the slots is read twice (`compression/reading.py`), chunk by chunk between other
requests' tokens. All of its rows are there meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.nn as nn

from mlx_h2o.caches.conversation import bounded_members
from mlx_h2o.caches.most_bytes import most_of_bounded
from mlx_h2o.compression.reading import (
    NEWEST,
    TWICE,
    Readings,
    TwoReadings,
    exceeds_slots,
    most_of_two_readings,
    two_readings,
)
from mlx_h2o.compression.twice import CHUNK, REPEAT, require_readable
from mlx_h2o.serve.prompt import Prompt
from mlx_h2o.serve.ranks import processes
from mlx_h2o.serve.sequence import Sequence as Answer


def parts(prompt: Prompt, first: int) -> list[tuple[int, int]]:
    """The first tokens of a prompt's parts, and one past their last, from a token on."""
    system = max(first, prompt.system)
    return list(pairwise(sorted({first, system, max(system, len(prompt.tokens) - NEWEST)})))


def supported(how: Readings, model: nn.Module, empty: Sequence[Any], prompt: Prompt) -> Readings:
    """How a prompt is read: "auto" is "once" where no second reading is possible.

    Args:
        how: What the client wants.
        model: The model.
        empty: Empty caches with the request's settings.
        prompt: The prompt.

    Raises:
        ValueError: "twice" where no second reading is possible, however long the prompt is.
    """
    if how == "once":
        return how
    longest = max((end - first for first, end in parts(prompt, 0)), default=1)
    try:
        if processes() > 1:
            raise ValueError("Prompts are read once where several processes share the model.")
        require_readable(model, empty, longest if exceeds_slots(empty, longest) else 1, TWICE)
    except ValueError:
        if how == "twice":
            raise
        return "once"
    return how


def most_while_read(one: Answer, prefix: int) -> int:
    """The most bytes that an answer's caches take while its prompt is read, or later.

    Args:
        one: The answer.
        prefix: The prompt's tokens that caches hold already.
    """
    plan, served = one.plan, one.served
    lengths = [end - first for first, end in parts(one.prompt, prefix)]
    long = [count for count in lengths if exceeds_slots(plan.empty, count)]
    if one.reading == "once" or not long:
        return plan.need
    chunk = min(CHUNK, served.chunk)
    begun = prefix > 0 or len(lengths) > 1
    others = plan.need - most_of_bounded(bounded_members(plan.empty))
    request = len(served.tokenizer.encode(REPEAT, add_special_tokens=False))
    most = most_of_two_readings(served.model, plan.empty, max(long), begun, chunk, request)
    return max(plan.need, others + most)


def begin(one: Answer) -> TwoReadings | None:
    """Two readings of the part that begins after the tokens read so far; None if it needs none.

    Raises:
        ValueError: The caches can read no prompt twice.
    """
    first = len(one.tokens)
    if one.reading == "once" or first not in (one.prefix, one.prompt.system):
        return None
    end = next((end for _, end in parts(one.prompt, first)), first)
    new, served = one.prompt.tokens[first:end], one.served
    chunk = min(CHUNK, served.chunk)
    return two_readings(served.model, served.tokenizer, new, one.cache or (), one.reading, chunk)
