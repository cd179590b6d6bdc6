"""Fitted values: attention over few rows gives what attention over all rows gave."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.compression.value_fit import AllRows, fit_values, least_squares
from mlx_h2o.slots.packed import dense

B, HQ, H, T, D = 2, 4, 2, 60, 64


@pytest.fixture(scope="module")
def rows():
    """Keys, values, and queries that look at some keys more than at others."""
    keys, values, noise = (
        mx.random.normal((B, heads, T, D), key=mx.random.key(seed))
        for seed, heads in ((1, H), (2, H), (3, HQ))
    )
    return keys, values, 3 * mx.repeat(keys, HQ // H, axis=1) + noise


def reduced(rows, slots, **settings):
    """A cache that keeps the first so many rows of each head, and all rows before that."""
    keys, values, queries = rows
    cache = mlx_h2o.H2OKVCache(budgets=[T] * H, policy="h2o", **settings)
    cache.attend(queries, *cache.update_and_fetch(keys, values), scale=D**-0.5, mask="causal")
    before = AllRows.of(cache.layer)
    worths = [-mx.broadcast_to(mx.arange(T).astype(mx.float32), (B, T))] * H
    cache.keep_best(worths, [slots] * H)
    return cache, before


def fit(cache, before, rows, anchor=0.0):
    count = len(cache.slots(cache.store.runs[0]).positions[0, 0])
    anchors = [np.full((B, count), anchor, np.float32)] * H
    fit_values(cache.layer, before, AttentionCall(rows[2], D**-0.5), anchors)


def values_of(cache):
    (run,) = cache.store.runs
    fields = cache.store.views(run)
    return dense(cache.packing.rows("values", fields)).astype(mx.float32)


def error(cache, rows):
    """The mean square error of a copy's attention from that over all rows."""
    keys, values, queries = rows
    whole = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=D**-0.5)
    (run,) = cache.store.runs
    fields = cache.store.views(run)
    kept, own = (
        dense(cache.packing.rows(name, fields)).astype(mx.float32) for name in ("keys", "values")
    )
    if cache.remainder is not None:
        kept = mx.concatenate([kept, cache.remainder.mean_key[:, :, None]], axis=2)
        own = mx.concatenate([own, cache.remainder.mean_value[:, :, None]], axis=2)
    logits = D**-0.5 * queries @ mx.repeat(kept, HQ // H, axis=1).swapaxes(-1, -2)
    if cache.remainder is not None:
        column = cache.remainder.column(queries, D**-0.5, 0.0)
        logits = mx.concatenate([logits[..., :-1], column[..., None]], axis=-1)
    out = mx.softmax(logits, axis=-1) @ mx.repeat(own, HQ // H, axis=1)
    return mx.square(out - whole).mean().item()


@pytest.mark.parametrize("settings", [{}, {"remainder": False}, {"bits": 6}])
def test_attention_to_kept_rows_comes_nearer_to_that_to_all(rows, settings):
    cache, before = reduced(rows, 24, saturation=0.0, **settings)
    apart, keys = error(cache, rows), mx.array(cache.arrays()["slots.keys"])
    fit(cache, before, rows)
    assert error(cache, rows) < 0.85 * apart
    assert mx.array_equal(cache.arrays()["slots.keys"], keys)


def test_values_that_are_anchored_stay(rows):
    cache, before = reduced(rows, 24, saturation=0.0)
    values = mx.array(values_of(cache))
    fit(cache, before, rows, anchor=1e9)
    assert mx.allclose(values_of(cache), values, atol=1e-4)
    fit(cache, before, rows)
    assert not mx.allclose(values_of(cache), values, atol=1e-2)


def test_values_stay_where_nothing_was_evicted(rows):
    cache, before = reduced(rows, T)
    values = mx.array(values_of(cache))
    fit(cache, before, rows)
    assert mx.allclose(values_of(cache), values, atol=1e-3)


def test_the_target_has_the_remainder_of_before(rows):
    """Rows that went before the block was read go on answering in what the fit aims at."""
    cache, _ = reduced(rows, 30, saturation=0.0)
    before = AllRows.of(cache.layer)
    assert before.remainder is not None
    values = mx.array(values_of(cache))
    fit(cache, before, rows)
    assert mx.allclose(values_of(cache), values, atol=1e-3)


def test_the_fit_is_a_ridge_regression():
    """Exact without a ridge, the start with a heavy one; rows without weight stay."""
    rng = np.random.default_rng(0)
    weights, wanted, start = (rng.random(shape) for shape in ((9, 4), (9, 3), (4, 3)))
    best, none = np.linalg.lstsq(weights, wanted, rcond=None)[0], np.zeros(4)
    assert np.allclose(least_squares(weights, wanted, start, 0.0, none), best, atol=1e-4)
    assert np.allclose(least_squares(weights, wanted, start, 1e9, none), start, atol=1e-4)
    weights[:, 2] = 0
    assert np.allclose(least_squares(weights, wanted, start, 0.0, none)[2], start[2])
    anchors = np.array([1e12, 0, 0, 0])
    anchored = least_squares(weights, wanted, start, 0.0, anchors)
    assert np.allclose(anchored[0], start[0])
    assert not np.allclose(anchored[1], start[1], atol=1e-2)
