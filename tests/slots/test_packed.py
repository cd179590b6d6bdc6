"""Packed keys and values: every width and group, against dequantizing first."""

import copy
import itertools

import mlx.core as mx
import numpy as np
import pytest

from arrays import numpy_of
from mlx_h2o import H2OKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_h2o.attention.backends import reference
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.attention.ops import (
    attention_mass,
    scaled_dot_product_attention,
    scaled_dot_product_attention_quantized_with_scores,
    scaled_dot_product_attention_with_mass,
    scaled_dot_product_attention_with_scores,
)
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.slots.packed import BIASES, BITS, GROUP_SIZES, SCALES, UNPACKED, PackedRows
from tiny_models import TinyLayer, tiny_model

D, DV, SCALE = 128, 256, 128**-0.5
#: Largest error of an output, beyond its dtype's rounding.
ATOL = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


def operands(
    heads: int, group: int, L: int, N: int, dtype: mx.Dtype, batch: int = 1
) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(heads * 1000 + N)
    shapes = ((batch, heads * group, L, D), (batch, heads, N, D), (batch, heads, N, DV))
    q, k, v = (mx.random.normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


@pytest.mark.pairwise
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("dtype", "group", "L", "N"),
    [
        (mx.float32, 4, 1, 33),
        (mx.float16, 1, 1, 300),
        (mx.bfloat16, 3, 1, 64),
        (mx.float16, 2, 5, 31),
    ],
)
def test_a_packed_row_is_the_numbers_it_stands_for(dtype, group, L, N, bits, group_size):
    """Out, logits, lse and mass are those of the dequantized rows; keys and values may differ."""
    q, k, v = operands(2, group, L, N, dtype)
    v_bits = BITS[(BITS.index(bits) + 2) % len(BITS)]
    packed = PackedRows.of(k, bits, group_size), PackedRows.of(v, v_bits, group_size)
    mask = "causal" if L > 1 else None
    expected = reference.attention_with_scores(
        q, *(rows.dequantized() for rows in packed), scale=SCALE, mask=mask
    )
    got = scaled_dot_product_attention_quantized_with_scores(
        q,
        *packed[0].arrays,
        *packed[1].arrays,
        scale=SCALE,
        k_bits=bits,
        v_bits=v_bits,
        group_size=group_size,
        mask=mask,
    )
    assert got[0].dtype == dtype
    for a, b, atol in zip(got, expected, (ATOL[dtype], 1e-5, 1e-5), strict=True):
        np.testing.assert_allclose(numpy_of(a), numpy_of(b), atol=atol, rtol=1e-6)
    out = scaled_dot_product_attention(q, *packed, scale=SCALE, mask=mask)
    np.testing.assert_allclose(numpy_of(out), numpy_of(expected[0]), atol=ATOL[dtype])
    _, mass, _ = scaled_dot_product_attention_with_mass(q, *packed, scale=SCALE, mask=mask)
    np.testing.assert_allclose(
        numpy_of(mass), numpy_of(attention_mass(expected[1], expected[2], 2)), atol=1e-5
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("N", [64, 257, 1024, 4096])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_in_registers_or_beforehand_makes_no_difference(dtype, bits, N, sinks):
    """Dequantizing while attending, against dequantizing first, in half precision."""
    q, k, v = operands(2, 4, 1, N, dtype)
    column = mx.random.normal((8,)) if sinks else None
    packed = PackedRows.of(k, bits, 64), PackedRows.of(v, bits, 64)
    plain = (rows.dequantized() for rows in packed)
    expected, _, _ = reference.attention_with_scores(
        q.astype(mx.float32), *plain, scale=SCALE, sinks=column
    )
    out, _, _ = scaled_dot_product_attention_with_scores(q, *packed, scale=SCALE, sinks=column)
    error = np.abs(numpy_of(out) - numpy_of(expected)).max()
    # One rounding of the output to bfloat16 may alone be more than 1e-3.
    assert error < (1e-3 if dtype == mx.float16 else 1e-3 + numpy_of(mx.abs(expected)).max() / 256)


def test_one_side_may_be_packed_alone():
    q, k, v = operands(2, 2, 1, 50, mx.float16)
    keys, values = PackedRows.of(k, 8, 64), PackedRows.of(v, 4, 32)
    for rows in ((keys, v), (k, values)):
        plain = [x.dequantized() if isinstance(x, PackedRows) else x for x in rows]
        expected, _, _ = reference.attention_with_scores(q, *plain, scale=SCALE)
        out = scaled_dot_product_attention(q, *rows, scale=SCALE)
        np.testing.assert_allclose(numpy_of(out), numpy_of(expected), atol=1e-3)


def test_packed_rows_lie_in_a_flat_store_as_well():
    ranges = [(3, 40), (50, 7), (60, 90)]
    q = mx.random.normal((2, 6, 1, D))
    k, v = mx.random.normal((2, 150, D)), mx.random.normal((2, 150, DV))
    packed = PackedRows.of(k, 6, 32), PackedRows.of(v, 5, 64)
    expected = reference.attention_with_scores(
        q, *(rows.dequantized() for rows in packed), scale=SCALE, ranges=ranges
    )
    got = scaled_dot_product_attention_with_scores(q, *packed, scale=SCALE, ranges=ranges)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(numpy_of(a), numpy_of(b), atol=1e-5)


def test_a_slice_of_a_larger_buffer_is_read_where_it_lies():
    q, k, v = operands(2, 4, 1, 96, mx.float32)
    whole = PackedRows.of(k, 4, 64), PackedRows.of(v, 4, 64)
    part = [PackedRows(*(a[:, :, 10:70] for a in rows.arrays), 4, 64) for rows in whole]
    expected, _, _ = reference.attention_with_scores(
        q, *(rows.dequantized()[:, :, 10:70] for rows in whole), scale=SCALE
    )
    out = scaled_dot_product_attention(q, *part, scale=SCALE)
    np.testing.assert_allclose(numpy_of(out), numpy_of(expected), atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bits": 7}, "bits must be one of"),
        ({"group_size": 48}, "group_size must be one of"),
        ({"words": mx.zeros((1, 2, 9, 16))}, "uint32"),
        ({"scales": mx.zeros((1, 2, 9, 1))}, "need scales and biases"),
        ({"biases": mx.zeros((1, 2, 9, 2), mx.float16)}, "need scales and biases"),
        ({"bits": 3}, "need scales and biases"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, text):
    parts = {
        "words": mx.zeros((1, 2, 9, 16), mx.uint32),
        "scales": mx.zeros((1, 2, 9, 2)),
        "biases": mx.zeros((1, 2, 9, 2)),
        "bits": 4,
        "group_size": 64,
    }
    PackedRows(**parts)
    with pytest.raises(ValueError, match=text):
        PackedRows(**(parts | changes))


def test_a_width_that_groups_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="divides the width"):
        PackedRows.of(mx.zeros((1, 2, 9, 80)), 4, 64)
    cache = H2OKVCache(32, bits=4)
    keys = mx.zeros((1, 2, 9, 32))
    cache.update_and_fetch(keys, keys)
    with pytest.raises(ValueError, match=r"keys of width 32 .* groups of 64: .*; 32 does"):
        cache.attend(keys, keys, keys, scale=1.0, mask="causal")


# -- caches ---------------------------------------------------------------------------------------

LAYER = TinyLayer(heads=2, group=2, key_width=64, value_width=32)


def packed_cache(mode: str, policy: str = "distinct", **packing: int | None) -> H2OKVCache:
    budgets = [24, 40] if mode == "ragged" else [32, 32]
    return H2OKVCache(budgets=budgets, policy=policy, group_size=32, **packing)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_packed_once(bits, dtype):
    """Prompts and fused decode steps alike; what moves, moves bit for bit."""
    layer = TinyLayer(heads=2, group=2, key_width=64, value_width=32, dtype=dtype)
    cache = packed_cache("ragged", bits=bits)
    layer.feed(cache, 60, chunk=20)
    layer.feed(cache, 90)
    for run in cache.store.runs:
        fields = cache.store.views(run)
        for head in range(run.heads):
            positions = fields["positions"][0, head]
            for name, rows in zip(("keys", "values"), layer.tokens[1:], strict=True):
                came = mx.take(rows[0, run.first + head], positions, axis=0)
                packed = PackedRows.of(came, bits, 32)
                assert mx.array_equal(fields[name][0, head], packed.words)
                assert mx.array_equal(fields[name + SCALES][0, head], packed.scales)
                assert mx.array_equal(fields[name + BIASES][0, head], packed.biases)


@pytest.mark.few(4)
@pytest.mark.pairwise
@pytest.mark.parametrize("policy", ["distinct", "salient", "h2o", "keydiff", "streaming"])
@pytest.mark.parametrize("mode", ["uniform", "ragged"])
@pytest.mark.parametrize(
    "packing", [{"bits": 8}, {"k_bits": 8, "v_bits": 3}, {"v_bits": 4}], ids=str
)
def test_fused_steps_do_what_the_reference_does(packing, mode, policy):
    fused, plain = (packed_cache(mode, policy, **packing) for _ in range(2))
    feeds = ((50, 25), (120, 1), (30, 30))
    got = [LAYER.feed(fused, *feed) for feed in feeds]
    with only_reference():
        expected = [LAYER.feed(plain, *feed) for feed in feeds]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(numpy_of(a), numpy_of(b), atol=2e-5)
    for name, array in plain.arrays().items():
        np.testing.assert_allclose(
            numpy_of(fused.arrays()[name]), numpy_of(array), atol=1e-4, err_msg=name
        )


def test_memory_really_shrinks_and_bytes_are_those_held():
    caches = [packed_cache("uniform", bits=bits) for bits in (None, 8, 4)]
    for cache in caches:
        LAYER.feed(cache, 100)
        assert cache.nbytes == sum(array.nbytes for array in cache.arrays().values())
    rows = [cache.store.fields["keys"].nbytes for cache in caches]
    assert rows[0] == 4 * rows[1] == 8 * rows[2]
    assert caches[0].nbytes > caches[1].nbytes > caches[2].nbytes


@pytest.mark.parametrize("recent_bits", [None, UNPACKED])
def test_a_packed_cache_survives_a_file_and_a_copy(recent_bits, tmp_path):
    cache = packed_cache("ragged", k_bits=8, v_bits=4, recent_bits=recent_bits)
    LAYER.feed(cache, 80, chunk=20)
    LAYER.feed(cache, 31)
    save_prompt_cache(tmp_path / "cache.safetensors", [cache])
    loaded, twin = load_prompt_cache(tmp_path / "cache.safetensors")[0], copy.deepcopy(cache)
    assert loaded.packing == cache.packing
    assert loaded.nbytes == cache.nbytes
    outs = [LAYER.feed(each, 40) for each in (cache, loaded, twin)]
    assert mx.array_equal(outs[0], outs[1])
    assert mx.array_equal(outs[0], outs[2])


def test_max_bytes_holds_more_packed_tokens():
    sizes = []
    for packing in ({}, {"bits": 8}, {"bits": 4}):
        cache = H2OKVCache(max_bytes=60_000, group_size=32, **packing)
        LAYER.feed(cache, 300)
        assert cache.nbytes <= 60_000
        sizes.append(cache.size())
    assert sizes[0] < sizes[1] < sizes[2]


def peak_of_a_prompt(policy: str, packing: dict[str, int]) -> int:
    """Most bytes while chunks of a prompt are read, the later ones far beyond the budget."""
    cache = H2OKVCache(1024, policy=policy, **packing)
    layer = TinyLayer(heads=8, group=2, key_width=128, value_width=128, dtype=mx.bfloat16)
    assert layer.tokens[0].shape[2] == 512
    mx.clear_cache()
    mx.reset_peak_memory()
    for _ in range(4):
        q, k, v = layer.at(0, 512)
        mask = cache.make_mask(512)
        keys, values = cache.update_and_fetch(k, v)
        out = cache.attend(q, keys, values, scale=layer.scale, mask=mask)
        mx.eval(out, *cache.arrays().values())
        del out, keys, values
    return mx.get_peak_memory() - mx.get_active_memory() + cache.nbytes


# Seconds each: every policy once, and the others with `make test-all`.
MEMORY = [
    pytest.param(packing, policy, marks=[pytest.mark.slow] * (number % 5 != 0))
    for number, (packing, policy) in enumerate(
        itertools.product(
            [{"bits": 8}, {"bits": 4}, {"k_bits": 8, "v_bits": 3}, {"bits": 4, "recent_bits": 8}],
            ["distinct", "h2o", "keydiff"],
        )
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("packing", "policy"), MEMORY, ids=str)
@pytest.mark.usefixtures("one_operation_at_a_time")
def test_a_prompt_takes_hardly_more_memory_than_with_dense_rows(packing, policy):
    """Rows are dequantized tile by tile or head by head, and never the whole cache at once."""
    # Packed prompts peak at 0.6 to 1.17 of dense ones; caches dequantized whole at 1.26 and more.
    plain, packed = (
        min(peak_of_a_prompt(policy, each) for _ in range(3)) for each in ({}, packing)
    )
    assert packed <= 1.2 * plain


def test_models_that_attend_by_themselves_are_refused_bits():
    with pytest.raises(ValueError, match="cannot read packed"):
        PlainRowsKVCache(32, policy="keydiff", bits=8)
    with pytest.raises(ValueError, match="omit bits"):
        make_prompt_cache(tiny_model("gemma2_by_itself"), 32, bits=8)
    with pytest.raises(ValueError, match=r"k_bits must be 2, 3, .* got 1"):
        H2OKVCache(32, k_bits=1)
