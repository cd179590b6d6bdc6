"""Fitted frames: errors of packed keys fall where attention feels them."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.attention.ops import scaled_dot_product_attention
from mlx_h2o.calibration.row_format import RowFormat
from mlx_h2o.calibration.scaling_build import FIRST, frames_of_keys
from mlx_h2o.calibration.scaling_fit import QUERY_STEP, FrameSample, KeyUse, fitted
from mlx_h2o.slots.key_scaling import Frame

H, N, D = 2, 600, 64


@dataclass
class Seen:
    """Rows whose first is like no other and looked at most; queries that use few channels."""

    keys: np.ndarray
    weights: np.ndarray
    energies: np.ndarray

    @classmethod
    def drawn(cls, width=D):
        draw = np.random.default_rng(1)
        keys = draw.normal(size=(H, N, width)) * draw.uniform(0.2, 2, size=(H, 1, width))
        keys[:, 0] += 4 * draw.normal(size=(H, width)) * (draw.random(width) < 0.1)
        weights = draw.random((H, N))
        weights[:, 0] = N / 2
        return cls(keys, weights, draw.lognormal(0, 1.5, size=(H, width)))

    @property
    def sample(self):
        parts = (self.keys, self.weights, self.energies)
        return FrameSample(*(mx.array(of.astype(np.float32)) for of in parts))

    @property
    def widest(self):
        """Each channel's mean and greatest distance."""
        return Frame.of(self.sample.keys[None])


def test_packed_rows_lose_less_where_it_counts():
    seen = Seen.drawn()
    still = fitted(seen.widest, seen.sample, centred=False)
    found = fitted(seen.widest, seen.sample)
    lost = {}
    for name, frame in (("start", seen.widest), ("still", still), ("fitted", found)):
        form = RowFormat(k_bits=4, frame=frame)
        error = np.array(form.keys(seen.sample.keys[None]))[0] - seen.keys
        lost[name] = (seen.weights * (error**2 * seen.energies[:, None]).sum(axis=-1)).sum()
    assert lost["fitted"] < 0.9 * lost["still"] < 0.6 * lost["start"]


def test_a_channel_has_the_share_of_the_ranges_that_it_has_of_the_energy():
    seen = Seen.drawn()
    centre, scale = (np.array(of) for of in fitted(seen.widest, seen.sample).arrays)
    framed = (seen.keys - centre[:, None]) / scale[:, None]
    chances = seen.weights / seen.weights.sum(axis=-1, keepdims=True) / 2 + 0.5 / N
    for h in range(H):
        least, greatest = framed[h].min(axis=-1), framed[h].max(axis=-1)
        ranges = (greatest - least) * chances[h]
        share = np.bincount(framed[h].argmax(axis=-1), ranges * greatest, D)
        share -= np.bincount(framed[h].argmin(axis=-1), ranges * least, D)
        energy = seen.energies[h] * scale[h] ** 2
        apart = np.abs(share / share.sum() - energy / energy.sum()).sum()
        assert apart < 0.3  # 1.3 at the start


def test_groups_are_fitted_apart():
    """They have ranges of their own, so one's queries say nothing of the other's channels."""
    seen = Seen.drawn(2 * D)
    louder = replace(seen, energies=seen.energies * np.where(np.arange(2 * D) < D, 1000, 1))
    found, other = (fitted(of.widest, of.sample).arrays for of in (seen, louder))
    assert np.allclose(found, other, rtol=1e-3, atol=1e-3)


def test_without_a_centre_there_stays_none():
    seen = Seen.drawn()
    start = Frame.of(seen.sample.keys[None], centred=False)
    found = fitted(start, seen.sample, centred=False)
    assert (found.centre == 0).all()
    assert not np.allclose(found.scale, start.scale, rtol=0.1)


@pytest.mark.parametrize("part", ["keys", "weights", "energies"])
def test_what_tells_nothing_breaks_nothing(part):
    seen = Seen.drawn()
    silent = replace(seen, **{part: np.zeros_like(getattr(seen, part))})
    start = Frame(mx.zeros((H, D)), mx.ones((H, D)))
    centre, scale = (np.array(of) for of in fitted(start, silent.sample).arrays)
    assert np.isfinite([centre, scale]).all()
    assert (scale > 0).all()


@pytest.mark.parametrize("sinks", [None, mx.array([0.5, -1.0, 0.0, 2.0])])
def test_the_weight_of_a_key_is_what_an_error_of_its_logit_costs(sinks):
    shape = (1, 2, 150, 8)
    keys, values = (mx.random.normal(shape, key=mx.random.key(i)) for i in range(2))
    q = 2 * mx.random.normal((1, 4, 150, 8), key=mx.random.key(2))
    out, use = KeyUse.attended(AttentionCall(q, 0.3, "causal", sinks), keys, values)
    assert (use.queries == q[:, :, ::QUERY_STEP]).all()
    causal = mx.where(mx.tril(mx.ones((150, 150))) > 0, 0.0, -mx.inf)

    def attended(mask):
        return scaled_dot_product_attention(q, keys, values, scale=0.3, mask=mask, sinks=sinks)

    assert mx.allclose(out, attended(causal), atol=1e-5)
    error = 0.01
    for n in (0, 60, 145):
        moved = attended(causal + error * (mx.arange(150) == n)) - attended(causal)
        cost = (
            mx.square(moved / error)[:, :, ::QUERY_STEP]
            .sum(axis=(0, 2, 3))
            .reshape(2, 2)
            .sum(axis=1)
        )
        assert mx.allclose(use.weights[0, :, n], cost, rtol=0.05, atol=1e-3)


def test_for_a_longer_context_all_but_the_first_tokens_are_turned():
    """Heads look at those from everywhere, and nothing like them comes later."""
    T, turned = 64, set()

    def turn(rows, delta):
        turned.update(rows.flatten().astype(mx.int32).tolist())
        return rows + delta

    keys = mx.broadcast_to(mx.arange(T)[:, None], (1, 1, T, D))
    frames_of_keys(keys, turn, (16 * T,))
    assert turned == set(range(FIRST, T))
