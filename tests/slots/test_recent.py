"""Mixed widths: the newest tokens in a ring of their own."""

from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest

from arrays import numpy_of
from mlx_h2o import H2OKVCache, load, make_prompt_cache
from mlx_h2o.attention.backends import reference
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.attention.ops import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_mass,
    scaled_dot_product_attention_with_scores,
)
from mlx_h2o.policies import make_policy
from mlx_h2o.slots.packed import BITS, UNPACKED, JoinedRows, PackedRows
from tiny_models import TinyLayer, kept_positions

LAYER = TinyLayer(heads=2, group=2, key_width=64, value_width=32)
#: Chunks and steps: a prompt beyond the budget, decoding, chunks smaller and larger than the zone.
FEEDS = ((50, 25), (70, 1), (3, 3), (20, 1), (30, 30), (25, 1))


def mixed(budgets=(32, 32), policy="distinct", **packing) -> H2OKVCache:
    policy = make_policy(policy, recent=0.25 if policy == "streaming" else None)
    return H2OKVCache(budgets=list(budgets), policy=policy, group_size=32, **packing)


# -- rows in another width ------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("bits", "wider"), [(bits, wider) for bits in BITS for wider in BITS if wider >= bits]
)
def test_rows_in_more_bits_are_the_same_numbers(bits, wider, dtype):
    rows = PackedRows.of(mx.random.normal((2, 7, 128)).astype(dtype), bits, 64)
    moved = rows.with_bits(wider)
    assert moved.bits == wider
    assert mx.array_equal(moved.dequantized(), rows.dequantized())


@pytest.mark.pairwise
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(
    ("bits", "fewer"), [(bits, fewer) for bits in BITS for fewer in BITS if fewer < bits]
)
def test_rows_in_fewer_bits_err_no_more_than_packing_anew(bits, fewer, group_size):
    x = mx.random.normal((3, 40, 128))
    moved = PackedRows.of(x, bits, group_size).with_bits(fewer)
    groups = numpy_of(x).reshape(-1, group_size)
    span = (groups.max(axis=1) - groups.min(axis=1))[:, None]
    error = np.abs(numpy_of(moved.dequantized()).reshape(groups.shape) - groups)
    # Half an interval of the first packing, and half of one of 2^fewer over the same levels.
    levels = 2**bits / (2**bits - 1)
    bound = 0.5 * span * (levels / 2**fewer)
    assert (error <= 1.0001 * bound).all()
    # Packing anew errs by half of 2^fewer - 1 intervals.
    assert (bound <= 0.5 * span / (2**fewer - 1)).all()


def test_moving_keeps_what_was_written():
    """8 bits out of 4 hold the same levels, scale and bias."""
    x = mx.random.normal((5, 64)).astype(mx.bfloat16)
    four, eight = PackedRows.of(x, 4, 32), PackedRows.of(x, 4, 32).with_bits(8)
    levels = numpy_of(eight.words.view(mx.uint8)).reshape(5, 64)
    nibbles = numpy_of(four.words.view(mx.uint8)).astype(int)
    assert (levels[:, 0::2] == nibbles % 16).all()
    assert (levels[:, 1::2] == nibbles // 16).all()
    assert mx.array_equal(four.scales, eight.scales)


# -- attention over joined rows -------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("mask", [None, "causal", "boolean", "additive"])
@pytest.mark.parametrize(("L", "first", "second"), [(1, 40, 9), (5, 40, 9), (9, 33, 3), (6, 0, 30)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_joined_rows_are_attended_as_one(mask, L, first, second, dtype):
    N = first + second
    q = mx.random.normal((2, 6, L, 64)).astype(dtype)
    k, v = (mx.random.normal((2, 3, N, width)).astype(dtype) for width in (64, 32))
    if mask == "boolean":
        mask = mx.random.uniform(shape=(L, N)) < 0.6
    elif mask == "additive":
        mask = mx.random.normal((2, 1, L, N)).astype(dtype)
    sinks = mx.random.normal((6,))
    seed = mx.random.normal((2, 6, L)), mx.random.normal((2, 3, 32))
    joined = [
        JoinedRows((PackedRows.of(rows[:, :, :first], bits, 32), rows[:, :, first:]))
        for rows, bits in ((k, 8), (v, 4))
    ]
    call = {"scale": 0.125, "mask": mask, "sinks": sinks, "seed": seed}
    expected = reference.attention_with_scores(
        q.astype(mx.float32), *(rows.dequantized() for rows in joined), **call
    )
    tolerance = 1e-5 if dtype == mx.float32 else 2e-3
    out, scores, lse = scaled_dot_product_attention_with_scores(q, *joined, **call)
    assert out.dtype == dtype
    for got, want in ((out, expected[0]), (lse, expected[2])):
        np.testing.assert_allclose(numpy_of(got), numpy_of(want), atol=tolerance)
    np.testing.assert_allclose(numpy_of(scores), numpy_of(expected[1]), atol=tolerance)
    alone = scaled_dot_product_attention(q, *joined, **call)
    np.testing.assert_allclose(numpy_of(alone), numpy_of(expected[0]), atol=tolerance)
    _, mass, _ = scaled_dot_product_attention_with_mass(q, *joined, **call)
    want = reference.attention_mass(expected[1], expected[2], 3)
    np.testing.assert_allclose(numpy_of(mass), numpy_of(want), atol=tolerance)


def test_rows_joined_differently_are_refused():
    q, x = mx.zeros((1, 1, 1, 32)), mx.zeros((1, 1, 8, 32))
    k, v = JoinedRows((x, x)), JoinedRows((x[:, :, :4], mx.zeros((1, 1, 12, 32))))
    with pytest.raises(ValueError, match="need joined values"):
        scaled_dot_product_attention(q, k, v, scale=1.0)


# -- caches ---------------------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "policy", ["distinct", "salient", "h2o", "keydiff", "streaming", "tova", "ema"]
)
@pytest.mark.parametrize("budgets", [(32, 32), (24, 40)], ids=str)
@pytest.mark.parametrize("packing", [{"bits": 8}, {"k_bits": 8, "v_bits": 4}], ids=str)
def test_a_zone_of_the_same_width_changes_nothing(packing, budgets, policy):
    """Where rows lie is no matter: the same tokens stay, and the outputs agree."""
    plain = mixed(budgets, policy, **packing)
    zoned = mixed(budgets, policy, **packing, recent_bits=8)
    if "v_bits" in packing:  # 4 bits cannot be restored, so the zone must not have more
        zoned = mixed(budgets, policy, k_bits=8, v_bits=4, recent_bits=4)
        plain = mixed(budgets, policy, k_bits=4, v_bits=4)
    for count, chunk in FEEDS[: 2 if "v_bits" in packing else None]:
        if "v_bits" in packing and chunk > 1:
            count, chunk = 50, 1
        a, b = LAYER.feed(plain, count, chunk), LAYER.feed(zoned, count, chunk)
        np.testing.assert_allclose(numpy_of(a), numpy_of(b), atol=2e-5)
        assert kept_positions(plain) == kept_positions(zoned)
        assert plain.size() == zoned.size()
        assert plain.evicted == zoned.evicted
        np.testing.assert_allclose(
            numpy_of(plain.remainder.mean_key), numpy_of(zoned.remainder.mean_key), atol=1e-5
        )


@pytest.mark.parametrize("recent_bits", [UNPACKED, 8, 4])
@pytest.mark.parametrize("budgets", [(32, 32), (24, 40)], ids=str)
def test_each_row_is_what_its_way_made_of_it(recent_bits, budgets):
    """The ring holds rows as they came; a kept row was quantized once and moved by its levels."""
    cache = mixed(budgets, "h2o", bits=8 if recent_bits == 4 else 4, recent_bits=recent_bits)
    LAYER.feed(cache, 130)
    offset, bits = cache.offset, cache.packing.k_bits
    for run in cache.store.runs:
        fields, slots = cache.store.views(run), cache.slots(run)
        kept = run.length
        assert slots.positions.shape[2] == kept + cache.layer.window.size
        assert sorted(slots.positions[0, 0, kept:].tolist()) == list(
            range(offset - cache.layer.window.size, offset)
        )
        for name, rows in zip(("keys", "values"), LAYER.tokens[1:], strict=True):
            held = slots.keys if name == "keys" else slots.values
            for head in range(run.heads):
                came = mx.take(rows[0, run.first + head], slots.positions[0, head], axis=0)
                old, new = came[:kept], came[kept:]
                if recent_bits == UNPACKED:
                    assert mx.array_equal(held[0, head, kept:], new)
                    expected = PackedRows.of(old, bits, 32)
                else:
                    recent = PackedRows.of(new, recent_bits, 32).dequantized()
                    assert mx.array_equal(held[0, head, kept:], recent)
                    expected = PackedRows.of(old, recent_bits, 32).with_bits(bits)
                got = cache.packing.rows(name, fields)
                assert mx.array_equal(got.words[0, head], expected.words)
                assert mx.array_equal(got.scales[0, head], expected.scales)
                assert mx.array_equal(got.biases[0, head], expected.biases)


def test_a_wider_zone_makes_the_newest_tokens_exact():
    outs = {}
    for name, packing in {
        "dense": {},
        "4 and 16": {"bits": 4, "recent_bits": UNPACKED},
        "4 and 8": {"bits": 4, "recent_bits": 8},
        "4": {"bits": 4},
    }.items():
        policy = make_policy("streaming", recent=16)
        cache = H2OKVCache(64, policy=policy, remainder=False, group_size=32, **packing)
        outs[name] = numpy_of(LAYER.feed(cache, 200, 1))
    errors = {name: np.abs(out - outs["dense"]).mean() for name, out in outs.items()}
    assert 0 < max(errors["4 and 16"], errors["4 and 8"]) < 0.95 * errors["4"]


@pytest.mark.parametrize("policy", ["h2o:evict_every=4", "h2o:unit=layer"])
def test_evict_every_and_layers_choose_from_the_kept(policy):
    zoned, plain = (
        H2OKVCache(budgets=[32, 32], policy=policy, group_size=32, bits=8, recent_bits=recent)
        for recent in (8, None)
    )
    for count, chunk in FEEDS:
        a, b = LAYER.feed(plain, count, chunk), LAYER.feed(zoned, count, chunk)
        np.testing.assert_allclose(numpy_of(a), numpy_of(b), atol=2e-5)
        assert kept_positions(plain) == kept_positions(zoned)


def test_tokens_can_be_taken_back_from_the_zone_and_beyond():
    zoned, plain = mixed(bits=8, recent_bits=8), mixed(bits=8)
    for cache in (zoned, plain):
        LAYER.feed(cache, 20, 5)
        assert cache.trim(2) == 2
        LAYER.feed(cache, 5, 1)
        assert cache.trim(15) == 15
        assert cache.offset == 8
    outs = [LAYER.feed(cache, 60, 1) for cache in (zoned, plain)]
    np.testing.assert_allclose(numpy_of(outs[0]), numpy_of(outs[1]), atol=2e-5)
    assert kept_positions(zoned) == kept_positions(plain)
    with pytest.raises(ValueError, match="Cannot take back 1 tokens"):
        zoned.trim(1)


@pytest.mark.parametrize("sizes", [(20, 48), (48, 20), ((20, 40), 24), ((48, 48), 12)], ids=str)
def test_budgets_change(sizes):
    zoned, plain = mixed(bits=8, recent_bits=8), mixed(bits=8)
    LAYER.feed(zoned, 60, 20)
    LAYER.feed(plain, 60, 20)
    for size in sizes:
        for cache in (zoned, plain):
            cache.resize(size)
        outs = [LAYER.feed(cache, 70, 1) for cache in (zoned, plain)]
        np.testing.assert_allclose(numpy_of(outs[0]), numpy_of(outs[1]), atol=3e-5)
        assert kept_positions(zoned) == kept_positions(plain)


def test_a_state_once_taken_stays_as_it_was():
    with only_reference():
        cache = mixed(bits=8, recent_bits=UNPACKED)
        LAYER.feed(cache, 60)
        taken, _ = cache.state
        before = {name: numpy_of(array) for name, array in taken.items()}
        LAYER.feed(cache, 5)
        for name, array in taken.items():
            np.testing.assert_array_equal(numpy_of(array), before[name], err_msg=name)


def test_a_file_with_too_few_recent_tokens_is_refused():
    cache = mixed(bits=8, recent_bits=UNPACKED)
    LAYER.feed(cache, 80)
    arrays, text = cache.state
    arrays["recent.keys"] = arrays["recent.keys"][:, :, :3]
    with pytest.raises(ValueError, match="rows of the recent window must be at least"):
        H2OKVCache.from_state((arrays, text))


def test_bytes_are_those_held():
    held = {}
    for recent_bits in (None, 4, UNPACKED):
        cache = H2OKVCache(64, group_size=32, bits=8, recent_bits=recent_bits)
        LAYER.feed(cache, 200)
        assert cache.nbytes == sum(array.nbytes for array in cache.arrays().values())
        held[recent_bits] = cache.nbytes
    assert held[4] < held[None] < held[UNPACKED]
    for recent_bits in (None, 4, UNPACKED):
        cache = H2OKVCache(max_bytes=50_000, group_size=32, bits=8, recent_bits=recent_bits)
        LAYER.feed(cache, 500)
        assert 40_000 < cache.nbytes <= 50_000


def test_a_model_decodes_with_it():
    model, _ = load("builtin:recall-4m")
    cache = make_prompt_cache(model, 64, bits=8, group_size=32, recent_bits=UNPACKED)
    model(mx.arange(100)[None], cache=cache)
    for token in range(40):
        logits = model(mx.array([[token]]), cache=cache)
    assert mx.isfinite(logits).all()
    assert cache[0].evicted > 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"recent_bits": 8}, "needs bits"),
        ({"bits": 4, "recent_bits": 7}, "recent_bits must be 2, 3"),
        ({"policy": "h2o:recent=0", "bits": 4, "recent_bits": 8}, "protects none"),
    ],
)
def test_what_cannot_be_is_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        LAYER.feed(H2OKVCache(32, **settings), 3)


# -- fused steps ----------------------------------------------------------------------------------


# What is rare, the narrow dtype and the long zone, goes with these policies alone.
FUSED = [
    (budgets, policy, dtype)
    for budgets in ((32, 32), (24, 40), (320, 40))
    for policy in ("distinct", "salient", "h2o", "keydiff", "tova", "ema", "ema-logits")
    for dtype in (mx.float32, mx.bfloat16)
    if policy in ("distinct", "ema-logits") or (dtype == mx.float32 and max(budgets) < 100)
]


@pytest.mark.few(4)
@pytest.mark.pairwise
@pytest.mark.parametrize(("budgets", "policy", "dtype"), FUSED, ids=str)
@pytest.mark.parametrize(
    "packing",
    [
        {"bits": 8, "recent_bits": UNPACKED},
        {"bits": 4, "recent_bits": 8},
        {"k_bits": 6, "v_bits": 3, "recent_bits": 5},
        {"v_bits": 8, "recent_bits": 4},
    ],
    ids=str,
)
def test_fused_steps_do_what_the_reference_does(packing, budgets, policy, dtype):
    """From the first token on, through the filling of the zone, chunks between steps included."""
    layer = TinyLayer(heads=2, group=2, key_width=64, value_width=32, dtype=dtype)
    feeds = ((90, 1), (30, 30), (60, 1)) if max(budgets) < 100 else ((380, 380), (40, 1))

    def fed() -> tuple[list[mx.array], H2OKVCache]:
        cache = mixed(budgets, policy, **packing)
        return [layer.feed(cache, count, chunk) for count, chunk in feeds], cache

    got, fused = fed()
    fused_arrays = fused.arrays()
    with only_reference():
        expected, plain = fed()
    assert kept_positions(fused) == kept_positions(plain)
    for a, b in zip(got, expected, strict=True):
        atol = 3e-5 if dtype == mx.float32 else 2e-2
        np.testing.assert_allclose(numpy_of(a), numpy_of(b), atol=atol)
    assert fused.config() == plain.config()
    for name, array in plain.arrays().items():
        assert fused_arrays[name].shape == array.shape, name
        if not name.startswith(("slots.scores", "recent.scores", "victims", "remainder")):
            continue
        atol = 2e-4 if dtype == mx.float32 else 2e-2
        np.testing.assert_allclose(
            numpy_of(fused_arrays[name]), numpy_of(array), atol=atol, rtol=1e-3, err_msg=name
        )
    for run in plain.store.runs:
        a, b = fused.store.views(run), plain.store.views(run)
        order = [np.argsort(np.array(x["positions"])[0], axis=-1) for x in (a, b)]
        for name in a:
            if name == "scores":
                continue
            for head in range(run.heads):
                left = np.array(a[name].astype(mx.float32))[0, head][order[0][head]]
                right = np.array(b[name].astype(mx.float32))[0, head][order[1][head]]
                np.testing.assert_array_equal(left, right, err_msg=name)


def test_it_is_the_fused_step_that_decodes():
    cache = mixed(bits=8, recent_bits=UNPACKED)
    LAYER.feed(cache, 60, 20)
    LAYER.feed(cache, 3)
    assert cache.layer.decoder is not None
    held = cache.nbytes
    assert held == sum(array.nbytes for array in cache.arrays().values())


def test_bits_do_not_depend_on_the_number_of_threads():
    from mlx_h2o import _ext

    before, outs = _ext.threads(), []
    try:
        for threads in (1, 2):
            _ext.set_threads(threads)
            cache = mixed((300, 40), bits=4, recent_bits=8)
            LAYER.feed(cache, 400, 100)
            outs.append(LAYER.feed(cache, 50))
    finally:
        _ext.set_threads(before)
    assert mx.array_equal(*outs)


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", [nullcontext, only_reference], ids=["kernels", "reference"])
def test_the_window_grows_with_the_tokens(backend):
    """With a budget of a million tokens the first one allocated room for two hundred thousand."""
    talk = TinyLayer(key_width=64, value_width=32, length=700)
    large, exact = (mixed((n, n), bits=8, recent_bits=UNPACKED) for n in (1_000_000, 3500))
    with backend():
        talk.feed(large, 1)
        assert large.nbytes < 2**20
        for cache in (large, exact):
            talk.feed(cache, 700 - cache.offset)
    assert large.layer.window.size > exact.layer.window.size == 700
    assert large.layer.window_length == exact.layer.window_length == 700
    views = [cache.layer.window.views(0, 2, 700) for cache in (large, exact) if cache.arrays()]
    assert all(mx.array_equal(views[0][name], views[1][name]) for name in views[0])
    assert large.nbytes < 2**20


def test_a_window_taken_back_to_nothing_survives_a_state():
    policy = make_policy("distinct", sink=2, recent=0.3)
    cache = H2OKVCache(budgets=[19, 19], policy=policy, bits=4, group_size=32, recent_bits=8)
    tokens = TinyLayer(heads=2, group=2, key_width=32, value_width=32)
    tokens.feed(cache, 3, 3)
    cache.resize([14, 14])
    cache.trim(3)
    assert not cache.store.fields["positions"].size
    twin = H2OKVCache.from_state(cache.state)
    assert mx.array_equal(tokens.feed(twin, 30), tokens.feed(cache, 30))
