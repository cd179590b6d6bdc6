"""Perplexity as in a conversation: token by token, through the cache, with active eviction.

mlx-lm's own perplexity runs whole sequences without a cache and so cannot measure eviction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

#: Called with the number of tokens processed so far (of one sample).
Progress = Callable[[int], None]


def samples_of(tokens: Sequence[int], count: int, length: int, bos: int | None) -> mx.array:
    """Evenly spaced samples of a text, `[count, length]`, each beginning with bos if there is one.

    Args:
        tokens: The text's tokens.
        count: The number of samples.
        length: Tokens of each.
        bos: The token that begins each sample, or None.

    Raises:
        ValueError: The text is shorter than one sample.
    """
    body = length - (bos is not None)
    if len(tokens) < body:
        raise ValueError(
            f"The text has {len(tokens)} tokens and a sample needs {body}: give a longer text, or "
            "fewer --tokens."
        )
    starts = [round(i * (len(tokens) - body) / max(count - 1, 1)) for i in range(count)]
    first = [] if bos is None else [bos]
    return mx.array([[*first, *tokens[start : start + body]] for start in starts])


@dataclass
class Perplexity:
    """The mean negative log-likelihood of each sample, nats per token `[samples]`."""

    nll: list[float]

    @property
    def value(self) -> float:
        """exp of the mean over all samples."""
        return math.exp(statistics.fmean(self.nll))

    def loss_against(self, full: Perplexity) -> float:
        """The loss against another run over the same samples, as a share (0.05 is +5 %)."""
        return self.value / full.value - 1

    def error_against(self, full: Perplexity) -> float | None:
        """Standard error of the loss over the samples, paired by sample; None for one sample."""
        worse = [mine - theirs for mine, theirs in zip(self.nll, full.nll, strict=True)]
        return statistics.stdev(worse) / len(worse) ** 0.5 if len(worse) > 1 else None


def perplexity(
    model: nn.Module,
    cache: list[Any],
    samples: mx.array,
    *,
    prefill: int,
    progress: Progress | None = None,
) -> Perplexity:
    """Feed samples token by token after a short prefill and score every token after it.

    Args:
        model: An mlx-lm model.
        cache: An empty cache; the samples go through it side by side, as a batch of equal lengths.
        samples: `[B, T]` token ids.
        prefill: Tokens given at once at the beginning; they are not scored.
        progress: Called with the number of tokens processed so far, of one sample.
    """
    B, T = samples.shape
    logits = model(samples[:, :prefill], cache=cache)[:, -1]
    total = mx.zeros(B)
    for i in range(prefill, T):
        total = total + nn.losses.cross_entropy(logits.astype(mx.float32), samples[:, i])
        if i + 1 < T:
            logits = model(samples[:, i : i + 1], cache=cache)[:, -1]
        mx.eval(total, logits)
        if progress:
            progress(i + 1)
    return Perplexity(cast(list[float], (total / (T - prefill)).tolist()))
