"""A whole model within a budget: tokens per second of decoding, and the time to read a prompt.

Everything goes through mlx-lm's own `generate_step`, with its one token of look-ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache

from benchmarks.measuring import Arm, Progress, Samples, in_turns
from mlx_h2o.hosts.cache_lists import replaced
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.loading.load import SAMPLE_TEXT
from mlx_h2o.models.make import make_prompt_cache

DEFAULT = "salient"
FRAMED = "salient, 6 bits in frames"
DISTINCT = "distinct"
H2O = "h2o"
H2O_PACKED = "h2o, 8 bits"
STREAMING = "streaming, no remainder"
WINDOW = "mlx-lm's RotatingKVCache"
PLAIN = "mlx-lm's KVCache"

#: Positions of the beginning that the window keeps.
WINDOW_KEEP = 4
# Tokens before the clock starts again: the previous arm's look-ahead, and a warm-up.
UNTIMED_TOKENS = 2

MakeCache = Callable[[], list[Any]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement.

    Attributes:
        budget: Slots per KV head on average.
        decode_from: Tokens read before the first token is decoded.
        slice_tokens: Tokens that an arm decodes in each turn: few, so that all arms have theirs
            before the machine's load changes.
        slices: Turns in each round of the other measurements.
        prompt: Tokens of the prompt whose reading is timed.
        chunk: Prompt tokens processed at a time.
        prompt_rounds: How often each arm reads the prompt.
    """

    budget: int = 512
    decode_from: int = 2048
    slice_tokens: int = 16
    slices: int = 4
    prompt: int = 4096
    chunk: int = 2048
    prompt_rounds: int = 3


def decode_caches(model: nn.Module, budget: int) -> dict[str, MakeCache]:
    """The caches that decode side by side, by name."""

    def bounded(**settings: Any) -> MakeCache:
        return lambda: make_prompt_cache(model, budget, **settings)

    return {
        DEFAULT: bounded(policy=DEFAULT),
        f"{DEFAULT}, evict_every 16": bounded(policy=f"{DEFAULT}:evict_every=16"),
        FRAMED: bounded(policy=DEFAULT, bits=6),
        DISTINCT: bounded(policy=DISTINCT),
        H2O: bounded(policy="h2o"),
        H2O_PACKED: bounded(policy="h2o", bits=8),
        STREAMING: bounded(policy="streaming", remainder=False),
        WINDOW: lambda: window_cache(model, budget),
    }


def prompt_caches(model: nn.Module, budget: int) -> dict[str, MakeCache]:
    """The caches that read the prompt, by name."""
    return {
        DEFAULT: lambda: make_prompt_cache(model, budget, policy=DEFAULT),
        H2O: lambda: make_prompt_cache(model, budget, policy="h2o"),
        PLAIN: lambda: stock_caches(model),
    }


def window_cache(model: nn.Module, budget: int) -> list[Any]:
    """The model's own caches with plain ones replaced by mlx-lm's sliding window."""
    return [
        replaced(entry, lambda: mlx_lm_cache.RotatingKVCache(budget, keep=WINDOW_KEEP))
        for entry in stock_caches(model)
    ]


def measure_decoding(
    model: nn.Module, tokenizer: Any, sizes: Sizes, rounds: int, progress: Progress | None = None
) -> Samples:
    """Seconds per token of each cache, in interleaved slices with active eviction."""
    prompt = prompt_tokens(tokenizer, sizes.decode_from)
    arms = {
        name: decoding(steps(model, prompt, make(), sizes.chunk), sizes.slice_tokens)
        for name, make in decode_caches(model, sizes.budget).items()
    }
    return in_turns(arms, rounds * sizes.slices, progress=progress)


def measure_prompt(
    model: nn.Module, tokenizer: Any, sizes: Sizes, progress: Progress | None = None
) -> Samples:
    """Seconds from a prompt to its first token with each cache."""
    prompt = prompt_tokens(tokenizer, sizes.prompt)
    arms = {
        name: reading(model, prompt, make, sizes.chunk)
        for name, make in prompt_caches(model, sizes.budget).items()
    }
    return in_turns(arms, sizes.prompt_rounds, progress=progress)


def steps(model: nn.Module, prompt: mx.array, cache: list[Any], chunk: int) -> Iterator[Any]:
    """Read the prompt, then decode endlessly."""
    generated: Iterator[Any] = generate_step(
        prompt, model, max_tokens=-1, prompt_cache=cache, prefill_step_size=chunk
    )
    next(generated)
    return generated


def decoding(generated: Iterator[Any], tokens: int) -> Arm:
    """An arm that decodes the next slice; seconds per token."""

    def arm() -> float:
        for _ in range(UNTIMED_TOKENS):
            next(generated)
        start = time.perf_counter()
        for _ in range(tokens):
            next(generated)
        return (time.perf_counter() - start) / tokens

    return arm


def reading(model: nn.Module, prompt: mx.array, make: MakeCache, chunk: int) -> Arm:
    """An arm that reads the whole prompt into a new cache."""

    def arm() -> float:
        cache = make()
        mx.synchronize()
        start = time.perf_counter()
        first = generate_step(
            prompt, model, max_tokens=1, prompt_cache=cache, prefill_step_size=chunk
        )
        next(first)
        return time.perf_counter() - start

    return arm


def prompt_tokens(tokenizer: Any, count: int) -> mx.array:
    """The first tokens of the bundled text, repeated if it ends."""
    tokens = tokenizer.encode(SAMPLE_TEXT.read_text(encoding="utf-8"))
    return mx.array((tokens * (count // len(tokens) + 1))[:count])
