"""Transform coding of KV rows with unequal bits: how it is fitted, and what it does to a row.

The Fisher metric of a row's error, F = E g g' with g the gradient of log p(y) by the row and y
drawn from the model's own predictions, says in nats what each direction of a row is worth: an error
e costs 1/2 e' F e. A static transform y = (x - mu) F^(1/2) U makes that 1/2 |e_y|^2 and puts the
variance of y into few channels (U: eigenvectors of F^(1/2) C F^(1/2), C the covariance). Bits go to
channels where they save most nats, over all heads, keys and values together. Steps are static; a
row has a gain of 3 bits, 2^(j/2 - 1), for keys and for values.

Variants say what is transformed:

    pre     keys before RoPE, values
    postm   keys after RoPE less their mean before RoPE, which is turned to the row's position
    joint   as pre, and values less what the decoded key before RoPE foretells (ridge regression)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o.attention.backends.reference import attention_with_scores
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.hosts.recorder import LookingCache, Watcher, looked_through
from mlx_h2o.slots.rope import Rope

VARIANTS = PRE, POSTM, JOINT = "pre", "postm", "joint"
#: Tokens at the beginning of a text that are left out: their rows are like no others, and are
#: stored in another way.
SINK = 4
#: Bits of a channel, and those for blocks of channels that kernels read at once.
ANY_WIDTH = (0, 1, 2, 3, 4, 5, 6, 7)
BLOCK_WIDTHS = (0, 1, 2, 3, 4, 6, 8)
GAINS = 2.0 ** (np.arange(8) / 2 - 1)
GAIN_BITS = 3
#: Added to the metric and to the ridge regression, as a part of the mean of the diagonal.
RIDGE = 1e-3
#: The part of a row's weight that follows its gradient; the rest is even.
BY_GRADIENT = 0.5
#: Rows of a head to which steps are fitted.
STEP_ROWS = 1000
#: Steps of least squared error for a Gaussian, in deviations, from 1 bit on (Max 1960), and factors
#: that are tried on them; then factors in each round of gains and steps.
GAUSSIAN_STEPS = (1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
FACTORS = (0.55, 0.65, 0.75, 0.85, 0.95, 1.05, 1.2, 1.35, 1.5, 1.8, 2.2)
NEAR_FACTORS = (0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.12, 1.25, 1.4)
ROUNDS = 3


class LayerRows(NamedTuple):
    """Rows of one layer over a text, and the gradients of the predictions by them, float32.

    Attributes:
        keys: Keys as cached, `[H, N, D]`.
        values: `[H, N, D]`.
        key_slopes: `[H, N, D]`.
        value_slopes: `[H, N, D]`.
        positions: `[N]`.
    """

    keys: np.ndarray
    values: np.ndarray
    key_slopes: np.ndarray
    value_slopes: np.ndarray
    positions: np.ndarray


class _Nudged(LookingCache):
    """A looking cache that adds something to its layer's rows, by operations with gradients."""

    knows_softcap = True

    def __init__(self, nudge: Sequence[mx.array], rows: list[mx.array]):
        self.nudge, self.rows = nudge, rows

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        self.rows += [keys, values]
        out, _, _ = attention_with_scores(
            *(call.q, keys + self.nudge[0], values + self.nudge[1]),
            scale=call.scale,
            mask="causal",
            sinks=call.sinks,
            softcap=call.softcap,
        )
        return out.astype(call.q.dtype)


def rows_with_slopes(
    model: nn.Module, windows: Sequence[mx.array], heads: Sequence[int], width: int
) -> list[LayerRows]:
    """The rows of each layer over some windows `[1, T]`, and their gradients.

    Args:
        model: A model that computes in float32.
        windows: Token ids.
        heads: KV heads of each layer.
        width: D.
    """
    of_windows = []
    for i, window in enumerate(windows):
        T = window.shape[1]

        def likelihood(
            *nudges: mx.array, window: mx.array = window, i: int = i
        ) -> tuple[mx.array, list[mx.array]]:
            rows: list[mx.array] = []
            logits = looked_through(
                model, window, Watcher(), lambda n: _Nudged(nudges[2 * n : 2 * n + 2], rows)
            ).astype(mx.float32)
            labels = mx.random.categorical(mx.stop_gradient(logits), key=mx.random.key(i))
            return -nn.losses.cross_entropy(logits, labels, reduction="sum"), rows

        zeros = [mx.zeros((1, h, T, width)) for h in heads for _ in range(2)]
        run = mx.value_and_grad(likelihood, argnums=tuple(range(len(zeros))))
        (_, rows), slopes = run(*zeros)
        mx.eval(rows, slopes)
        kept = [[np.array(a[0, :, SINK:]) for a in of] for of in (rows, slopes)]
        of_windows.append([*zip(*kept, strict=True)])
        print(f"gradients of window {i + 1} of {len(windows)}", flush=True)
    positions = np.concatenate([np.arange(SINK, window.shape[1]) for window in windows])
    layers = []
    for n in range(len(heads)):
        k, v = (
            [np.concatenate([of[2 * n + a][b] for of in of_windows], axis=1) for b in range(2)]
            for a in range(2)
        )
        layers.append(LayerRows(k[0], v[0], k[1], v[1], positions))
    return layers


# -- the transform ---------------------------------------------------------------------------------


class Transform(NamedTuple):
    """y = (x - mean) into, x = mean + y back; an error of y costs half its squared length in nats.

    Attributes:
        mean: `[D]`.
        into: `[D, D]`; channels in falling order of variance.
        back: `[D, D]`.
        weights: What each of the rows that it was fitted to counts, mean 1, `[N]`.
    """

    mean: np.ndarray
    into: np.ndarray
    back: np.ndarray
    weights: np.ndarray


def transform_of(x: np.ndarray, slopes: np.ndarray) -> Transform:
    """The transform of rows `[N, D]` with these gradients `[N, D]`."""
    x, g = x.astype(np.float64), slopes.astype(np.float64)
    D = x.shape[1]
    metric = g.T @ g / len(g)
    metric += RIDGE * np.trace(metric) / D * np.eye(D)
    root, inverse = power(metric, 0.5), power(metric, -0.5)
    weights = np.square(g @ inverse).mean(axis=1)
    weights = 1 - BY_GRADIENT + BY_GRADIENT * weights / weights.mean()
    share = weights / weights.sum()
    mean = share @ x
    covariance = ((x - mean) * share[:, None]).T @ (x - mean)
    _, U = np.linalg.eigh(root @ covariance @ root)
    U = U[:, ::-1]
    return Transform(mean, root @ U, U.T @ inverse, weights)


def power(matrix: np.ndarray, exponent: float) -> np.ndarray:
    """A power of a symmetric positive matrix."""
    values, vectors = np.linalg.eigh(matrix)
    values = np.maximum(values, values.max() * 1e-7 + 1e-12)
    return (vectors * values**exponent) @ vectors.T


def regression(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """W `[D, D]` of y - mean y ~ (x - mean x) W, by ridge regression over rows `[N, D]`."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    square = x.T @ x
    square += RIDGE * np.trace(square) / len(square) * np.eye(len(square))
    return np.linalg.solve(square, x.T @ y)


# -- bits and steps --------------------------------------------------------------------------------


def round_to_levels(y: mx.array, step: mx.array, top: mx.array) -> mx.array:
    """y rounded to the top + 1 levels of a step around 0; top = 0 gives 0."""
    return (mx.clip(mx.round(y / step + top / 2), 0, top) - top / 2) * step


def with_gain(y: mx.array, step: mx.array, top: mx.array) -> tuple[mx.array, mx.array]:
    """Rows `[..., C]` as decoded with the gain of least error, and that gain `[..., 1]`."""
    gains = mx.array(GAINS.astype(np.float32)).reshape(-1, *[1] * y.ndim)
    tried = round_to_levels(y, step * gains, top)
    best = mx.square(tried - y).sum(axis=-1, keepdims=True).argmin(axis=0, keepdims=True)
    rows = mx.take_along_axis(tried, mx.broadcast_to(best, (1, *y.shape)), axis=0)[0]
    return rows, gains.reshape(-1)[best[0]]


def costs_and_steps(y: mx.array, weights: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """Nats that each channel costs with 0, 1, ... bits, and its best step, `[M, C, 9]`.

    Args:
        y: Transformed rows of M heads, `[M, N, C]`.
        weights: `[M, N]`.
    """
    share = (weights / weights.sum(axis=-1, keepdims=True))[:, None]
    deviation = mx.sqrt(mx.var(y, axis=1, keepdims=True)) + 1e-12
    costs = [(share @ mx.square(y))[:, 0]]
    steps = [mx.ones(costs[0].shape)]
    for bits in range(1, len(GAUSSIAN_STEPS) + 1):
        tried = [deviation * (GAUSSIAN_STEPS[bits - 1] * factor) for factor in FACTORS]
        top = mx.array(2.0**bits - 1)
        errors = mx.stack(
            [(share @ mx.square(round_to_levels(y, s, top) - y))[:, 0] for s in tried]
        )
        best = errors.argmin(axis=0)
        costs.append(errors.min(axis=0))
        steps.append(mx.array(FACTORS)[best] * GAUSSIAN_STEPS[bits - 1] * deviation[:, 0])
        mx.eval(costs[-1], steps[-1])
    return 0.5 * np.array(mx.stack(costs, -1)), np.array(mx.stack(steps, -1))


def steps_beside_gains(y: mx.array, steps: mx.array, tops: mx.array, weights: mx.array) -> mx.array:
    """Steps `[M, C]` for rows that have gains, fitted in turns with the gains."""
    step, top = steps[:, None], tops[:, None]
    for _ in range(ROUNDS):
        _, gain = with_gain(y, step, top)
        plain, share = y / gain, weights[:, None] * mx.square(gain)[..., 0][:, None]
        tried = [step * factor for factor in NEAR_FACTORS]
        errors = [share @ mx.square(round_to_levels(plain, s, top) - plain) for s in tried]
        step = step * mx.array(NEAR_FACTORS)[mx.stack(errors).argmin(axis=0)]
        mx.eval(step)
    return step[:, 0]


def allocate(costs: np.ndarray, widths: np.ndarray, rate: float) -> np.ndarray:
    """Bits of each channel, `rate` on average, given where they save most nats a bit.

    Args:
        costs: Nats of each channel in each width, `[..., W]`.
        widths: Numbers of bits, ascending from 0.
        rate: Bits of a channel, on average.
    """
    flat, bits = costs.reshape(-1, len(widths)), widths
    chosen = np.zeros(len(flat), int)
    offers: list[tuple[float, int, int]] = []

    def offer(channel: int) -> None:
        at = chosen[channel]
        if at + 1 < len(widths):
            # The steepest of all wider widths, so that a step that pays later is not missed.
            saved = (flat[channel, at] - flat[channel, at + 1 :]) / (bits[at + 1 :] - bits[at])
            best = int(saved.argmax())
            heapq.heappush(offers, (-saved[best], channel, at + 1 + best))

    for channel in range(len(flat)):
        offer(channel)
    left = round(rate * len(flat))
    while offers and left > 0:
        _, channel, to = heapq.heappop(offers)
        left -= int(bits[to] - bits[chosen[channel]])
        chosen[channel] = to
        offer(channel)
    return bits[chosen].reshape(costs.shape[:-1])


# -- the coding of one layer -----------------------------------------------------------------------


@dataclass(frozen=True)
class LayerFit:
    """One layer's transforms and what its channels cost; keys and values along the first axis.

    Attributes:
        variant: One of `VARIANTS`.
        rope: The RoPE of its keys.
        mean: `[2, H, D]`.
        into: `[2, H, D, D]`.
        back: `[2, H, D, D]`.
        key_mean: Mean key before RoPE, `[H, D]`.
        forecast: The matrix of the values that keys foretell, `[H, D, D]`.
        samples: Transformed rows, `[2 H, n, D]`.
        weights: `[2 H, n]`.
    """

    variant: str
    rope: Rope
    mean: np.ndarray
    into: np.ndarray
    back: np.ndarray
    key_mean: np.ndarray
    forecast: np.ndarray
    samples: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, rows: LayerRows, rope: Rope, variant: str) -> LayerFit:
        """The fit of one layer."""
        H, N, D = rows.keys.shape
        at = mx.broadcast_to(mx.array(rows.positions), (1, H, N))

        def turned(x: np.ndarray, by: mx.array) -> np.ndarray:
            return np.array(rope.turned(mx.array(x)[None], by)[0])

        plain, slopes = turned(rows.keys, -at), rows.key_slopes
        key_mean = plain.mean(axis=1)
        if variant == POSTM:
            keys = turned(plain - key_mean[:, None], at)
        else:
            keys, slopes = plain, turned(slopes, -at)
        values, forecast = rows.values, np.zeros((H, D, D))
        if variant == JOINT:
            forecast = np.stack([regression(plain[h], values[h]) for h in range(H)])
            values = values - (plain - key_mean[:, None]) @ forecast
        pairs = zip((*keys, *values), (*slopes, *rows.value_slopes), strict=True)
        fits = [(x, transform_of(x, g)) for x, g in pairs]
        some = np.random.default_rng(0).choice(N, min(STEP_ROWS, N), replace=False)

        def stacked(field: str) -> np.ndarray:
            return np.stack([getattr(fit, field) for _, fit in fits]).astype(np.float32)

        return cls(
            variant,
            rope,
            *(stacked(n).reshape(2, H, D, *[D] * (n != "mean")) for n in ("mean", "into", "back")),
            key_mean.astype(np.float32),
            forecast.astype(np.float32),
            np.stack([(x[some] - fit.mean) @ fit.into for x, fit in fits]).astype(np.float32),
            stacked("weights")[:, some],
        )

    @cached_property
    def costs(self) -> tuple[np.ndarray, np.ndarray]:
        """Nats and steps of each channel and number of bits, `[2 H, D, W]`."""
        some = np.s_[:, :STEP_ROWS]
        return costs_and_steps(mx.array(self.samples[some]), mx.array(self.weights[some]))

    def tier(self, bits: np.ndarray, steps: np.ndarray) -> Tier:
        """The tables of rows with these bits and steps to start from, `[2 H, D]` each."""
        tops = mx.array(2.0**bits - 1).astype(mx.float32)
        start = mx.array(np.where(bits > 0, steps, 1).astype(np.float32))
        rows, weights = (mx.array(of[:, :STEP_ROWS]) for of in (self.samples, self.weights))
        fitted = steps_beside_gains(rows, start, tops, weights)
        shape = self.mean.shape
        return Tier(*(np.array(of).reshape(shape) for of in (fitted, tops, bits)))


class Tier(NamedTuple):
    """Steps and highest levels of a width of rows, `[2, H, D]`, and the bits."""

    steps: np.ndarray
    tops: np.ndarray
    bits: np.ndarray

    @property
    def row_bytes(self) -> np.ndarray:
        """Bytes of a key and value with their gains, `[H]`."""
        return -(-(self.bits.sum(axis=(0, 2)) + 2 * GAIN_BITS) // 8)


@dataclass(frozen=True)
class LayerCoding:
    """One layer's coding: a transform, and tables for each tier of rows.

    Attributes:
        fit: The transforms.
        tiers: The widest first.
    """

    fit: LayerFit
    tiers: tuple[Tier, ...]

    @cached_property
    def _tables(self) -> tuple[mx.array, ...]:
        fit = self.fit
        return tuple(map(mx.array, (fit.mean, fit.into, fit.back, fit.key_mean, fit.forecast)))

    @cached_property
    def _levels(self) -> list[tuple[mx.array, mx.array]]:
        return [
            (mx.array(of.steps[:, :, None]), mx.array(of.tops[:, :, None])) for of in self.tiers
        ]

    def round_trip(
        self, keys: mx.array, values: mx.array, positions: mx.array, tier: int = 0
    ) -> tuple[mx.array, mx.array]:
        """Rows as attention gets them once they are coded.

        Args:
            keys: `[B, H, L, D]` with RoPE applied.
            values: `[B, H, L, D]`.
            positions: `[B, H, L]`.
            tier: The index of the tier.
        """
        *_, key_mean, forecast = self._tables
        centre, rope = key_mean[None, :, None], self.fit.rope
        if self.fit.variant == POSTM:
            base = rope.turned(mx.broadcast_to(centre, keys.shape), positions)
            return self._transformed(keys - base, 0, tier) + base, self._transformed(
                values, 1, tier
            )
        plain = self._transformed(rope.turned(keys, -positions), 0, tier)
        guess = (plain - centre) @ forecast if self.fit.variant == JOINT else 0
        return rope.turned(plain, positions), self._transformed(values - guess, 1, tier) + guess

    def _transformed(self, x: mx.array, part: int, tier: int) -> mx.array:
        """Keys (part 0) or values (1) through the transform, the levels and back."""
        mean, into, back, *_ = self._tables
        centre, (steps, tops) = mean[part][:, None], self._levels[tier]
        rows, _ = with_gain((x - centre) @ into[part], steps[part], tops[part])
        return rows @ back[part] + centre


def codings(
    fits: Sequence[LayerFit], rates: Sequence[float], block: int = 1, even: bool = False
) -> list[LayerCoding]:
    """Each layer's coding, with bits given out over all layers for each rate.

    Args:
        fits: The layers.
        rates: Bits a number of each tier, the widest first.
        block: Neighbouring channels that have one width.
        even: Whether the rows of all heads have as many bits.
    """
    widths = np.array(ANY_WIDTH if block == 1 else BLOCK_WIDTHS)
    by_block = [
        fit.costs[0].reshape(2 * len(fit.key_mean), -1, block, fit.costs[0].shape[-1]).sum(axis=2)
        for fit in fits
    ]
    ends = np.cumsum([len(costs) for costs in by_block])[:-1]
    made = [LayerCoding(fit, ()) for fit in fits]
    for rate in rates:
        if even:
            each = [_even(costs[..., widths], widths, rate) for costs in by_block]
        else:
            bits = allocate(np.concatenate(by_block)[..., widths], widths, rate)
            each = np.split(bits, ends)
        for i, of_layer in enumerate(each):
            own = np.repeat(of_layer, block, axis=1)
            start = np.take_along_axis(fits[i].costs[1], own[..., None], axis=-1)[..., 0]
            made[i] = replace(made[i], tiers=(*made[i].tiers, fits[i].tier(own, start)))
    return made


def _even(costs: np.ndarray, widths: np.ndarray, rate: float) -> np.ndarray:
    """Bits of one layer's channels `[2 H, C]`, as many for each head's key and value together."""
    heads = costs.reshape(2, -1, *costs.shape[1:])
    bits = [allocate(heads[:, h], widths, rate) for h in range(heads.shape[1])]
    return np.stack(bits, axis=1).reshape(costs.shape[:-1])
