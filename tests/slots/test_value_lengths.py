"""Lengths of values: each token has its own, however its row is stored and wherever it went.

Of dense values they are kept; of packed ones their scales tell them.
"""

import json
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import H2OKVCache, make_policy
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.slots.packed import JoinedRows, PackedRows, value_lengths
from tiny_models import TinyLayer

STORES = {
    "dense": {},
    "packed": {"bits": 2, "group_size": 32},
    "recent wider": {"bits": 2, "recent_bits": 8, "group_size": 32},
    "recent unpacked": {"bits": 4, "recent_bits": 16, "group_size": 32},
}


def layer_of(dtype: mx.Dtype = mx.float32) -> TinyLayer:
    return TinyLayer(heads=2, group=2, key_width=64, value_width=32, dtype=dtype)


def salient(store: str, budgets=(24, 33), **settings) -> H2OKVCache:
    return H2OKVCache(budgets=list(budgets), policy="salient", **STORES[store], **settings)


def assert_each_has_its_own(cache: H2OKVCache, layer: TinyLayer) -> None:
    """Slots and recent window: the length of the value at each position held."""
    packed = cache.packing.v_bits is not None
    # What is packed in one width and comes into another may lose a part of its range.
    near = 0.6 if packed else 1e-3
    values = layer.tokens[2]
    own = np.array(value_lengths(values)).astype(np.float64)
    if packed:
        groups = values.astype(mx.float32).reshape(*values.shape[:-1], -1, cache.packing.group_size)
        ranges = groups.max(axis=-1) - groups.min(axis=-1)
        own = np.log(np.square(np.array(ranges)).sum(axis=-1))
    for run in cache.store.runs:
        slots = cache.slots(run)
        for head in range(run.heads):
            positions = np.array(slots.positions[:, head])
            # Of an unpacked recent window lengths are measured, and never ranked by.
            ranked = run.length if packed else positions.shape[1]
            for b, held in enumerate(np.array(slots.value_lengths[:, head, :ranked])):
                expected = own[b, run.first + head, positions[b, :ranked]]
                # One rounding to half precision may go the other way.
                np.testing.assert_allclose(held, expected, rtol=1e-3, atol=near)
    names = {name for name in cache.arrays() if name.endswith("value_lengths")}
    assert names == (set() if packed else {"slots.value_lengths"})


def test_a_length_is_the_logarithm_of_the_square():
    v = mx.array([[3.0, 4.0], [0.0, 0.0], [0.0, 1.0]])
    expected = mx.log(mx.array([25.0, 1e-12, 1.0])).astype(mx.float16)
    assert mx.array_equal(value_lengths(v), expected)


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_of_packed_values_the_ranges_of_groups_are_measured(bits):
    v = mx.random.normal((3, 7, 64))
    packed = PackedRows.of(v, bits, 32)
    groups = v.reshape(3, 7, 2, 32)
    ranges = groups.max(axis=-1) - groups.min(axis=-1)
    expected = mx.log(mx.square(ranges).sum(axis=-1))
    np.testing.assert_allclose(value_lengths(packed), expected, atol=1e-4)
    both = value_lengths(JoinedRows((packed[None], v[None])))
    np.testing.assert_allclose(both[0, :, :7], expected, atol=1e-4)
    np.testing.assert_allclose(both[0, :, 7:], value_lengths(v), atol=1e-6)
    assert mx.isfinite(value_lengths(PackedRows.of(mx.zeros((2, 32)), bits, 32))).all().item()


@pytest.mark.few(4)
@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "reference"])
@pytest.mark.parametrize("store", STORES)
def test_every_token_has_its_own_value_s_length(store, reference):
    """Through prompts, steps, evictions, drafts taken back, files and other budgets."""
    layer, cache = layer_of(mx.float16), salient(store, undo=3)
    with only_reference() if reference else nullcontext():
        for count, chunk in ((20, 20), (30, 1), (40, 10), (20, 1)):
            layer.feed(cache, count, chunk)
            assert_each_has_its_own(cache, layer)
        assert cache.trim(2) == 2
        assert_each_has_its_own(cache, layer)
        layer.feed(cache, 8)
        cache = H2OKVCache.from_state(cache.state)
        layer.feed(cache, 8)
        cache.resize([20, 28])
        layer.feed(cache, 8)
    assert cache.evicted > 0
    assert_each_has_its_own(cache, layer)


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_the_kernels_rank_by_the_ranges_of_all_groups(width, dtype):
    """By nothing else here, so that a group left out would choose others."""
    layer = TinyLayer(heads=2, group=2, key_width=32, value_width=width, dtype=dtype)
    policy = make_policy("salient", value_weight=30.0, distance_weight=0.0, age_weight=0.0)
    held = []
    for reference in (False, True):
        with only_reference() if reference else nullcontext():
            cache = H2OKVCache(budgets=[24, 33], policy=policy, bits=4, group_size=32)
            layer.feed(cache, 20, 20)
            layer.feed(cache, 80)
            held.append([np.sort(np.array(cache.slots(run).positions)) for run in cache.store.runs])
    for kernels, definition in zip(*held, strict=True):
        assert np.array_equal(kernels, definition)


@pytest.mark.parametrize(
    "damage",
    [
        lambda lengths: lengths.astype(mx.float32),
        lambda lengths: lengths[:, :-1],
        lambda lengths: lengths[..., None],
    ],
    ids=["dtype", "fewer", "rank"],
)
def test_damaged_lengths_are_refused(damage):
    layer, cache = layer_of(), salient("dense")
    layer.feed(cache, 40, 10)
    arrays, config = cache.state
    name = "slots.value_lengths"
    with pytest.raises(ValueError, match=name):
        H2OKVCache.from_state((arrays | {name: damage(arrays[name])}, config))


def test_other_policies_keep_none():
    layer, cache = layer_of(), H2OKVCache(24, policy="distinct")
    layer.feed(cache, 30)
    assert "slots.value_lengths" not in cache.arrays()
    arrays, text = cache.state
    unknown = arrays | {"slots.value_lengths": mx.zeros((1, 48), mx.float16)}
    with pytest.raises(ValueError, match="too many"):
        H2OKVCache.from_state((unknown, text))
    assert json.loads(text)["policy"]["name"] == "distinct"


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("undo", [0, 3])
def test_lengths_are_counted(store, undo):
    """A size in bytes holds with them, in slots, in the window and in steps to undo."""
    layer = layer_of()
    for max_bytes in (20_000, 31_234):
        cache = H2OKVCache(max_bytes=max_bytes, policy="salient", undo=undo, **STORES[store])
        layer.feed(cache, 200, 50)
        layer.feed(cache, 5)
        assert 0.8 * max_bytes < cache.nbytes <= max_bytes
