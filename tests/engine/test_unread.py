"""The unread share: what the remainder's column received, told by every path alike."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arrays import numpy_of
from mlx_h2o import (
    BatchH2OKVCache,
    H2OKVCache,
    LatentKVCache,
    PlainRowsKVCache,
    make_policy,
)
from mlx_h2o.attention.backends import choice
from mlx_h2o.storage.packed import dense
from tiny_models import TinyLayer

SETTINGS: dict[str, dict[str, Any]] = {
    "the default": {},
    "heads of their own": {"budgets": (24, 33)},
    "the sum of masses": {"policy": make_policy("h2o", window=8)},
    "logits": {"policy": make_policy("ema-logits")},
    "keys alone": {"policy": "keydiff"},
    "age alone": {"policy": "streaming"},
    "budgets by prompt": {"policy": "adakv"},
    "two at once": {"policy": make_policy("streaming", evict_every=3)},
    "packed": {"bits": 8, "group_size": 32},
    "packed twice": {"bits": 4, "recent_bits": 8, "group_size": 32},
    "first order": {"saturation": (0.0, 2.0)},
    "undo": {"undo": 3},
}
BUDGET, PROMPT, STEPS = 24, 40, 45


@pytest.fixture(autouse=True)
def _on_the_cpu():
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture
def op_by_op(monkeypatch):
    """Have caches know the reference backend only."""
    return lambda: monkeypatch.setattr(choice, "cpu", lambda: None)


def a_cache(**settings: Any) -> H2OKVCache:
    return H2OKVCache(**{"budgets": (BUDGET, BUDGET), **settings})


def a_layer(batch: int = 1, seed: int = 0) -> TinyLayer:
    return TinyLayer(2, 3, 32, 32, batch=batch, seed=seed)


def call(cache: H2OKVCache, layer: TinyLayer, count: int, **options: Any) -> mx.array:
    """The next tokens at once."""
    q, k, v = layer.at(cache.offset, count)
    mask = "causal" if count > 1 else None
    return cache.attend(q, *cache.update_and_fetch(k, v), scale=layer.scale, mask=mask, **options)


def defined(cache: H2OKVCache, q: mx.array, scale: float, sinks: Any = None) -> np.ndarray:
    """The share of the last step by its definition, from the rows that it attended to."""
    assert cache.remainder is not None
    saturation = cache.settings.saturations(2)
    r = numpy_of(cache.remainder.column(q, scale, saturation))[..., 0]
    shares = []
    for head in range(2):
        keys = numpy_of(keys_of(cache, head))
        of_head = numpy_of(q)[:, 3 * head : 3 * head + 3, 0]
        logits = np.einsum("bgd,bnd->bgn", of_head, keys) * scale
        columns = [logits, r[:, 3 * head : 3 * head + 3, None]]
        if sinks is not None:
            own = numpy_of(sinks)[3 * head : 3 * head + 3]
            columns.append(np.broadcast_to(own[:, None], (*logits.shape[:2], 1)))
        whole = np.concatenate(columns, axis=-1)
        top = whole.max(-1, keepdims=True)
        lse = (top + np.log(np.exp(whole - top).sum(-1, keepdims=True)))[..., 0]
        shares.append(np.exp(columns[1][..., 0] - lse).mean(-1))
    return np.stack(shares, axis=-1)


def keys_of(cache: H2OKVCache, head: int) -> mx.array:
    """All keys that a head holds, `[B, N, D]`."""
    layer = cache.layer
    assert layer is not None
    run = next(run for run in layer.store.runs if run.first <= head < run.last)
    at = head - run.first
    fields = layer.store.views(run)
    keys = dense(layer.packing.rows("keys", fields))[:, at]
    if layer.window is not None:
        views = layer.window.views(head, head + 1, layer.offset)
        assert layer.packing.recent is not None
        newest = dense(layer.packing.recent.rows("keys", views))[:, 0]
        keys = mx.concatenate([keys, newest], axis=1)
    return keys.astype(mx.float32)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_a_steps_share_is_the_definitions(name, sinks, fused, op_by_op):
    if not fused:
        op_by_op()
    layer, cache = a_layer(batch=2), a_cache(**SETTINGS[name])
    own = {"sinks": mx.linspace(-1, 1, 6)} if sinks else {}
    call(cache, layer, PROMPT, **own)
    for _ in range(3):
        q, *_ = layer.at(cache.offset, 1)
        mx.eval(call(cache, layer, 1, **own))
        lent = cache.layer is not None and cache.layer.memory.decoder is not None
        assert lent == fused
        assert cache.unread is not None
        assert (cache.unread.shape, cache.unread.dtype) == ((2, 2), mx.float32)
        share = numpy_of(cache.unread)
        expected = defined(cache, q, layer.scale, **own)
        np.testing.assert_allclose(share, expected, rtol=1e-3, atol=1e-6)
        assert share.min() > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_a_chunks_share_is_its_last_querys(name):
    layer = a_layer()
    whole, before = (a_cache(**SETTINGS[name]) for _ in range(2))
    for cache in (whole, before):
        call(cache, layer, PROMPT)
    call(whole, layer, 8)
    # The chunk attends to all rows that were kept before it, and to itself.
    q, *_ = layer.at(whole.offset - 1, 1)
    remainder = before.remainder
    assert remainder is not None
    _, k, _ = layer.at(before.offset, 8)
    r = numpy_of(remainder.column(q, layer.scale, before.settings.saturations(2)))[..., 0]
    for head in range(2):
        keys = np.concatenate([numpy_of(keys_of(before, head)), numpy_of(k[:, head])], axis=1)
        logits = np.einsum("bgd,bnd->bgn", numpy_of(q)[:, 3 * head : 3 * head + 3, 0], keys)
        own = r[:, 3 * head : 3 * head + 3]
        rest = np.log(np.exp(logits * layer.scale).sum(-1))
        expected = np.exp(own - np.logaddexp(own, rest)).mean(-1)
        # New rows are attended to as they are stored.
        tolerance = 0.1 if "packed" in name else 1e-3
        np.testing.assert_allclose(numpy_of(whole.unread)[:, head], expected, rtol=tolerance)


def test_nothing_is_unread_before_an_eviction_and_nothing_is_told_without_tokens():
    layer, cache = a_layer(), a_cache()
    assert cache.unread is None
    assert cache.unread_mean is None
    call(cache, layer, 10)
    call(cache, layer, 1)
    for told in (cache.unread, cache.unread_mean):
        assert told is not None
        assert mx.array_equal(told, mx.zeros((1, 2)))


@pytest.mark.parametrize(
    "cache",
    [
        H2OKVCache(budgets=(BUDGET, BUDGET), remainder=False),
        H2OKVCache(budgets=(BUDGET, BUDGET), remainder=False, policy="streaming"),
    ],
    ids=["distinct", "streaming"],
)
def test_without_a_remainder_no_share_is_told(cache):
    layer = a_layer()
    call(cache, layer, PROMPT)
    call(cache, layer, 1)
    assert cache.unread is None
    assert cache.unread_mean is None


def test_a_model_that_attends_by_itself_tells_no_share():
    layer = a_layer()
    plain = PlainRowsKVCache(max_size=64, policy="streaming")
    _, k, v = layer.at(0, 80)
    plain.update_and_fetch(k, v)
    assert plain.unread is None
    assert LatentKVCache(max_size=64, remainder=False).unread is None


@pytest.mark.parametrize("fused", [True, False])
def test_the_mean_is_over_the_answers_tokens(fused, op_by_op):
    if not fused:
        op_by_op()
    layer, cache = a_layer(), a_cache()
    call(cache, layer, PROMPT)
    call(cache, layer, 8)
    shares = [numpy_of(cache.unread)]
    for _ in range(STEPS):
        call(cache, layer, 1)
        shares.append(numpy_of(cache.unread))
        np.testing.assert_allclose(numpy_of(cache.unread_mean), np.mean(shares, 0), rtol=1e-5)


@pytest.mark.parametrize("carry", [1.0, 0.5])
def test_a_chunk_and_a_new_turn_begin_another_answer(carry):
    layer, cache = a_layer(), a_cache()
    call(cache, layer, PROMPT)
    call(cache, layer, 1)
    cache.new_turn(carry)
    assert cache.unread_mean is None
    call(cache, layer, 1)
    assert mx.array_equal(cache.unread, cache.unread_mean)
    call(cache, layer, 2)
    assert mx.array_equal(cache.unread, cache.unread_mean)


def test_tokens_that_are_taken_back_count_no_more():
    layer, cache, twin = a_layer(), a_cache(undo=4), a_cache(undo=4)
    for one in (cache, twin):
        call(one, layer, PROMPT)
        for _ in range(30):
            call(one, layer, 1)
    call(cache, layer, 4)  # drafts, token by token
    assert not mx.array_equal(cache.unread, twin.unread)
    cache.trim(4)
    assert mx.array_equal(cache.unread, twin.unread)
    np.testing.assert_allclose(numpy_of(cache.unread_mean), numpy_of(twin.unread_mean), rtol=1e-6)


@pytest.mark.parametrize("undo", [0, 2])
def test_sequences_of_a_batch_tell_what_they_tell_alone(undo):
    layers = [a_layer(seed=seed) for seed in (1, 2, 3)]
    alone = [a_cache(undo=undo, budgets=(BUDGET + i, BUDGET)) for i in range(3)]
    for cache, layer, prompt in zip(alone, layers, (10, PROMPT, 60), strict=True):
        call(cache, layer, prompt)
    batch = BatchH2OKVCache.merge(alone)
    for _ in range(20):
        rows = [layer.at(cache.offset, 1) for cache, layer in zip(alone, layers, strict=True)]
        q, k, v = (mx.concatenate(list(parts)) for parts in zip(*rows, strict=True))
        mx.eval(batch.attend(q, *batch.update_and_fetch(k, v), scale=layers[0].scale))
        for cache, layer in zip(alone, layers, strict=True):
            call(cache, layer, 1)
    for name in ("unread", "unread_mean"):
        for of_batch, cache in zip(getattr(batch, name), alone, strict=True):
            assert mx.array_equal(of_batch, getattr(cache, name))
    assert numpy_of(alone[1].unread_mean).min() > 0


def test_copies_and_pickles_go_on_with_the_mean():
    layer, cache = a_layer(), a_cache()
    call(cache, layer, PROMPT)
    for _ in range(20):
        call(cache, layer, 1)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert mx.array_equal(other.unread_mean, cache.unread_mean)
        before = numpy_of(cache.unread_mean)
        call(other, layer, 1)
        assert np.array_equal(numpy_of(cache.unread_mean), before)
        assert not mx.array_equal(other.unread_mean, cache.unread_mean)


def test_reading_does_not_end_fused_steps():
    layer, cache = a_layer(), a_cache()
    call(cache, layer, PROMPT)
    mx.eval(call(cache, layer, 1))
    assert cache.layer is not None
    decoder = cache.layer.memory.decoder
    assert decoder is not None
    mx.eval(cache.unread, cache.unread_mean)
    assert cache.layer.memory.decoder is decoder
