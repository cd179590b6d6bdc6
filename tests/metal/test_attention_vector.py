"""The attention kernels against the reference, over products of what they promise."""

from functools import partial

import launched_on
import mlx.core as mx
import pytest
from harness import recorded
from launched_on import assert_close, evicted, mask_of, reference_attend

from mlx_h2o.attention.backends import attention_launches, reference
from mlx_h2o.attention.backends.attention_launches import EXPORT_LOGITS, EXPORT_LSE, EXPORT_NOTHING
from mlx_h2o.attention.backends.gpu import METAL
from mlx_h2o.attention.backends.work import Ranges
from mlx_h2o.slots.remainder import Remainder

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
TOLERANCE = {mx.float32: [2e-5], mx.float16: [2e-3], mx.bfloat16: [1.6e-2]}
assert_attended = partial(launched_on.assert_attended, tolerances=TOLERANCE)

# B, Hq, Hk, L, N, D, Dv: one row and many, rows of several simdgroups, more rows than fit one
# threadgroup, widths that differ, fewer slots than lanes, slots that fill no step.
SHAPES = [
    (1, 1, 1, 1, 1, 32, 32),
    (2, 4, 4, 1, 77, 64, 64),
    (2, 8, 2, 1, 150, 128, 128),
    (1, 6, 2, 3, 40, 96, 64),
    (1, 8, 1, 1, 100, 256, 256),
    (1, 8, 2, 8, 53, 128, 128),
    (1, 4, 2, 2, 70, 192, 128),
    (1, 32, 1, 1, 35, 576, 512),
]
MASKS = [None, "causal", "bool", "additive"]


def operands(shape, dtype):
    """Unit-normal q, k, v; keys and values are views into longer buffers."""
    B, Hq, Hk, L, N, D, Dv = shape
    q = mx.random.normal((B, L, Hq, D)).transpose(0, 2, 1, 3)
    k = mx.random.normal((B, Hk, N + 3, D))[:, :, :N]
    v = mx.random.normal((B, Hk, N + 3, Dv))[:, :, 2 : N + 2]
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


@pytest.mark.few(9)
@pytest.mark.pairwise
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parity(dtype, shape, mask, sinks):
    q, k, v = operands(shape, dtype)
    options = {
        "scale": shape[5] ** -0.5,
        "mask": mask_of(mask, shape, dtype),
        "sinks": mx.random.normal((shape[1],)) if sinks else None,
    }
    assert_attended(METAL.attend(q, k, v, **options), reference_attend(q, k, v, **options), dtype)


@pytest.mark.few(4)
@pytest.mark.pairwise
@pytest.mark.parametrize("architecture", ["one pass", "two passes"])
@pytest.mark.parametrize("mask", [None, "causal", "additive"])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[3], SHAPES[5], SHAPES[7]], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_remainder_and_distances(monkeypatch, dtype, shape, mask, architecture):
    if architecture == "two passes":
        monkeypatch.setattr(attention_launches, "slots_per_block", lambda *_: 33)
    q, k, v = operands(shape, dtype)
    remainder = evicted(shape)
    options = {
        "scale": shape[5] ** -0.5,
        "mask": mask_of(mask, shape, dtype),
        "sinks": mx.random.normal((shape[1],)),
        "remainder": remainder,
    }
    ours = METAL.attend(q, k, v, means=remainder.mean_key, **options)
    assert_attended(ours, reference_attend(q, k, v, **options), dtype)
    apart = k.astype(mx.float32) - remainder.mean_key[:, :, None]
    assert_close(ours.distances, mx.square(apart).sum(axis=-1), 1e-4, 1e-5)


def test_an_empty_remainder_answers_nothing():
    shape = SHAPES[2]
    q, k, v = operands(shape, mx.float32)
    B, _, Hk, _, _, D, Dv = shape
    ours = METAL.attend(q, k, v, scale=0.1, remainder=Remainder.empty(B, Hk, D, Dv))
    assert_attended(ours, reference_attend(q, k, v, scale=0.1), mx.float32)


def test_keys_of_any_size_leave_the_remainder_finite():
    shape = SHAPES[2]
    q, k, v = operands(shape, mx.float32)
    remainder = evicted(shape)
    remainder.var_key = remainder.var_key * 1e30
    ours = METAL.attend(1e10 * q, k, v, scale=1.0, remainder=remainder)
    out, _, lse = reference_attend(1e10 * q, k, v, scale=1.0, remainder=remainder)
    assert mx.all(mx.isfinite(lse))
    assert_close(ours.lse, lse, 0.0, 1e-3)
    assert_close(ours.out, out, *TOLERANCE[mx.float32])


@pytest.mark.few(3)
@pytest.mark.pairwise
@pytest.mark.parametrize("two_passes", [False, True])
@pytest.mark.parametrize("mask", [None, "causal", "bool"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_different_lengths(monkeypatch, dtype, mask, two_passes):
    if two_passes:
        monkeypatch.setattr(attention_launches, "slots_per_block", lambda *_: 32)
    B, G, L, D, Dv = 2, 2, 3, 64, 96
    ranges = Ranges(starts=(2, 130, 18), lengths=(16, 50, 110))
    k = mx.full((B, 200, D), mx.nan)
    v = mx.full((B, 200, Dv), mx.nan)
    for start, length in zip(ranges.starts, ranges.lengths, strict=True):
        k[:, start : start + length] = mx.random.normal((B, length, D))
        v[:, start : start + length] = mx.random.normal((B, length, Dv))
    q, k, v = mx.random.normal((B, 3 * G, L, D)).astype(dtype), k.astype(dtype), v.astype(dtype)
    # An array mask speaks of the last slots; the others are visible.
    array = mx.random.uniform(shape=(L, 5)) > 0.5 if mask == "bool" else mask
    remainder = evicted((B, 3 * G, 3, L, 0, D, Dv))
    ours = METAL.attend(
        q, k, v, scale=0.2, mask=array, ranges=ranges, remainder=remainder, means=remainder.mean_key
    )
    slot = 0
    for head, (start, length) in enumerate(zip(ranges.starts, ranges.lengths, strict=True)):
        heads, rows = slice(head * G, head * G + G), slice(start, start + length)
        end = slot + length
        if mask == "bool":
            array = mx.concatenate([mx.ones((L, length - 5), mx.bool_), array[:, -5:]], axis=1)
        part = attention_launches.VectorResult(
            ours.out[:, heads],
            ours.lse[:, heads],
            ours.logits[:, slot * G * L : end * G * L].reshape(B, G, L, length),
        )
        expected = reference_attend(
            q[:, heads],
            k[:, None, rows],
            v[:, None, rows],
            scale=0.2,
            mask=array,
            remainder=remainder.heads(head, head + 1),
        )
        assert_attended(part, expected, dtype)
        apart = k[:, rows].astype(mx.float32) - remainder.mean_key[:, head, None]
        assert_close(ours.distances[:, slot:end], mx.square(apart).sum(axis=-1), 1e-4, 1e-5)
        slot = end


@pytest.mark.few(3)
@pytest.mark.pairwise
@pytest.mark.parametrize("blocks", [33, 64, 100])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[4], SHAPES[5]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_passes(monkeypatch, dtype, shape, blocks):
    monkeypatch.setattr(attention_launches, "slots_per_block", lambda *_: blocks)
    q, k, v = operands(shape, dtype)
    options = {"scale": shape[5] ** -0.5, "mask": mask_of("bool", shape, dtype)}
    with recorded() as launches:
        ours = METAL.attend(q, k, v, **options)
    assert ["vector" in launches[0].kernel, "merge" in launches[1].kernel] == [True, True]
    assert_attended(ours, reference_attend(q, k, v, **options), dtype)


def test_long_caches_take_two_passes():
    shape = (1, 4, 1, 1, 4096, 64, 64)
    q, k, v = operands(shape, mx.float16)
    with recorded() as launches:
        ours = METAL.attend(q, k, v, scale=0.125)
    assert len(launches) == 2
    assert_attended(ours, reference_attend(q, k, v, scale=0.125), mx.float16)


@pytest.mark.parametrize("export", [EXPORT_NOTHING, EXPORT_LSE])
def test_what_is_not_asked_for_is_not_written(export):
    shape = SHAPES[2]
    q, k, v = operands(shape, mx.float16)
    ours = METAL.attend(q, k, v, scale=0.1, export=export)
    expected = reference_attend(q, k, v, scale=0.1)
    assert_close(ours.out, expected[0], *TOLERANCE[mx.float16])
    assert ours.logits is None
    assert (ours.lse is None) == (export == EXPORT_NOTHING)


def test_any_strides():
    """Keys, values and masks whose last dimension is not contiguous."""
    B, Hq, Hk, L, N, D, Dv = shape = (1, 4, 2, 2, 45, 64, 64)
    q, k, v = operands(shape, mx.float32)
    k = mx.random.normal((B, Hk, D, N)).swapaxes(2, 3)
    v = mx.random.normal((B, Hk, N, 2 * Dv))[..., ::2]
    mask = (mx.random.uniform(shape=(N, L)) > 0.3).T
    q = mx.random.normal((B, Hq, D, L)).swapaxes(2, 3)
    options = {"scale": 0.125, "mask": mask}
    assert_attended(
        METAL.attend(q, k, v, **options), reference_attend(q, k, v, **options), mx.float32
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("export", [EXPORT_NOTHING, EXPORT_LOGITS])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 8, 1, 1024, 128, 128),
        (1, 32, 8, 1, 1024, 128, 128),
        (1, 16, 2, 1, 1024, 128, 128),
        (1, 8, 2, 8, 1024, 128, 128),
        (2, 8, 4, 1, 1024, 256, 256),
        (1, 8, 1, 1, 4096, 128, 128),
    ],
    ids=str,
)
def test_every_key_and_value_is_read_once(shape, export):
    B, Hq, Hk, L, N, D, Dv = shape
    q, k, v = operands(shape, mx.float16)
    with recorded() as launches:
        mx.eval(METAL.attend(q, k, v, scale=0.1, export=export).out)
    rows, slots = B * Hq * L, B * Hk * N
    least = 2 * (slots * (D + Dv) + rows * (D + Dv))
    least += 4 * rows * N if export == EXPORT_LOGITS else 0
    moved = sum(counts.device_bytes for counts in launches)
    assert launches[0].bytes_read["keys"] == 2 * slots * D
    assert launches[0].bytes_read["values"] == 2 * slots * Dv
    assert moved <= 1.02 * least, moved / least


def test_masked_slots_are_not_read():
    """A slot that no query sees costs nothing."""
    shape = (1, 4, 2, 1, 64, 64, 64)
    q, k, v = operands(shape, mx.float16)
    visible = mx.arange(64) % 4 == 0
    with recorded() as launches:
        mx.eval(METAL.attend(q, k, v, scale=0.1, mask=visible).out)
    assert launches[0].bytes_read["keys"] == 2 * 2 * 16 * 64


def test_attention_with_scores_is_the_reference_where_there_is_no_kernel():
    q, k, v = operands((1, 2, 1, 9, 20, 48, 48), mx.float32)
    with recorded() as launches:
        ours = METAL.attention_with_scores(q, k, v, scale=0.2, mask="causal")
    expected = reference.attention_with_scores(q, k, v, scale=0.2, mask="causal")
    assert not launches
    assert all(map(mx.array_equal, ours, expected))


def test_attention_with_scores_launches():
    shape = SHAPES[2]
    q, k, v = operands(shape, mx.float32)
    ours = METAL.attention_with_scores(q, k, v, scale=0.2)
    assert_attended(
        attention_launches.VectorResult(ours[0], ours[2], ours[1]),
        reference_attend(q, k, v, scale=0.2),
        mx.float32,
    )
    assert ours[1].shape == (2, 8, 1, 150)
