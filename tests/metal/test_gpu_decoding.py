"""A cache that decodes with the kernels keeps what the reference keeps, and answers alike."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from harness import recorded

from mlx_h2o import H2OKVCache, make_policy
from mlx_h2o.attention.backends import choice
from mlx_h2o.attention.backends.choice import accepts
from mlx_h2o.attention.backends.gpu import METAL
from mlx_h2o.attention.backends.gpu_decoder import GPUDecoder
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.layer.step import prove_fused
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.slot_store import FEW, WIDE

B, HK, G, D, DV = 1, 2, 2, 64, 32


@pytest.fixture
def on_device(monkeypatch):
    """Choose between the kernels and the reference."""

    def choose(kernels):
        monkeypatch.setattr(choice, "gpu", lambda: METAL if kernels else None)
        monkeypatch.setattr(choice, "cpu", lambda: None)

    return choose


def tokens(seed, L, batch=B, heads=HK, dtype=mx.float32, value_width=DV):
    """q, k, v of L tokens; keys lie off the origin, so that the remainder matters."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, heads * G, L, D), (batch, heads, L, D), (batch, heads, L, value_width)]
    q, k, v = (mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    return tuple(x.astype(dtype) for x in (1.5 * q, k + 0.5, v))


def attend(cache, rows, sinks=None):
    q, k, v = rows
    return cache.attend(q, *cache.update_and_fetch(k, v), scale=D**-0.5, sinks=sinks)


def trajectory(cache, prompt, steps, sinks=None, **shape):
    """Outputs of a prompt chunk and of steps."""
    outs = [attend(cache, tokens(0, prompt, **shape), sinks)]
    outs += [attend(cache, tokens(1 + i, 1, **shape), sinks) for i in range(steps)]
    mx.eval(outs)
    return mx.concatenate(outs[1:], axis=2)


def kept(cache):
    """Positions of each head, sorted."""
    views = [cache.store.view(run, "positions") for run in cache.store.runs]
    return [np.sort(np.array(head)) for view in views for rows in view for head in rows]


def assert_alike(ours, theirs, outs, tolerance=1e-4):
    assert all(map(np.array_equal, kept(ours), kept(theirs)))
    np.testing.assert_allclose(*(np.array(out.astype(mx.float32)) for out in outs), atol=tolerance)
    for name, array in theirs.remainder.arrays.items():
        np.testing.assert_allclose(
            ours.remainder.arrays[name], array, rtol=10 * tolerance, atol=tolerance
        )
    if "scores" in theirs.store.fields:
        for run in theirs.store.runs:
            order = [np.argsort(np.array(c.store.view(run, "positions"))) for c in (ours, theirs)]
            scores = [np.array(c.store.view(run, "scores")) for c in (ours, theirs)]
            sorted_scores = map(np.take_along_axis, scores, order, (-1, -1))
            np.testing.assert_allclose(*sorted_scores, rtol=1e-3, atol=tolerance)


def both(on_device, prompt, steps, sinks=None, policy="distinct", settings=None, shape=None, **c):
    """The same trajectory by the kernels and by the reference."""
    caches, outs = [], []
    for kernels in (True, False):
        on_device(kernels)
        cache = H2OKVCache(policy=make_policy(policy, **(settings or {})), **c)
        outs.append(trajectory(cache, prompt, steps, sinks, **(shape or {})))
        assert isinstance(cache.layer.decoder, GPUDecoder) == kernels
        caches.append(cache)
    on_device(True)
    return *caches, outs


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("distinct", {}),
        ("distinct", {"mass_weight": 0.0, "evict_every": 3}),
        ("distinct", {"unit": "layer"}),
        ("distinct", {"value_weighted": True}),
        ("salient", {}),
        ("salient", {"unit": "layer", "evict_every": 2, "value_weight": 1.0}),
        ("h2o", {"age_normalised": True, "evict_every": 4}),
        ("ema", {"unit": "layer"}),
        ("ema-logits", {}),
        ("tova", {}),
        ("streaming", {}),
        ("keydiff", {}),
    ],
)
def test_trajectories(on_device, policy, settings):
    """From below the budget to far beyond it."""
    assert_alike(*both(on_device, 12, 40, policy=policy, settings=settings, budgets=[24, 24]))


def test_values_of_several_groups_are_ranked_by_all_of_them(on_device):
    """By nothing else here, so that a group left out would choose others."""
    settings = {"value_weight": 30.0, "distance_weight": 0.0, "age_weight": 0.0}
    ours, theirs, _ = both(
        on_device, 12, 40, policy="salient", settings=settings, shape={"value_width": 64},
        budgets=[24, 24], bits=4, group_size=32,
    )  # fmt: skip
    assert all(map(np.array_equal, kept(ours), kept(theirs)))


def test_positions_of_more_tokens_than_16_bits_hold(on_device):
    """Narrow up to there and wide from then on, as the reference has them."""
    held = []
    for kernels in (True, False):
        on_device(False)
        cache = H2OKVCache(policy="h2o", budgets=[24, 24])
        for chunk in range(0, FEW - 6, 2048):
            attend(cache, tokens(chunk, min(2048, FEW - 6 - chunk)))
        on_device(kernels)
        for i in range(12):
            mx.eval(attend(cache, tokens(i, 1)))
            assert isinstance(cache.layer.decoder, GPUDecoder) == kernels
        held.append(cache)
    dtype = held[0].arrays()["slots.positions"].dtype
    assert dtype == WIDE
    assert all(map(np.array_equal, kept(held[0]), kept(held[1])))
    assert all(head[-1] == FEW + 5 for head in kept(held[0]))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_narrow_rows(on_device, dtype):
    tolerance = {mx.float16: 4e-3, mx.bfloat16: 3e-2}[dtype]
    ours = both(on_device, 12, 30, policy="streaming", shape={"dtype": dtype}, budgets=[24, 24])
    assert_alike(*ours, tolerance)


def test_heads_with_budgets_of_their_own(on_device):
    """Some heads are full long before others, and one has hardly any slots."""
    assert_alike(*both(on_device, 10, 40, budgets=[16, 30]))
    assert_alike(*both(on_device, 3, 12, policy="streaming", budgets=[6, 40]))


def test_saturation_of_each_head(on_device):
    """First order in one head, a small t in the other; both are heard."""
    settings = {"budgets": [24, 24], "saturation": [0.0, 0.5]}
    ours, theirs, outs = both(on_device, 12, 30, policy="h2o", **settings)
    assert_alike(ours, theirs, outs)
    _, _, (usual, _) = both(on_device, 12, 30, policy="h2o", budgets=[24, 24])
    apart = np.abs(np.array(outs[0] - usual)).max(axis=(0, 2, 3))
    assert apart.min() > 1e-3


def test_no_remainder(on_device):
    assert_alike(*both(on_device, 12, 30, budgets=[24, 24], remainder=False))
    assert_alike(*both(on_device, 12, 30, policy="h2o", budgets=[24, 24], remainder=False))


def test_attention_sinks_and_batches(on_device):
    sinks = mx.array([0.5, -1.0, 2.0, 0.0])
    assert_alike(*both(on_device, 12, 30, sinks, budgets=[20, 20], shape={"batch": 2}))


def test_growth(on_device):
    """Past the slots that are allocated at first."""
    assert_alike(*both(on_device, 250, 15, budgets=[262, 262]))


def test_a_chunk_between(on_device):
    """Looking at the cache, and a prompt chunk, take the arrays back and forth."""
    ours, theirs, _ = both(on_device, 12, 20, budgets=[24, 24])
    outs = []
    for cache, kernels in ((ours, True), (theirs, False)):
        on_device(kernels)
        kept(cache)
        attend(cache, tokens(100, 5))
        outs.append(mx.concatenate([attend(cache, tokens(101 + i, 1)) for i in range(8)], axis=2))
    on_device(True)
    assert_alike(ours, theirs, outs)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [("salient", {"sink": 0}), ("h2o", {"sink": 2, "age_normalised": True}), ("keydiff", {})],
)
def test_pins_and_a_turn(on_device, policy, settings):
    """Pinned tokens stay, and ages count from where the turn says."""
    caches, outs = [], []
    for kernels in (True, False):
        on_device(kernels)
        cache = H2OKVCache(budgets=[24, 30], policy=make_policy(policy, **settings))
        cache.pin([(0, 5), (20, 22)])
        attend(cache, tokens(0, 12))
        steps = [attend(cache, tokens(1 + i, 1)) for i in range(20)]
        cache.new_turn(0.25)
        steps += [attend(cache, tokens(21 + i, 1)) for i in range(20)]
        mx.eval(steps)
        caches.append(cache)
        outs.append(mx.concatenate(steps, axis=2))
    on_device(True)
    assert_alike(*caches, outs)
    for head in kept(caches[0]):
        assert {-1 - p for p in (*range(5), 20, 21)} <= set(head.tolist())


def test_arrays_held_elsewhere_never_see_what_is_written_in_place(on_device):
    """Arrays that were given out before, and twins, keep their values."""
    on_device(True)
    cache = H2OKVCache(budgets=[24, 24])
    trajectory(cache, 12, 30)
    seen = cache.arrays()
    twin = copy.deepcopy(cache)
    before = {name: np.array(array) for name, array in seen.items()}
    for i in range(5):
        attend(cache, tokens(50 + i, 1))
    for name, array in before.items():
        assert np.array_equal(np.array(seen[name]), array)
        assert np.array_equal(np.array(twin.arrays()[name]), array)


def test_kernels_that_cannot_write_in_place_are_not_used(on_device, monkeypatch):
    on_device(True)
    monkeypatch.setattr("mlx_h2o.attention.backends.gpu_decoder.writes_in_place", lambda _: False)
    k, v = mx.zeros((1, 1, 1, D)), mx.zeros((1, 1, 1, DV))
    settings = CacheSettings(24, policy=make_policy("h2o"))
    assert not accepts(settings, AttentionCall(k, 1.0), k, v, prove_fused)


def test_another_device_takes_over(on_device):
    """Once the default device is the CPU again, its backend goes on where the kernels were."""
    ours, theirs, outs = both(on_device, 12, 20, budgets=[24, 24])
    on_device(False)
    outs = [
        mx.concatenate([attend(cache, tokens(50 + i, 1)) for i in range(8)], axis=2)
        for cache in (ours, theirs)
    ]
    assert_alike(ours, theirs, outs)


def test_the_backend_of_the_default_device(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert choice.gpu() is METAL
    assert choice.backend() is METAL


@pytest.mark.parametrize(
    ("policy", "settings", "store"),
    [
        ("distinct", {}, {"bits": 8}),
        ("salient", {}, {"bits": 6}),
        ("h2o", {"value_weighted": True}, {"k_bits": 5, "v_bits": 3}),
        ("keydiff", {}, {"k_bits": 8, "v_bits": 2}),
    ],
)
def test_packed_rows(on_device, policy, settings, store):
    """Rows are packed as they come, by the kernel as by the reference."""
    store |= {"group_size": 32, "budgets": [24, 30]}
    ours, theirs, outs = both(on_device, 12, 40, policy=policy, settings=settings, **store)
    assert_alike(ours, theirs, outs)
    for run in theirs.store.runs:
        order = [np.argsort(np.array(c.store.view(run, "positions"))) for c in (ours, theirs)]
        for name in ("keys", "keys.scales", "values"):
            rows = [np.array(c.store.view(run, name)) for c in (ours, theirs)]
            assert np.array_equal(
                *(np.take_along_axis(x, o[..., None], 2) for x, o in zip(rows, order, strict=True))
            )
    assert ours.nbytes == theirs.nbytes


@pytest.mark.parametrize(
    ("policy", "dtype", "tolerance"),
    [("distinct", mx.float32, 1e-4), ("salient", mx.float32, 1e-4), ("keydiff", mx.float16, 4e-3)],
)
def test_rows_in_a_frame(on_device, policy, dtype, tolerance):
    """Keys and queries enter it in the kernels as they do at the reference's door."""
    centre = 3 * mx.random.normal((HK, D))
    store = {"frame": Frame(centre, mx.exp(mx.random.normal((HK, D)))), "bits": 8}
    store |= {"group_size": 32, "budgets": [24, 30]}
    shape = {"batch": 2, "dtype": dtype}
    ours, theirs, outs = both(on_device, 12, 40, policy=policy, shape=shape, **store)
    assert_alike(ours, theirs, outs, tolerance)
    assert ours.nbytes == theirs.nbytes
    plain = both(on_device, 12, 40, policy=policy, shape=shape, **(store | {"frame": None}))
    assert mx.abs(outs[0] - plain[2][0]).max() > 10 * tolerance


def test_packed_rows_with_sinks_and_a_chunk_between(on_device):
    sinks = mx.array([0.5, -1.0, 2.0, 0.0])
    store = {"bits": 8, "v_bits": 4, "group_size": 32, "budgets": [20, 20]}
    shape = {"batch": 2, "dtype": mx.float16}
    ours, theirs, outs = both(on_device, 12, 25, sinks, "streaming", shape=shape, **store)
    assert_alike(ours, theirs, outs, 4e-3)
    outs = []
    for cache, kernels in ((ours, True), (theirs, False)):
        on_device(kernels)
        attend(cache, tokens(100, 12, **shape), sinks)
        steps = [attend(cache, tokens(101 + i, 1, **shape), sinks) for i in range(8)]
        outs.append(mx.concatenate(steps, axis=2))
    on_device(True)
    assert_alike(ours, theirs, outs, 4e-3)


def test_a_recent_zone(on_device, monkeypatch):
    """No fused step; each of the two stores is read packed, in an attention of its own."""
    store = {"bits": 8, "recent_bits": 4, "group_size": 32, "budgets": [24, 24]}
    outs, caches = [], []
    for kernels in (True, False):
        on_device(kernels)
        with monkeypatch.context() as patch:
            if kernels:
                patch.setattr("mlx_h2o.attention.ops.backend", lambda: METAL)
            cache = H2OKVCache(policy=make_policy("h2o"), **store)
            with recorded() as launches:
                outs.append(trajectory(cache, 12, 30))
        assert cache.layer.decoder is None
        assert kernels == any("attention_vector" in counts.kernel for counts in launches)
        caches.append(cache)
    assert_alike(*caches, outs)
