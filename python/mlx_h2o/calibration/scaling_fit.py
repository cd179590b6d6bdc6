"""Fitting key scaling (`Frame`): the centres and scales whose packed keys move attention least.

A row of packed keys is cut into levels of equal size, so each of its numbers has the same error:
E e^2 = range(k')^2 / (12 (2^bits - 1)^2), with k' the group's scaled numbers. A query adds the
error to a logit as q.e = sum_j s_j q_j e_j, and logit n moves the output by p_n (v_n - o), so that
the expected loss is, up to constants,

    sum_n w_n range(k'_n)^2 * sum_j s_j^2 E q_j^2        w_n = sum_q p_qn^2 |v_n - o_q|^2

A channel that queries use deserves a wide part of the range; a row with much attention (above all
the first token's, whose key is like no other) must not get a wide range from it. At the minimum
each channel's share of the ranges is its share of the queries' energy. The sum over rows has
corners where another channel becomes the widest, so it is minimised by descent on samples of the
rows (Adam, arXiv 1412.6980).

The queries' use of a text's keys is measured here too: their energy in each channel, and the cost
of an error in each logit.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.attention.ops import scaled_dot_product_attention_with_scores
from mlx_h2o.hosts.recorder import full_attention
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import group_size_for

#: Rows of a step: half of them drawn by weight, half evenly, since few rows of a text get much
#: attention, and another text has others.
SAMPLE = 256
BY_WEIGHT = 0.5
#: Steps: this many reach the least logarithm within 0.01, from 0.5 above it.
STEPS = 60
#: Rate of a step, in log scales and in centres over the scale; falls to 0 over the steps.
RATE = 0.05
#: The part of the gradient's mean and square that Adam keeps: slopes of small samples are rough.
KEPT = (0.9, 0.99)
#: Added to the root of the square in a step's denominator.
EPSILON = 1e-8
#: The value used for channels without queries and rows without a range.
LEAST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class FrameSample:
    """The sample that a layer's key scaling is fitted to, float32.

    Attributes:
        keys: Keys as cached, `[H, N, D]`.
        weights: The cost of an error in each key's logit, `[H, N]`, not below 0.
        energies: E q^2 of each channel, mean over a KV head's queries, `[H, D]`.
    """

    keys: mx.array
    weights: mx.array
    energies: mx.array


def fitted(frame: Frame, sample: FrameSample, centred: bool = True) -> Frame:
    """The key scaling of least expected error.

    Args:
        frame: Key scaling to start from.
        sample: Rows and queries.
        centred: Whether the centre may be moved.
    """
    H, _, D = sample.keys.shape
    group = group_size_for(D) or D
    centre, scale = (np.array(array) for array in frame.arrays)
    # With the first scaling all channels are alike, and one rate fits them.
    energies = (np.array(sample.energies) * scale**2).reshape(-1, group)
    drawn = _drawn(np.array(sample.weights))
    rows = np.array(mx.take_along_axis(sample.keys, mx.array(drawn)[..., None], axis=1))
    rows = (rows - centre[:, None]) / scale[:, None]
    rows = rows.reshape(H, STEPS, SAMPLE, D // group, group).transpose(1, 0, 3, 2, 4)
    scaling = np.zeros((2, H * D // group, group), np.float32)  # centre and log scale
    mean, square = np.zeros_like(scaling), np.zeros_like(scaling)
    for step, of_step in enumerate(rows.reshape(STEPS, -1, SAMPLE, group)):
        slopes = _slopes(scaling[0], scaling[1], of_step, energies)
        slopes[0] *= centred
        mean += (1 - KEPT[0]) * (slopes - mean)
        square += (1 - KEPT[1]) * (slopes**2 - square)
        unbiased = [1 - decay ** (step + 1) for decay in KEPT]
        rate = RATE * (1 - step / STEPS)
        scaling -= rate * (mean / unbiased[0]) / (np.sqrt(square / unbiased[1]) + EPSILON)
    moved, log_scale = (each.reshape(H, D) for each in scaling)
    return Frame(mx.array(centre + scale * moved), mx.array(scale * np.exp(log_scale)))


def _drawn(weights: np.ndarray) -> np.ndarray:
    """Rows drawn by weights `[H, N]`, one step after the other, `[H, STEPS * SAMPLE]`."""
    H, N = weights.shape
    draw = np.random.default_rng(0)
    out = np.empty((H, STEPS * SAMPLE), np.int32)
    for head, of_rows in enumerate(weights.astype(np.float64)):
        chances = BY_WEIGHT * of_rows / max(of_rows.sum(), LEAST) + (1 - BY_WEIGHT) / N
        up_to = np.cumsum(chances)
        out[head] = np.searchsorted(up_to, draw.random(STEPS * SAMPLE) * up_to[-1])
    return out


def _slopes(
    centre: np.ndarray, log_scale: np.ndarray, rows: np.ndarray, energies: np.ndarray
) -> np.ndarray:
    """Slopes of the expected error's logarithm by centre and log scale, `[2, R, d]`.

    A row's range moves with its widest channels alone, so the slopes are sums over rows of two
    channels' terms.

    Args:
        centre: Centre, relative to the first scaling, `[R, d]`.
        log_scale: Logarithm of the scale, relative to the first scaling, `[R, d]`.
        rows: Keys with the first scaling, `[R, n, d]`.
        energies: Energies of the queries for those keys, `[R, d]`.
    """
    R, n, d = rows.shape
    inverse = np.exp(-log_scale)
    framed = rows * inverse[:, None]
    framed -= (centre * inverse)[:, None]
    spent = energies * np.exp(2 * log_scale)
    out = np.zeros((2, R, d), np.float32)
    out[1] = 2 * spent / np.maximum(spent.sum(axis=-1, keepdims=True), LEAST)
    flat = framed.reshape(R * n, d)
    edges = flat.argmax(axis=-1), flat.argmin(axis=-1)
    at = np.arange(R * n)
    highest, lowest = (flat[at, edge] for edge in edges)
    ranges = (highest - lowest).reshape(R, n)
    # d log sum r^2 = 2 sum r dr / sum r^2, and a scaled number x falls by 1/s with its centre and
    # by x with its log scale.
    shares = 2 * ranges / np.maximum((ranges**2).sum(axis=-1, keepdims=True), LEAST)
    group = np.repeat(np.arange(R) * d, n)
    for sign, edge, value in ((1, edges[0], highest), (-1, edges[1], lowest)):
        moved = sign * shares.ravel()
        for of, weights in enumerate((moved, moved * value)):
            sums = np.bincount(group + edge, weights, R * d).reshape(R, d)
            out[of] -= sums * inverse if of == 0 else sums
    return out


#: Queries whose masses are held at a time, `[B, Hq, block, T]`.
QUERY_BLOCK = 128
#: Every fourth query is enough to measure the energies and the keys' weights: rows are drawn by
#: these, and another draw changes the scaling as much.
QUERY_STEP = 4


@dataclass(frozen=True)
class KeyUse:
    """The queries' use of the keys of the same tokens.

    Attributes:
        queries: Every fourth query, for unscaled keys, `[B, Hq, T / 4, D]`.
        weights: The cost of an error in each key's logit, `[B, H, T]` float32: with p_n the
            softmax, a logit moves the output by p_n (v_n - o), so it is sum_q p_qn^2 |v_n - o_q|^2,
            summed over those queries of a KV head.
    """

    queries: mx.array
    weights: mx.array

    @classmethod
    def attended(
        cls, call: AttentionCall, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, KeyUse]:
        """The output `[B, Hq, T, Dv]` of a causal call over a whole text, and its use of the keys.

        Args:
            call: Queries `[B, Hq, T, D]`.
            keys: `[B, H, T, D]`.
            values: `[B, H, T, Dv]`.
        """
        B, H, T, _ = keys.shape
        group = call.q.shape[1] // H
        out = full_attention(call.q, keys, values, call.scale, call.sinks, call.softcap)
        queries, outs = call.q[:, :, ::QUERY_STEP], out[:, :, ::QUERY_STEP].astype(mx.float32)
        by_query_head = mx.repeat(values.astype(mx.float32), group, axis=1)
        total = mx.zeros((B, H * group, T))
        for first in range(0, queries.shape[2], QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, queries.shape[2])
            end = (last - 1) * QUERY_STEP + 1
            visible = by_query_head[:, :, :end]
            at = mx.arange(first, last)[:, None] * QUERY_STEP
            _, logits, lse = scaled_dot_product_attention_with_scores(
                queries[:, :, first:last],
                keys[:, :, :end],
                values[:, :, :end],
                scale=call.scale,
                mask=mx.arange(end) <= at,
                sinks=call.sinks,
                softcap=call.softcap,
            )
            squares = mx.exp(2 * (logits - lse[..., None])).swapaxes(-1, -2)
            # |v - o|^2 = |v|^2 - 2 v.o + |o|^2, summed over the queries.
            o = outs[:, :, first:last]
            of_queries = mx.square(o).sum(axis=-1, keepdims=True)
            sums = squares @ mx.concatenate([o, of_queries, mx.ones_like(of_queries)], axis=-1)
            cost = mx.square(visible).sum(axis=-1) * sums[..., -1] + sums[..., -2]
            total[:, :, :end] += cost - 2 * (visible * sums[..., :-2]).sum(axis=-1)
            mx.eval(total)
        weights = total.reshape(B, H, group, T).sum(axis=2)
        return out, cls(queries, mx.maximum(weights, 0))
