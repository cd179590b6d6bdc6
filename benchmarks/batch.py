"""A batch of conversations that decode side by side in mlx-lm's own BatchGenerator."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as mlx_lm_cache

from benchmarks.measuring import Arm, Progress, Samples, in_turns
from benchmarks.model import UNTIMED_TOKENS, MakeCache, prompt_tokens
from mlx_h2o.hosts.cache_lists import entries, replaced
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.models.make import make_prompt_cache

DEFAULT = "default policy"
H2O = "h2o"
STREAMING = "streaming, no remainder"
WINDOW = "mlx-lm's own batch"

# More tokens than anyone decodes: the arms never end by themselves.
NO_END = 1 << 30


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a measurement.

    Attributes:
        streams: Conversations in a batch.
        budget: Slots per KV head on average.
        prompt: Tokens read before the first token is decoded.
        chunk: Prompt tokens processed at a time.
        slice_steps: Steps of a batch in each turn.
    """

    streams: int = 8
    budget: int = 256
    prompt: int = 512
    chunk: int = 512
    slice_steps: int = 8


def batch_caches(model: nn.Module, budget: int) -> dict[str, MakeCache]:
    """The caches of one conversation, by the batch's name; mlx-lm's hold as many tokens as ours."""
    default = make_prompt_cache(model, budget)
    heads = [slots for _, entry in entries(default) for slots in getattr(entry, "budgets", [])]
    each = round(sum(heads) / len(heads))

    def window() -> list[Any]:
        return [
            replaced(entry, lambda: mlx_lm_cache.RotatingKVCache(each))
            for entry in stock_caches(model)
        ]

    return {
        DEFAULT: lambda: make_prompt_cache(model, budget),
        H2O: lambda: make_prompt_cache(model, budget, policy="h2o"),
        STREAMING: lambda: make_prompt_cache(model, budget, policy="streaming", remainder=False),
        WINDOW: window,
    }


def measure(
    model: nn.Module,
    tokenizer: Any,
    sizes: BatchSizes,
    rounds: int,
    progress: Progress | None = None,
) -> Samples:
    """Seconds per step of each batch, in interleaved slices with active eviction."""
    whole: Any = prompt_tokens(tokenizer, sizes.prompt + 16 * sizes.streams).tolist()
    prompts = [whole[16 * i : 16 * i + sizes.prompt] for i in range(sizes.streams)]
    arms = {
        name: _decoding(_started(model, prompts, make, sizes), sizes.slice_steps)
        for name, make in batch_caches(model, sizes.budget).items()
    }
    return in_turns(arms, rounds, progress=progress)


def _started(
    model: nn.Module, prompts: list[list[int]], make: MakeCache, sizes: BatchSizes
) -> BatchGenerator:
    """A batch all of whose sequences decode."""
    generator = BatchGenerator(
        model,
        max_tokens=NO_END,
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
        prefill_step_size=sizes.chunk,
    )
    generator.insert(prompts, caches=[make() for _ in prompts])
    while len(generator.next()[1]) < len(prompts):
        mx.clear_cache()
    return generator


def _decoding(generator: BatchGenerator, steps: int) -> Arm:
    """An arm that decodes the next slice; seconds per step of the whole batch."""

    def arm() -> float:
        for _ in range(UNTIMED_TOKENS):
            generator.next()
        start = time.perf_counter()
        for _ in range(steps):
            generator.next()
        return (time.perf_counter() - start) / steps

    return arm
