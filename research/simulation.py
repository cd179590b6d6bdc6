"""A cache for measuring: it holds every row, and a mask of those that a policy would keep.

It saves no memory. In return every sequence of a batch and every KV head may have a budget, a
policy's weights, a remainder's order and a row format of its own, so that many settings run side by
side through one model, and one pass over a full run's queries shows the loss of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o.policies.terms import FEWEST_FOR_A_MEAN, MASS_FLOOR
from mlx_h2o.slots.key_scaling import RowFormat
from mlx_h2o.slots.packed import DEFAULT_GROUP_SIZE, logarithm, value_lengths

SINK = 4
#: Positions are attended to in multiples of this, so that shapes repeat.
STRIDE = 64
#: The saturation t that means no remainder.
SILENT = -1.0
#: Ways to round scores: to the nearest number, or at random with the right mean.
NEAREST, DITHERED = ROUNDINGS = ("nearest", "dithered")


@dataclass(frozen=True)
class Rule:
    """The ranking of slots: four weights of standardised terms, or H2O's summed mass.

    Attributes:
        mass: Weight of the log mass per step.
        distance: Weight of the log distance to the evicted keys' mean.
        value: Weight of the value's log squared length.
        age: Weight of the log age, which is subtracted.
        recent: The share of a head's budget reserved for the newest tokens.
        summed: Whether to rank by the summed mass instead (H2O).
        ranges: Whether the ranges of a value's groups replace its length, as with packed values.
    """

    mass: float = 1.0
    distance: float = 0.3
    value: float = 0.3
    age: float = 0.3
    recent: float = 0.25
    summed: bool = False
    ranges: bool = False


SALIENT = Rule()
SALIENT_PACKED = Rule(ranges=True)
DISTINCT = Rule(mass=0.5, distance=1.0, value=0.0, age=0.6, recent=0.2)
MASS_RATE = Rule(distance=0.0, value=0.0, age=0.0)
H2O = Rule(recent=0.5, summed=True)
WINDOW = Rule(mass=0.0, distance=0.0, value=0.0, age=1.0, recent=0.0)


def in_half(scores: mx.array, dithered: bool) -> mx.array:
    """Scores as recovered from 16-bit logarithms (float16's 10 bits of fraction).

    Args:
        scores: Float32, 0 or more.
        dithered: Whether to round up or down at random, with the right mean; otherwise to the
            nearest, where increments below half a step are lost for good.
    """
    logs = mx.log(mx.maximum(scores, MASS_FLOOR))
    step = mx.power(2.0, mx.floor(mx.log2(mx.maximum(mx.abs(logs), 2.0**-14))) - 10)
    up = mx.random.uniform(shape=logs.shape) if dithered else 0.5
    return mx.where(scores > 0, mx.exp(mx.floor(logs / step + up) * step), 0)


class Trial:
    """The kept rows and the attention of R settings of each KV head, over the same rows.

    Args:
        budgets: Slots, `[B, H, R]` int32.
        saturation: t of the remainder, `[B, H, R]`; 0 is first order, `SILENT` no remainder.
        rules: One for each sequence `[B]`, or one for all.
        length: T, the most tokens.
        widths: D and Dv.
        rounding: The rounding of each sequence's scores; empty means float32.
    """

    def __init__(
        self,
        budgets: mx.array,
        saturation: mx.array,
        rules: Sequence[Rule],
        length: int,
        widths: tuple[int, int],
        rounding: Sequence[str | None] = (),
    ):
        B, H, R = budgets.shape
        self.budgets, self.saturation = budgets, saturation
        self.summed = mx.array([rule.summed for rule in rules])[:, None, None, None]
        self.ranges = mx.array([rule.ranges for rule in rules])[:, None, None, None]
        self.weights = {
            name: mx.array([getattr(rule, name) for rule in rules])[:, None, None, None]
            for name in ("mass", "distance", "value", "age")
        }
        self.rounded = {
            way: mx.array([of == way for of in rounding])[:, None, None, None]
            for way in ROUNDINGS
            if way in rounding
        }
        share = mx.array([rule.recent for rule in rules])[:, None, None]
        self.recent = mx.floor(share * budgets).astype(mx.int32)
        self.present = mx.zeros((B, H, R, length), mx.bool_)
        self.scores = mx.zeros((B, H, R, length))
        self.count = mx.zeros((B, H, R))
        self.mean_key, self.var_key = (mx.zeros((B, H, R, widths[0])) for _ in range(2))
        self.mean_value = mx.zeros((B, H, R, widths[1]))

    @property
    def state(self) -> list[mx.array]:
        return [
            self.present,
            self.scores,
            self.count,
            self.mean_key,
            self.var_key,
            self.mean_value,
        ]

    def step(self, q: mx.array, keys: mx.array, values: mx.array, offset: int) -> mx.array:
        """Attend from the newest token, then evict one token in every setting.

        Args:
            q: `[B, H, G, D]` float32, times the attention's scale.
            keys: `[B, H, N, D]`, N >= offset; rows behind are never seen.
            values: `[B, H, N, Dv]`.
            offset: Tokens so far, including this one.

        Returns:
            `[B, H, R, G, Dv]`.
        """
        N = keys.shape[2]
        at = mx.arange(N)
        present = self.present[..., :N] | (at == offset - 1)
        logits = (q @ keys.swapaxes(-1, -2))[:, :, None]  # [B, H, 1, G, N]
        logits = mx.where(present[..., None, :], logits, -mx.inf)
        r = self._column(q)
        lse = mx.logaddexp(mx.logsumexp(logits, axis=-1), r)
        p = mx.exp(logits - lse[..., None])
        B, H, R, G, _ = p.shape
        out = (p.reshape(B, H, R * G, N) @ values).reshape(B, H, R, G, -1)
        out = out + mx.exp(r - lse)[..., None] * self.mean_value[..., None, :]
        scores = self.scores[..., :N] + p.sum(axis=-2)
        for way, which in self.rounded.items():
            scores = mx.where(which, in_half(scores, way == DITHERED), scores)
        victim, goes = self._victim(scores, present, keys, values, offset)
        self._fold(keys, values, victim, goes)
        present = present & ~((at == victim[..., None]) & goes[..., None])
        self.present[..., :N] = present
        self.scores[..., :N] = scores
        return out

    def _column(self, q: mx.array) -> mx.array:
        """The remainder's logit `[B, H, R, G]`."""
        mean = q @ self.mean_key.swapaxes(-1, -2)  # [B, H, G, R]
        x = 0.5 * (mx.square(q) @ self.var_key.swapaxes(-1, -2))
        t = self.saturation[:, :, None]
        term = mx.where(t > 0, x * mx.rsqrt(1 + x / mx.maximum(t, 1e-6)), 0)
        r = mx.log(self.count)[:, :, None] + mean + term
        return mx.where(t == SILENT, -mx.inf, r).swapaxes(-1, -2)

    def _victim(
        self, scores: mx.array, present: mx.array, keys: mx.array, values: mx.array, offset: int
    ) -> tuple[mx.array, mx.array]:
        """The victim's slot `[B, H, R]`, and whether there is a victim."""
        at = mx.arange(keys.shape[2])
        goes = self.budgets <= offset  # the next token needs a slot
        old = (at >= SINK) & (at < (offset - self.recent)[..., None])
        evictable = present & old
        worth = self._worth(scores, present, evictable, keys, values, offset)
        worth = mx.where(self.summed, scores, worth)
        return mx.argmin(mx.where(evictable, worth, mx.inf), axis=-1), goes

    def _worth(
        self,
        scores: mx.array,
        present: mx.array,
        among: mx.array,
        keys: mx.array,
        values: mx.array,
        offset: int,
    ) -> mx.array:
        age = mx.maximum(offset - mx.arange(keys.shape[2]), 1).astype(mx.float32)
        weight = shares(among)
        few = (self.count < FEWEST_FOR_A_MEAN)[..., None]
        mean = mx.where(few, shares(present) @ keys, self.mean_key)
        square = mx.square(keys).sum(axis=-1)[:, :, None]
        cross = mean @ keys.swapaxes(-1, -2)
        of_mean = mx.square(mean).sum(axis=-1, keepdims=True)
        apart = mx.maximum(square - 2 * cross + of_mean, 1e-6 * of_mean + 1e-12)
        terms = {
            "mass": mx.log(scores / age + MASS_FLOOR),
            "distance": mx.log(apart),
            "value": mx.where(self.ranges, _ranges(values), _lengths(values)),
            "age": -mx.log(age),
        }
        worth = mx.zeros_like(scores)
        for name, x in terms.items():
            first = (x * weight).sum(axis=-1, keepdims=True)
            second = (mx.square(x - first) * weight).sum(axis=-1, keepdims=True)
            worth = worth + self.weights[name] * (x - first) / (mx.sqrt(second) + 1e-6)
        return worth

    def _fold(self, keys: mx.array, values: mx.array, victim: mx.array, goes: mx.array) -> None:
        """Fold the victims into the remainders (Welford)."""
        key = mx.take_along_axis(keys, victim[..., None], axis=2)
        value = mx.take_along_axis(values, victim[..., None], axis=2)
        weight = goes.astype(mx.float32)
        self.count = self.count + weight
        part = (weight / mx.maximum(self.count, 1))[..., None]
        step = key - self.mean_key
        self.mean_key = self.mean_key + part * step
        self.var_key = self.var_key + part * ((1 - part) * mx.square(step) - self.var_key)
        self.mean_value = self.mean_value + part * (value - self.mean_value)


def _lengths(values: mx.array) -> mx.array:
    return value_lengths(values).astype(mx.float32)[:, :, None]


def _ranges(values: mx.array) -> mx.array:
    groups = values.reshape(*values.shape[:-1], -1, min(DEFAULT_GROUP_SIZE, values.shape[-1]))
    return logarithm(groups.max(axis=-1) - groups.min(axis=-1))[:, :, None]


def shares(among: mx.array) -> mx.array:
    """Weights that sum to 1 over the slots marked True."""
    weight = among.astype(mx.float32)
    return weight / mx.maximum(weight.sum(axis=-1, keepdims=True), 1)


@dataclass(frozen=True)
class Setting:
    """One side of a simulation: the settings of some sequences of the batch.

    Attributes:
        name: The setting's name, for people.
        budgets: Slots of each layer's KV heads, `[layers][H]`; None keeps everything.
        saturation: t of each sequence, or one number for all.
        rule: The ranking of slots.
        formats: The row format of each layer; None means dense rows.
        rounding: One of `ROUNDINGS`, for logarithms of scores in 16 bits; None keeps float32.
    """

    name: str
    budgets: Sequence[Sequence[int]] | None = None
    saturation: Sequence[Sequence[float]] | float = SILENT
    rule: Rule = SALIENT
    formats: Sequence[RowFormat] | None = None
    rounding: str | None = None


class SimulatedCache:
    """One layer's cache for several settings side by side: sequences of a setting are neighbours.

    Args:
        settings: The settings, each with an equal part of the batch.
        layer: The layer's index.
        length: T, the most tokens.
    """

    attending = True
    #: What the cache is a trial of; experiments have classes of their own.
    kind: type[Trial] = Trial

    def __init__(self, settings: Sequence[Setting], layer: int, length: int):
        self.settings, self.layer, self.length = settings, layer, length
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.trial: Trial | None = None

    @property
    def state(self) -> list[mx.array]:
        assert self.trial is not None
        assert self.keys is not None
        assert self.values is not None
        return [self.keys, self.values, *self.trial.state]

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep one new row `[B, H, 1, D]`; `attend` does the rest."""
        if keys.shape[2] != 1:
            raise ValueError("A simulation takes one token at a time.")
        if self.keys is None:
            self._start(keys, values)
        B = keys.shape[0] // len(self.settings)
        stored_keys, stored_values = [], []
        for i, setting in enumerate(self.settings):
            k, v = keys[i * B : (i + 1) * B], values[i * B : (i + 1) * B]
            if setting.formats is not None:
                k = setting.formats[self.layer].keys(k)
                v = setting.formats[self.layer].values(v)
            stored_keys.append(k)
            stored_values.append(v)
        at = self.offset
        self.keys[:, :, at : at + 1] = mx.concatenate(stored_keys)  # type: ignore[index]
        self.values[:, :, at : at + 1] = mx.concatenate(stored_values)  # type: ignore[index]
        self.offset += 1
        return keys, values

    def attend(
        self, q: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """Attention `[B, Hq, 1, Dv]` over the rows that each setting keeps."""
        assert self.trial is not None
        B, Hq, _, D = q.shape
        H = keys.shape[1]
        N = min(-(-self.offset // STRIDE) * STRIDE, self.length)
        grouped = q.astype(mx.float32).reshape(B, H, Hq // H, D) * scale
        visible = (self.keys[:, :, :N], self.values[:, :, :N])  # type: ignore[index]
        out = self.trial.step(grouped, *visible, self.offset)
        return out.reshape(B, Hq, 1, -1).astype(q.dtype)

    def _start(self, keys: mx.array, values: mx.array) -> None:
        B, H, _, D = keys.shape
        Dv, n = values.shape[-1], B // len(self.settings)
        self.keys, self.values = mx.zeros((B, H, self.length, D)), mx.zeros((B, H, self.length, Dv))
        budgets, saturation, rules, rounding = [], [], [], []
        for setting in self.settings:
            slots, t = setting.budgets, setting.saturation
            budgets += [list(slots[self.layer]) if slots is not None else [self.length] * H] * n
            saturation += [[t] * H if isinstance(t, float) else list(t[self.layer])] * n
            rules += [setting.rule] * n
            rounding += [setting.rounding] * n
        self.trial = self.kind(
            mx.array(budgets, mx.int32)[..., None],
            mx.array(saturation, mx.float32)[..., None],
            rules,
            self.length,
            (D, Dv),
            rounding,
        )
