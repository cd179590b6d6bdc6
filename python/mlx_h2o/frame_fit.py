"""Fitting a frame: the centres and scales whose packed keys move attention least.

A row of packed keys is cut into levels of equal size, so each of its numbers is wrong by as much
as any other: E e^2 = range(k')^2 / (12 (2^bits - 1)^2), with k' the group's numbers in the frame.
Queries meet the error as q.e = sum_j s_j q_j e_j, and logit n moves the output by p_n (v_n - o), so
that what is lost in expectation is, but for constants,

    sum_n w_n range(k'_n)^2 * sum_j s_j^2 E q_j^2        w_n = sum_q p_qn^2 |v_n - o_q|^2

A channel that queries use deserves a wide part of the range; a row that is looked at much (the
first token's above all, whose key is like no other) must not be torn apart by it. At the minimum
each channel's share of the ranges is its share of the queries' energy. The sum over rows has
corners where another channel becomes the widest, so it is gone down on samples of the rows (Adam,
arXiv 1412.6980).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Rows in a step: half of them drawn by weight, half evenly, as a text has but few that are looked
#: at much, and another text others.
SAMPLE = 256
BY_WEIGHT = 0.5
#: So many come within 0.01 of the least logarithm, from 0.5 above it.
STEPS = 60
#: Of a step, in log scales and in centres by the scale; falls to 0 over the steps.
RATE = 0.05
#: Adam's: how slowly the gradient's mean and square are forgotten.
MEAN_DECAY, SQUARE_DECAY = 0.9, 0.99
#: Widths of groups that rows are packed in, the usual one first.
GROUPS = (64, 32)


@dataclass(frozen=True)
class FrameSample:
    """What a layer's frame is fitted to.

    Attributes:
        keys: As they are cached, `[H, N, D]`.
        weights: What an error of each key's logit costs, `[H, N]`, not below 0.
        energies: E q^2 of each channel, mean over a KV head's queries, `[H, D]`.
    """

    keys: np.ndarray
    weights: np.ndarray
    energies: np.ndarray


def fitted(frame: np.ndarray, sample: FrameSample, centred: bool = True) -> np.ndarray:
    """The frame of least expected error.

    Args:
        frame: Where to begin: centre and scale `[2, H, D]`.
        sample: Rows and queries.
        centred: Whether the centre may be moved.

    Returns:
        Centre and scale `[2, H, D]`, float32.
    """
    H, N, D = sample.keys.shape
    group = next((size for size in GROUPS if D % size == 0), D)
    centre, scale = (part.astype(np.float64) for part in frame)
    # In the first frame all channels are alike, and one rate serves them.
    energies = (sample.energies * scale**2 + np.finfo(np.float32).tiny).reshape(-1, group)
    chances = _chances(sample.weights)
    draw = np.random.default_rng(0)
    at = np.zeros((2, H * D // group, group))  # centre and log scale, from the first frame on
    mean, square = np.zeros_like(at), np.zeros_like(at)
    for step in range(STEPS):
        rows = _drawn(sample.keys, chances, draw)
        rows = (rows - centre[:, None]) / scale[:, None]
        rows = rows.reshape(H, SAMPLE, D // group, group).swapaxes(1, 2)
        slope = _slope(rows.reshape(-1, SAMPLE, group), energies, at)
        mean += (1 - MEAN_DECAY) * (slope - mean)
        square += (1 - SQUARE_DECAY) * (slope**2 - square)
        unbiased = mean / (1 - MEAN_DECAY ** (step + 1))
        size = np.sqrt(square / (1 - SQUARE_DECAY ** (step + 1))) + 1e-8
        at -= RATE * (1 - step / STEPS) * unbiased / size
        at[0] *= centred
    moved, log_scale = (part.reshape(H, D) for part in at)
    return np.stack([centre + scale * moved, scale * np.exp(log_scale)]).astype(np.float32)


def _chances(weights: np.ndarray) -> np.ndarray:
    """How often a row up to each is drawn, `[H, N]`, from 0 to 1."""
    N = weights.shape[-1]
    total = np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    return np.cumsum(BY_WEIGHT * weights / total + (1 - BY_WEIGHT) / N, axis=-1)


def _drawn(keys: np.ndarray, chances: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Some rows of each head `[H, SAMPLE, D]`."""
    at = [np.searchsorted(of, draw.random(SAMPLE) * of[-1]) for of in chances]
    return np.take_along_axis(keys, np.stack(at)[..., None], axis=1)


def _slope(rows: np.ndarray, energies: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Of the expected error's logarithm, by centre and by log scale: `[2, R, d]`.

    Args:
        rows: `[R, n, d]`.
        energies: `[R, d]`.
        at: Centre and log scale `[2, R, d]`.
    """
    R, n, d = rows.shape
    centre, by = at[0], np.exp(-at[1])
    framed = (rows - centre[:, None]) * by[:, None]
    low, high = framed.argmin(axis=-1), framed.argmax(axis=-1)
    least, greatest = (
        np.take_along_axis(framed, of[..., None], axis=-1)[..., 0] for of in (low, high)
    )
    ranges = greatest - least
    first = d * np.arange(R)[:, None]

    def by_channel(of_low: np.ndarray, of_high: np.ndarray) -> np.ndarray:
        """What rows say of the channels that make their ranges, `[R, d]`."""
        told = [np.bincount((first + at).ravel(), of.ravel(), R * d) for at, of in
                ((low, of_low), (high, of_high))]  # fmt: skip
        return (told[0] + told[1]).reshape(R, d)

    squares = np.maximum((ranges**2).sum(axis=-1), np.finfo(np.float32).tiny)[:, None]
    share = by_channel(-ranges * least, ranges * greatest) / squares
    spent = energies * np.exp(2 * at[1])
    spent /= spent.sum(axis=-1, keepdims=True)
    to_centre = by_channel(ranges, -ranges) * by / squares
    return 2 * np.stack([to_centre, spent - share])
