"""Confidence intervals of a mean over samples, by resampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

DRAWS = 10_000
LEVEL = 0.95


def mean_interval(
    values: Sequence[float], level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """The confidence interval of the mean: percentiles of the means of resampled values.

    Efron's percentile bootstrap (1979). A single value has no interval, and is returned twice.

    Args:
        values: One value for each sample; differences of pairs if two runs saw the same samples.
        level: The confidence level.
        draws: The number of resamplings.
        seed: The same seed gives the same interval.
    """
    x = np.asarray(values, np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(x), (draws, len(x)))
    tail = 50 * (1 - level)
    low, high = np.percentile(x[drawn].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)


def loss_interval(
    nll: Sequence[float], full: Sequence[float], level: float = LEVEL
) -> tuple[float, float]:
    """The interval of a perplexity's loss against another's over the same samples, as shares.

    Args:
        nll: Nats per token of each sample.
        full: Nats per token of each sample with the full cache.
        level: The confidence level.
    """
    differences = [ours - theirs for ours, theirs in zip(nll, full, strict=True)]
    low, high = mean_interval(differences, level)
    return math.expm1(low), math.expm1(high)
