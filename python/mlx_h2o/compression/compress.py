"""Compression of a prompt before any question, by the attention of a second reading.

Source: KVzip (Kim et al. 2025, arXiv 2505.23416). A row that a second reading attends to strongly,
with any query, is one from which the text can be rebuilt, whatever the question; the best rows are
kept (`twice.py`). Here each head keeps a part of the slots that its profile gives it, the softmax
runs over the whole block, where the paper's runs over the chunk alone, dropped rows go into the
remainder, and kept values are fitted.
Where minutes do not matter, a gradient moves the kept rows further (`distillation.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o import _checks
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.conversation import bounded_entries
from mlx_h2o.compression import distillation
from mlx_h2o.compression.twice import CHUNK, Reading, read_twice
from mlx_h2o.models.make import bounded_caches

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
    tell: distillation.Tell = lambda _: None,
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
        steps: Steps of a gradient that moves the kept rows (`compression/distillation.py`), of one
            prompt at a time: each takes some three readings of 128 tokens.
        settings: Other options of `make_prompt_cache`, such as `bits` or `policy`; the policy
            evicts once the room is used up.

    Raises:
        ValueError: The settings do not suit the model, or the prompt is empty; there are several
            prompts, a file of rows or a model without gradients where there are steps.
    """
    reading = Reading(chunk, room)
    tokens = _ids(tokenizer, prompt)
    of_size = ModelSettings.of(max_bytes=max_bytes, context=tokens.shape[1], **settings)
    cache = bounded_caches(model, of_size)
    compress_into(cache, model, tokenizer, tokens, reading, tell=tell, steps=steps)
    return cache


def compress_into(
    cache: Sequence[Any],
    model: nn.Module,
    tokenizer: Any,
    tokens: mx.array,
    reading: Reading,
    *,
    tell: distillation.Tell = lambda _: None,
    steps: int = 0,
) -> None:
    """Read a prompt twice into existing caches, whose slots are shared out anew.

    Args:
        cache: Caches from `make_prompt_cache`.
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        tokens: `[B, T]`.
        reading: How it is read.
        tell: As in `compress_prompt`.
        steps: As in `compress_prompt`.

    Raises:
        ValueError: They are too small, or the model's attention does not come through mlx-h2o; or
            as in `compress_prompt` where there are steps.
    """
    _checks.whole("steps", steps, 0, distillation.MOST_STEPS)
    bounded = bounded_entries(cache)
    if steps and (tokens.shape[0] > 1 or any(entry.spill is not None for entry in bounded)):
        raise ValueError(
            "steps move the rows of one prompt, and only without spill: a file of rows has them as "
            "they came."
        )
    for done in read_twice(model, tokenizer, tokens, cache, reading):
        tell(done)
    if steps:
        distillation.distil(model, tokenizer, tokens, bounded, steps, tell)


def _ids(tokenizer: Any, prompt: str | Sequence[int] | mx.array) -> mx.array:
    """Token ids `[B, T]`.

    Raises:
        ValueError: The prompt is empty.
    """
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    tokens = ids if isinstance(ids, mx.array) else mx.array(list(ids))
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if not tokens.size:
        raise ValueError("The prompt is empty.")
    return tokens
