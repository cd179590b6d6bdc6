"""Perplexity as in a conversation: token by token, through the cache, with active eviction.

mlx-lm's own perplexity runs whole sequences without a cache and so cannot measure eviction. The
loss against the full cache has an interval by paired bootstrap over the samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits, bytes_of
from mlx_h2o.evaluate.measures.base import Measure, Result, Results, signed
from mlx_h2o.evaluate.methods import Method
from mlx_h2o.evaluate.reader import Reader, Tell
from mlx_h2o.evaluate.report import Curves, Section, Table
from mlx_h2o.evaluate.side_by_side import side_by_side
from mlx_h2o.hosts.loaded import logits_of

DRAWS = 10_000
LEVEL = 0.95

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
            "shorter samples."
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
        """The relative loss against another run over the same samples (0.05 is +5 %)."""
        return self.value / full.value - 1

    def error_against(self, full: Perplexity) -> float | None:
        """Standard error of the loss over the samples, paired by sample; None for one sample."""
        worse = self._differences(full)
        return statistics.stdev(worse) / len(worse) ** 0.5 if len(worse) > 1 else None

    def interval_against(self, full: Perplexity) -> tuple[float, float]:
        """The loss's confidence interval, by paired bootstrap over the samples."""
        low, high = mean_interval(self._differences(full))
        return math.expm1(low), math.expm1(high)

    def _differences(self, full: Perplexity) -> list[float]:
        return [ours - theirs for ours, theirs in zip(self.nll, full.nll, strict=True)]


def mean_interval(
    values: Sequence[float], level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """The confidence interval of the mean: percentiles of the means of resampled values.

    Efron's percentile bootstrap (1979). A single value has no interval, and is returned twice.

    Args:
        values: One value for each sample; differences of pairs if two runs read the same samples.
        level: The confidence level.
        draws: The number of resamplings.
        seed: The same seed gives the same interval.
    """
    x = np.asarray(values, np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(x), (draws, len(x)))
    tail = 50 * (1 - level)
    low, high = np.percentile(x[drawn].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)


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
    logits = logits_of(model, samples[:, :prefill], cache)[:, -1]
    total = mx.zeros(B)
    for i in range(prefill, T):
        total = total + nn.losses.cross_entropy(logits.astype(mx.float32), samples[:, i])
        if i + 1 < T:
            logits = logits_of(model, samples[:, i : i + 1], cache)[:, -1]
        mx.eval(total, logits)
        if progress:
            progress(i + 1)
    return Perplexity(cast(list[float], (total / (T - prefill)).tolist()))


@dataclass(frozen=True)
class PerplexityMeasure(Measure):
    """Samples of the text, evenly spaced, each token after the prefill scored as it comes.

    Attributes:
        samples: The number of samples.
        length: Tokens of each sample.
        prefill: Tokens given at once at the beginning; they are not scored.

    Raises:
        ValueError: No token is scored.
    """

    samples: int = 10
    length: int = 512
    prefill: int = 32

    name = "perplexity"
    briefly = "loss of perplexity"
    shares = True

    def __post_init__(self) -> None:
        if min(self.samples, self.length, self.prefill) < 1:
            raise ValueError("perplexity: samples, length and prefill must be at least 1.")
        if self.prefill >= self.length:
            raise ValueError("perplexity: prefill must leave tokens to score: less than length.")

    def tokens(self) -> int:
        return self.length

    def work(self) -> int:
        return self.samples * self.length

    def passes(self) -> int:
        return self.length - self.prefill

    def of(self, reader: Reader, method: Method, tell: Tell) -> Result:
        return self.of_all(reader, [method], tell)[0]

    def of_all(self, reader: Reader, methods: Sequence[Method], tell: Tell) -> list[Result]:
        n = self.samples
        samples = samples_of(reader.tokens, n, self.length, reader.tokenizer.bos_token_id)
        caches = [method.make(reader.model, self.length) for method in methods]
        before = 0

        def progress(position: int) -> None:
            nonlocal before
            tell(len(caches) * n * (position - before))
            before = position

        nll = perplexity(
            reader.model,
            side_by_side(caches),
            mx.tile(samples, (len(caches), 1)),
            prefill=self.prefill,
            progress=progress,
        ).nll
        results = []
        for i, (method, cache) in enumerate(zip(methods, caches, strict=True)):
            count = bytes_in_16_bits if method.in_16_bits else bytes_of
            results.append({"nll": nll[i * n : (i + 1) * n], "nbytes": count(cache, n)})
        return results

    def brief(self, result: Result, full: Result) -> str:
        ours, theirs = Perplexity(result["nll"]), Perplexity(full["nll"])
        error = ours.error_against(theirs)
        loss = f"{100 * ours.loss_against(theirs):+.2f}"
        return f"{loss} ± {100 * error:.2f} %" if error else f"{loss} %"

    def section(self, results: Results) -> Section:
        full = Perplexity(results[0][1]["nll"])
        rows = []
        for method, result in results:
            own = Perplexity(result["nll"])
            low, high = own.interval_against(full)
            loss = self.brief(result, results[0][1]), f"{signed(low)} to {signed(high)}"
            rows.append(
                (
                    method.name,
                    f"{own.value:.2f}",
                    *(("", "") if method is results[0][0] else loss),
                    f"{result['nbytes']:,}",
                    f"{result['nbytes'] / results[0][1]['nbytes']:.1%}",
                )
            )
        columns = ("cache", "perplexity", "loss", f"{LEVEL:.0%} interval", "KV bytes", "of full")
        return Section(
            "Perplexity",
            f"{self.samples} samples of {self.length} tokens, one token at a time after the first "
            f"{self.prefill}. The loss is against the full cache, with its standard error; the "
            "interval is its paired bootstrap over the samples.",
            [Table("", columns, rows)],
            [self._curves(results)],
        )

    def _curves(self, results: Results) -> Curves:
        """The loss by bytes, one line for each cache measured at several sizes."""
        full = results[0][1]
        points: dict[str, dict[float, tuple[float, tuple[float, float]]]] = {}
        for method, result in results:
            if not method.keeps_all:
                own, theirs = Perplexity(result["nll"]), Perplexity(full["nll"])
                low, high = own.interval_against(theirs)
                at = method.share or result["nbytes"] / full["nbytes"]
                loss = 100 * own.loss_against(theirs), (100 * low, 100 * high)
                points.setdefault(method.label, {})[at] = loss
        x = sorted({at for line in points.values() for at in line})
        return Curves(
            "Loss of perplexity by bytes",
            x,
            {
                name: [line[at][0] if at in line else None for at in x]
                for name, line in points.items()
            },
            "share of the full cache's bytes",
            "perplexity above the full cache's, %",
            {
                name: [line[at][1] if at in line else None for at in x]
                for name, line in points.items()
            },
            logarithmic=True,
        )
