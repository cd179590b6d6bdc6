"""Sampling of one sequence's tokens, keyed by its own seed whatever runs beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from mlx_h2o.serve.protocol import MIN_TEMPERATURE, SEEDS, Body

#: Odd constants that spread the seed and the number of a token over 64 bits (SplitMix64, Steele,
#: Lea and Flood, 2014).
GOLDEN, MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
#: The log-probability reported for a token that cannot come: JSON has no infinity.
LEAST_LOGPROB = -9999.0


@dataclass
class Sampler:
    """Draws the tokens of one sequence.

    Token i is drawn with a key that only the seed and i decide, so other requests change nothing,
    and a sequence that is computed again draws the same tokens.

    Attributes:
        seed: The sequence's seed.
        temperature: The temperature; 0 takes the likeliest token.
        top_p: The share of the mass that is sampled from; 0 takes the likeliest token.
        top_k: The number of likely tokens that are sampled from; 0: all.
        min_p: The least part of the likeliest token's probability.
        processors: mlx-lm's logits processors, which take the tokens so far and logits.
        context: The tokens so far, if there are processors.
    """

    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    processors: list[Any] = field(default_factory=list)
    context: TokenBuffer | None = None

    @classmethod
    def of(cls, body: Body, seed: int, processors: Sequence[Any]) -> Sampler:
        """The sampler of a request.

        Args:
            body: The request's fields.
            seed: The seed of this answer.
            processors: More logits processors, after those of the fields.
        """
        temperature = body.temperature or 0.0
        biases = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
        own = make_logits_processors(
            biases or None,
            *(body.repetition_penalty, _or(body.repetition_context_size, 20)),
            *(body.presence_penalty, _or(body.presence_context_size, 20)),
            *(body.frequency_penalty, _or(body.frequency_context_size, 20)),
        )
        return cls(
            seed,
            0.0 if temperature < MIN_TEMPERATURE else temperature,
            _or(body.top_p, 1.0),
            body.top_k or 0,
            body.min_p or 0.0,
            [*own, *processors],
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0 or self.top_p == 0

    @property
    def is_plain(self) -> bool:
        """Whether the logits' maximum is all that it needs."""
        return self.is_greedy and not self.processors

    def begin(self, tokens: Sequence[int]) -> None:
        """The sequence consists of these tokens, without the one that is read next."""
        self.context = TokenBuffer(list(tokens)) if self.processors else None

    def process(self, token: mx.array, logits: mx.array) -> mx.array:
        """Logits `[1, V]` after the processors.

        Args:
            token: The token that was read to get these logits, `[1]`.
            logits: The logits `[1, V]`.
        """
        if self.context is None:
            return logits
        tokens = self.context.update_and_fetch(token)
        for processor in self.processors:
            logits = processor(tokens, logits)
        return logits

    def draw(self, logprobs: mx.array, number: int) -> mx.array:
        """A token `[1]`.

        Args:
            logprobs: Log-probabilities `[1, V]`.
            number: The number of the token in its answer.
        """
        if self.is_greedy:
            return mx.argmax(logprobs, axis=-1)
        key = mx.random.key(((self.seed + 1) * GOLDEN ^ (number + 1) * MIX) % SEEDS)
        if 0 < self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p:
            logprobs = apply_min_p(logprobs, self.min_p)
        if self.top_k:
            logprobs = apply_top_k(logprobs, self.top_k)
        # Gumbel-max. mx.random.categorical looks a number up in the sum of probabilities, where the
        # last bits of any of them move all tokens that follow.
        noise = mx.random.gumbel(logprobs.shape, key=key)
        return mx.argmax(logprobs * (1 / self.temperature) + noise, axis=-1)


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def likeliest(logprobs: mx.array, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens of `[V]` log-probabilities, likeliest first."""
    if not count:
        return []
    top = mx.argpartition(-logprobs, kth=count - 1)[:count]
    tokens: Any = top.tolist()
    values: Any = logprobs[top].tolist()
    pairs = zip(tokens, map(finite, values), strict=True)
    return sorted(pairs, key=lambda pair: -pair[1])


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return LEAST_LOGPROB if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)


def check_for_model(body: Body, vocabulary: int) -> None:
    """Raise ValueError for sampling fields that a model of so many tokens does not support."""
    if (body.top_k or 0) >= vocabulary:
        raise ValueError(f"top_k must be below the model's {vocabulary} tokens; got {body.top_k}.")
    if body.likely > vocabulary:
        raise ValueError(f"top_logprobs must not exceed the model's {vocabulary} tokens.")
    for token in body.logit_bias or {}:
        if int(token) >= vocabulary:
            raise ValueError(
                f"logit_bias names a token {token}; there are {vocabulary}, from 0 on."
            )
