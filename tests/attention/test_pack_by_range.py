"""The encoder: groups from their least to their greatest element, alike wherever it packs."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import H2OKVCache
from mlx_h2o.attention.backends.choice import only_reference, pack
from mlx_h2o.slots.packed import BIASES, BITS, GROUP_SIZES, SCALES, PackedRows

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def numbers(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def hard_rows(dtype: mx.Dtype, width: int = 128) -> mx.array:
    """Rows `[14, width]`: ordinary ones, and groups that are hard to cut into levels."""
    rows = mx.random.normal((14, width), key=mx.random.key(0))
    rows[1] = 1.5
    rows[2] = 0
    rows[3] = -mx.abs(rows[3]) - 3
    rows[4, ::7] = 1000 * rows[4, ::7]
    rows[5] = mx.round(2 * rows[5]) / 2
    rows[6] = 1e-9 * rows[6]
    rows[7] = 1e-6 * rows[7] + 1
    rows[8] = 100 + rows[8]
    rows[9] = mx.arange(width) * 0.25
    rows[10] = mx.where(mx.arange(width) == 5, 1.0, 0.0)
    rows[11] = 30000 * mx.sign(rows[11])
    rows[12] = -rows[9]
    rows[13] = 3e-5 * rows[13]
    return rows.astype(dtype)


def by_definition(rows: mx.array, bits: int, group_size: int) -> tuple[np.ndarray, ...]:
    """Levels, scales and biases in five lines of NumPy."""
    groups = numbers(rows).reshape(len(rows), -1, group_size)
    low, top = groups.min(axis=-1), np.float32(2**bits - 1)
    stored = [mx.array(x).astype(rows.dtype) for x in ((groups.max(axis=-1) - low) / top, low)]
    scale, bias = (numbers(part)[..., None] for part in stored)
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.where(scale > 0, np.clip(np.rint((groups - bias) / scale), 0, top), 0)
    return levels.reshape(rows.shape), scale[..., 0], bias[..., 0]


def levels_of(packed: PackedRows) -> np.ndarray:
    """What the words hold, as one stream of bits, lowest first."""
    stream = np.unpackbits(np.array(packed.words).view(np.uint8), axis=-1, bitorder="little")
    levels = stream.reshape(len(stream), -1, packed.bits)
    return (levels << np.arange(packed.bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_rows_are_packed_by_definition(bits, group_size, dtype):
    rows = hard_rows(dtype)
    packed = PackedRows.of(rows, bits, group_size)
    levels, scales, biases = by_definition(rows, bits, group_size)
    np.testing.assert_array_equal(levels_of(packed), levels)
    np.testing.assert_array_equal(numbers(packed.scales), scales)
    np.testing.assert_array_equal(numbers(packed.biases), biases)
    assert packed.dtype == dtype


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_mx_reads_them_and_both_edges_are_exact(bits, group_size):
    rows = 3 + mx.random.normal((5, 2 * group_size), key=mx.random.key(bits))
    packed = PackedRows.of(rows, bits, group_size)
    read = mx.dequantize(*packed.arrays, group_size=group_size, bits=bits)
    groups, got = (x.reshape(5, 2, group_size) for x in (rows, read))
    step = (groups.max(axis=-1) - groups.min(axis=-1)) / (2**bits - 1)
    assert mx.allclose(got.min(axis=-1), groups.min(axis=-1), atol=1e-5)
    assert mx.allclose(got.max(axis=-1), groups.max(axis=-1), atol=1e-5)
    assert (mx.abs(got - groups) <= 0.5001 * step[..., None] + 1e-6).all()


def test_levels_count_from_the_rounded_scale():
    """In float16 a scale is off by 0.05 %, which 8-bit levels would add up to a tenth of a step."""
    rows = (100 + mx.random.normal((50, 64), key=mx.random.key(1))).astype(mx.float16)
    packed = PackedRows.of(rows, 8, 64)
    scale = packed.scales.astype(mx.float32)
    error = mx.abs(packed.dequantized() - rows.astype(mx.float32))
    # The last level may be missed by what the scale was rounded down.
    assert (error <= (0.5 + 255 * 2**-11) * scale).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_group_without_a_range_is_its_bias(dtype):
    for number in (1.5, 0.0, -3.0):
        rows = mx.full((2, 64), number, dtype)
        assert (PackedRows.of(rows, 4, 64).dequantized() == number).all()


@pytest.mark.parametrize("shape", [(0, 64), (2, 3, 0, 128)])
def test_no_rows_are_packed_into_none(shape):
    for packed in (PackedRows.of(mx.zeros(shape), 6, 32), pack(mx.zeros(shape), 6, 32)):
        mx.eval(packed.arrays)
        assert packed.shape == shape


def test_rows_that_lie_apart_are_packed_where_they_lie():
    """What a model hands over is a view: heads before tokens, a part of a longer row."""
    whole = mx.random.normal((2, 300, 3, 192), key=mx.random.key(3))
    for rows in (whole[..., 64:].swapaxes(1, 2), whole[:, ::-2, :, :128], whole.swapaxes(1, 3)):
        rows = rows[..., :64]
        expected = PackedRows.of(rows, 5, 32).arrays
        for got, array in zip(pack(rows, 5, 32).arrays, expected, strict=True):
            assert mx.array_equal(got, array)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_what_is_not_finite_stays_in_its_group(bits, dtype):
    rows = mx.random.normal((4, 64), key=mx.random.key(2))
    rows[0, 3], rows[1, 4], rows[2, 5] = mx.inf, -mx.inf, mx.nan
    rows[3, 6], rows[3, 7] = mx.inf, -mx.inf
    read = numbers(PackedRows.of(rows.astype(dtype), bits, 32).dequantized())
    assert np.isnan(read[:, :32]).all()
    assert np.isfinite(read[:, 32:]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_prompts_and_fused_steps_pack_what_the_reference_packs(bits, group_size, dtype):
    """Bit for bit, hard rows and what is not finite too."""
    rows = hard_rows(dtype)
    rows = mx.concatenate([rows, rows[:3]])
    rows[14, 5], rows[15, 70], rows[16, 100] = mx.inf, -mx.inf, mx.nan
    k = rows[None, None]
    v = k[:, :, ::-1]

    def held(chunks: list[int]) -> dict[str, mx.array]:
        cache = H2OKVCache(64, policy="streaming", bits=bits, group_size=group_size)
        first = 0
        for count in chunks:
            tokens = slice(first, first := first + count)
            keys, values = cache.update_and_fetch(k[:, :, tokens], v[:, :, tokens])
            cache.attend(keys, keys, values, scale=0.1, mask="causal" if count > 1 else None)
        names = [n + part for n in ("slots.keys", "slots.values") for part in ("", SCALES, BIASES)]
        return {name: cache.arrays()[name][:, : len(rows)] for name in names}

    with only_reference():
        expected = held([17])
    for got in (held([17]), held([5] + [1] * 12)):
        for name, array in expected.items():
            a, b = (np.array(x.view(mx.uint8)) for x in (got[name], array))
            same = (a == b) if name.endswith(("keys", "values")) else None
            if same is None:  # NaNs of any kind
                a, b = numbers(got[name]), numbers(array)
                same = (a == b) | (np.isnan(a) & np.isnan(b))
            assert same.all(), name
