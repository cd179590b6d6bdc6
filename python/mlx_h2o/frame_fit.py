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

import mlx.core as mx
import numpy as np
from mlx.optimizers import Adam, linear_schedule

from mlx_h2o.frame import Frame
from mlx_h2o.packed import group_size_for

#: Rows in a step: half of them drawn by weight, half evenly, as a text has but few that are looked
#: at much, and another text others.
SAMPLE = 256
BY_WEIGHT = 0.5
#: So many come within 0.01 of the least logarithm, from 0.5 above it.
STEPS = 60
#: Of a step, in log scales and in centres by the scale; falls to 0 over the steps.
RATE = 0.05
#: How much of the gradient's mean and square Adam keeps: slopes of small samples are rough.
KEPT = [0.9, 0.99]
#: What channels without queries and rows without a range are taken to have.
LEAST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class FrameSample:
    """What a layer's frame is fitted to, float32.

    Attributes:
        keys: As they are cached, `[H, N, D]`.
        weights: What an error of each key's logit costs, `[H, N]`, not below 0.
        energies: E q^2 of each channel, mean over a KV head's queries, `[H, D]`.
    """

    keys: mx.array
    weights: mx.array
    energies: mx.array


def fitted(frame: Frame, sample: FrameSample, centred: bool = True) -> Frame:
    """The frame of least expected error.

    Args:
        frame: Where to begin.
        sample: Rows and queries.
        centred: Whether the centre may be moved.
    """
    H, _, D = sample.keys.shape
    group = group_size_for(D) or D
    centre, scale = frame.arrays
    # In the first frame all channels are alike, and one rate serves them.
    energies = (sample.energies * mx.square(scale)).reshape(-1, group)
    found = {name: mx.zeros((H * D // group, group)) for name in ("centre", "log_scale")}
    optimizer = Adam(linear_schedule(RATE, 0, STEPS), betas=KEPT, bias_correction=True)
    for drawn in _drawn(np.array(sample.weights)):
        rows = mx.take_along_axis(sample.keys, mx.array(drawn)[..., None], axis=1)
        rows = (rows - centre[:, None]) / scale[:, None]
        rows = rows.reshape(H, SAMPLE, D // group, group).swapaxes(1, 2)
        slopes = _SLOPES(found, rows.reshape(-1, SAMPLE, group), energies)
        slopes["centre"] *= centred
        found = optimizer.apply_gradients(slopes, found)
        mx.eval(found, optimizer.state)
    moved, log_scale = (found[name].reshape(H, D) for name in ("centre", "log_scale"))
    return Frame(centre + scale * moved, scale * mx.exp(log_scale))


def _drawn(weights: np.ndarray) -> np.ndarray:
    """Which rows each step takes, `[STEPS, H, SAMPLE]`, by their weights `[H, N]`."""
    H, N = weights.shape
    draw = np.random.default_rng(0)
    out = np.empty((H, STEPS * SAMPLE), np.int32)
    for head, of_rows in enumerate(weights.astype(np.float64)):
        chances = BY_WEIGHT * of_rows / max(of_rows.sum(), LEAST) + (1 - BY_WEIGHT) / N
        up_to = np.cumsum(chances)
        out[head] = np.searchsorted(up_to, draw.random(STEPS * SAMPLE) * up_to[-1])
    return out.reshape(H, STEPS, SAMPLE).swapaxes(0, 1)


def _expected_error(found: dict[str, mx.array], rows: mx.array, energies: mx.array) -> mx.array:
    """Its logarithm, summed over the groups.

    Args:
        found: Centre and log scale `[R, d]`, from the first frame on.
        rows: In the first frame, `[R, n, d]`.
        energies: Of queries as they meet those, `[R, d]`.
    """
    framed = (rows - found["centre"][:, None]) * mx.exp(-found["log_scale"])[:, None]
    ranges = framed.max(axis=-1) - framed.min(axis=-1)
    spent = energies * mx.exp(2 * found["log_scale"])
    of_groups = mx.stack([mx.square(ranges).sum(axis=-1), spent.sum(axis=-1)])
    return mx.log(mx.maximum(of_groups, LEAST)).sum()


_SLOPES = mx.grad(_expected_error)
