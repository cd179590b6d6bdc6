"""Transform coding of rows: bits, bytes and tiers, on rows drawn at random."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o.calibration.row_format import RowFormat
from mlx_h2o.slots.rope import Rope
from research.coding import SINK_BITS, Entrance, TieredCache
from research.row_coding import BLOCK_WIDTHS, SINK, VARIANTS, LayerFit, LayerRows, allocate, codings

H, N, D = 2, 256, 32


@pytest.fixture(scope="module")
def rows():
    """Rows and gradients whose channels differ much in variance and worth."""
    draw = np.random.default_rng(0)
    spread = 2.0 ** -(np.arange(D)[draw.permutation(D)] ** 0.5)

    def one(scale):
        mixed = draw.normal(size=(H, N, D)) * scale @ np.linalg.qr(draw.normal(size=(D, D)))[0]
        return mixed.astype(np.float32)

    parts = [one(spread) for _ in range(2)] + [one(spread[::-1]) for _ in range(2)]
    return LayerRows(*parts, positions=np.arange(SINK, N + SINK))


@pytest.fixture(scope="module", params=VARIANTS)
def fit(request, rows):
    return LayerFit.of(rows, Rope(D, 10_000.0), request.param)


def errors(coding, rows, tier=0):
    """The mean of what the rows' errors cost: (g . e)^2."""
    at = mx.broadcast_to(mx.array(rows.positions), (1, H, N))
    exact = [mx.array(of)[None] for of in (rows.keys, rows.values)]
    coded = coding.round_trip(*exact, at, tier)
    slopes = rows.key_slopes, rows.value_slopes
    pairs = zip(slopes, exact, coded, strict=True)
    return sum(mx.square((mx.array(g) * (b - a)[0]).sum(-1)).mean().item() for g, a, b in pairs)


def test_the_cost_of_errors_falls_with_bits(fit, rows):
    (coding,) = codings([fit], [1, 2, 3, 5])
    costs = [errors(coding, rows, tier) for tier in range(4)]
    assert all(wider < 0.6 * narrower for narrower, wider in itertools.pairwise(costs))


def test_bytes_are_bits_and_two_gains(fit):
    (coding,) = codings([fit], [3])
    (tier,) = coding.tiers
    assert tier.bits.mean() == pytest.approx(3, abs=7 / tier.bits.size)
    assert tier.row_bytes.tolist() == [-(-(tier.bits[:, h].sum() + 6) // 8) for h in range(H)]


def test_blocks_have_widths_that_kernels_read(fit):
    (coding,) = codings([fit], [3], block=8)
    bits = coding.tiers[0].bits.reshape(2, H, -1, 8)
    assert set(bits.flatten().tolist()) <= set(BLOCK_WIDTHS)
    assert (bits == bits[..., :1]).all()


def test_even_rows_have_as_many_bits_in_every_head(fit):
    (coding,) = codings([fit], [3], even=True)
    bits = coding.tiers[0].bits
    assert np.ptp(bits.sum(axis=(0, 2))) <= 7
    (by_worth,) = codings([fit], [3])
    assert (bits != by_worth.tiers[0].bits).any()


def test_bits_go_where_they_save_most():
    draw, widths = np.random.default_rng(1), np.arange(4)
    costs = draw.exponential(size=(4, 1)) * 4.0**-widths  # convex: greedy is the optimum
    chosen = allocate(costs, widths, 1.5)
    ways = [w for w in itertools.product(widths, repeat=4) if sum(w) == 6]
    best = min(ways, key=lambda way: costs[np.arange(4), way].sum())
    assert chosen.tolist() == list(best)


def test_a_row_that_becomes_narrow_is_coded_again_from_its_wide_form(fit, rows):
    (coding,) = codings([fit], [5, 2])
    sinks = RowFormat(SINK_BITS, SINK_BITS, 32)
    cache = TieredCache(budgets=[40, 48], policy="salient")
    cache.entrance, cache.wide_part, cache.room = Entrance(coding, sinks), 0.3, N
    exact = [mx.array(of)[None] for of in (rows.keys, rows.values)]
    for first, last in ((0, 64), *((i, i + 1) for i in range(64, 100))):
        new = cache.update_and_fetch(*(of[:, :, first:last] for of in exact))
        mask = "causal" if last > first + 1 else None
        mx.eval(cache.attend(new[0], *new, scale=D**-0.5, mask=mask))
    at = mx.broadcast_to(mx.arange(100), (1, H, 100))
    wide = coding.round_trip(*(of[:, :, :100] for of in exact), at)
    narrow = coding.round_trip(*wide, at, 1)
    for run in cache.store.runs:
        positions = cache.store.view(run, "positions")[0, 0].tolist()
        is_narrow = cache.narrow[0, run.first].tolist()
        count = 0
        for slot, place in enumerate(positions):
            if place < SINK:
                continue
            count += is_narrow[place]
            for name, a, b in zip(("keys", "values"), wide, narrow, strict=True):
                held = cache.store.view(run, name)[0, 0, slot]
                expected = (b if is_narrow[place] else a)[0, run.first, place]
                assert mx.allclose(held, expected, atol=1e-4, rtol=1e-4).item()
        room = cache.wide_slots(run.budget)
        assert run.budget - SINK - room <= count < run.budget - SINK - room + 8
