"""Compression of a prompt before any question, by the attention of a second reading.

Source: KVzip (Kim et al. 2025, arXiv 2505.23416). The prompt is read with a full cache; then the
model is asked to repeat it, and reads it a second time, chunk by chunk, with the first reading's
keys and values before it. A row that the second reading attends to strongly, with any query, is one
from which the text can be rebuilt, whatever the question; the best rows of all layers and heads are
kept, and no rows of the second reading. Here the softmax runs over the whole prompt, where the
paper's runs over the chunk alone, dropped rows go into the remainder, and the kept values are then
fitted to what attention to all rows gave (`layer/value_fit.py`). Where minutes do not matter, a
gradient moves the kept rows further (`distillation.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o import _checks
from mlx_h2o.budgets.plan import FEWEST_CHOICES
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.conversation import bounded_entries
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.compression import distillation
from mlx_h2o.compression.rereading import REPEAT, Tell, read_twice
from mlx_h2o.hosts.cache_lists import replaced
from mlx_h2o.models.make import bounded_caches
from mlx_h2o.slots.pins import pinned_from

#: Tokens of the second reading that go through the model at once.
CHUNK = 256
#: The default size, as a share of a prompt's 16-bit cache.
DEFAULT_SIZE = "30%"


def compress_prompt(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    max_bytes: int | str = DEFAULT_SIZE,
    *,
    room: int = 0,
    chunk: int = CHUNK,
    tell: Tell = lambda _: None,
    fitted: bool = True,
    steps: int = 0,
    **settings: Any,
) -> list[Any]:
    """A bounded cache that has read a prompt and kept the rows from which it can be rebuilt.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        prompt: A text, which begins with bos if the model has one; or token ids `[T]`, or `[B, T]`
            of several prompts, which share one layout.
        max_bytes: The size of the rows kept: bytes, "64MB", or "30%" of the prompt's 16-bit cache.
        room: Further slots of each KV head, for the conversation that follows.
        chunk: Tokens that go through the model at once.
        tell: Called with the number of further tokens done; there are two for each of the prompt's,
            and `distillation.tokens_of_work` for the steps.
        fitted: Whether kept values are fitted to the second reading's attention
            (`layer/value_fit.py`); with `spill` they never are.
        steps: Steps of a gradient that moves the kept rows (`compression/distillation.py`), of one
            prompt at a time: each takes some three readings of 128 tokens.
        settings: Other options of `make_prompt_cache`, such as `bits` or `policy`; the policy
            evicts once the room is used up.

    Raises:
        ValueError: The settings do not suit the model, or the prompt is empty; there are several
            prompts, a file of rows or a model without gradients where there are steps.
    """
    _checks.whole("room", room, 0)
    _checks.whole("chunk", chunk, 1)
    tokens = _ids(tokenizer, prompt)
    of_size = ModelSettings.of(max_bytes=max_bytes, context=tokens.shape[1], **settings)
    empty = bounded_caches(model, of_size)
    return compress_into(
        empty,
        model,
        tokenizer,
        tokens,
        room=room,
        chunk=chunk,
        tell=tell,
        fitted=fitted,
        steps=steps,
    )


def compress_into(
    empty: Sequence[Any],
    model: nn.Module,
    tokenizer: Any,
    tokens: mx.array,
    *,
    room: int = 0,
    within: bool = False,
    chunk: int = CHUNK,
    tell: Tell = lambda _: None,
    fitted: bool = True,
    steps: int = 0,
) -> list[Any]:
    """Compress a prompt into existing bounded caches, whose slots are shared out anew.

    Args:
        empty: Caches from `make_prompt_cache`, for the prompt alone; they are used up.
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        tokens: `[B, T]`.
        room: As in `compress_prompt`.
        within: Whether the room is part of the caches' size; else it is added to it.
        chunk: As in `compress_prompt`.
        tell: As in `compress_prompt`.
        fitted: As in `compress_prompt`.
        steps: As in `compress_prompt`.

    Raises:
        ValueError: They are too small, or the model's attention does not come through mlx-h2o; or
            as in `compress_prompt` where there are steps.
    """
    _checks.whole("room", room, 0)
    _checks.whole("chunk", chunk, 1)
    _checks.whole("steps", steps, 0, distillation.MOST_STEPS)
    bounded = cast(list[H2OKVCache], bounded_entries(empty))
    if steps and (tokens.shape[0] > 1 or any(entry.spill is not None for entry in bounded)):
        raise ValueError(
            "steps move the rows of one prompt, and only without spill: a file of rows has them as "
            "they came."
        )
    repeat = tokenizer.encode(REPEAT, add_special_tokens=False)
    # A file of rows has them as they came, and resuming reads them there.
    fits = [fitted and entry.spill is None for entry in bounded]
    reading = read_twice(model, tokens, repeat, chunk, tell, any(fits))
    whole, least = _kept_slots(bounded, room, within, tokens.shape[1])
    worths = [np.asarray(worth.mean(axis=0)) for worth in reading.worths]
    shares = shared_out(worths, whole, least)
    for i, (entry, slots) in enumerate(zip(bounded, shares, strict=True)):
        entry.resize([count + room for count in slots])
        entry.hold(*reading.rows[i], reading.worths[i], reading.rates[i], room)
        if fits[i]:
            entry.fit_values(*reading.rows[i], reading.calls[i])
    if steps:
        distillation.distil(model, tokenizer, tokens, reading.caches, bounded, steps, tell)
    caches = iter(bounded)
    return [replaced(entry, lambda: next(caches)) for entry in reading.caches]


def _kept_slots(
    bounded: Sequence[H2OKVCache], room: int, within: bool, length: int
) -> tuple[int, int]:
    """Slots for the rows of a prompt of `length` tokens, of all KV heads and of each at least.

    Raises:
        ValueError: They are too few.
    """
    policy = bounded[0].policy
    budgets = [slots for entry in bounded for slots in entry.budgets or ()]
    whole = sum(budgets) - (room * len(budgets) if within else 0)
    pinned = pinned_from(bounded[0].pins, policy.sink)
    least = max(policy.least_budget(pinned) + FEWEST_CHOICES - room, policy.sink + pinned + 1)
    if whole < min(least, length) * len(budgets):
        raise ValueError(
            f"{sum(budgets)} slots of {len(budgets)} KV heads are too few to keep {least} rows of "
            f"each, beside room for {room}: give more bytes."
        )
    return whole, least


def _ids(tokenizer: Any, prompt: str | Sequence[int] | mx.array) -> mx.array:
    """Token ids `[B, T]`.

    Raises:
        ValueError: The prompt is empty.
    """
    given = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    tokens = given if isinstance(given, mx.array) else mx.array(list(given))
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if not tokens.size:
        raise ValueError("The prompt is empty.")
    return tokens


def shared_out(worths: Sequence[np.ndarray[Any, Any]], whole: int, least: int) -> list[list[int]]:
    """How many rows each head of each layer keeps: as many as it has among the best of all.

    Args:
        worths: The worths of each layer's rows, `[H, T]`.
        whole: Rows kept in all.
        least: Rows that every head keeps (all, if it has no more).

    Returns:
        Counts `[layers][H]`, `whole` in all unless there are fewer rows.
    """
    heads = np.concatenate(list(worths))  # [all heads, T]
    T = heads.shape[1]
    least = min(least, T)
    free = min(whole, heads.size) - least * len(heads)
    ordered = -np.sort(-heads, axis=1)  # best first; each head keeps its first `least`
    counts = np.full(len(heads), least)
    if free > 0:
        rest = ordered[:, least:].ravel()
        best = np.argsort(-rest, kind="stable")[:free]
        counts += np.bincount(best // (T - least), minlength=len(heads))
    cut = np.cumsum([len(worth) for worth in worths])[:-1]
    return [[int(count) for count in part] for part in np.split(counts, cut)]
