"""Kernels over packed rows against the reference, which dequantizes and then works on numbers."""

import itertools
from dataclasses import replace
from functools import partial

import launched_on
import mlx.core as mx
import numpy as np
import pytest
from harness import recorded
from launched_on import OFFSET, assert_close, evicted, mask_of, plan_of, reference_attend

from conftest import HOST
from covering import STEP, covering
from mlx_h2o.attention.backends import attention_launches, choice, reference, step_launches
from mlx_h2o.attention.backends.attention_launches import EXPORT_LOGITS, EXPORT_NOTHING
from mlx_h2o.attention.backends.gpu import METAL
from mlx_h2o.attention.backends.step_launches import SlotArrays
from mlx_h2o.attention.ops import scaled_dot_product_attention_quantized_with_scores
from mlx_h2o.slots.packed import BITS, GROUP_SIZES, PackedRows, dense
from mlx_h2o.slots.remainder import Remainder

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# Of the output: absolute, and relative where partial results are rounded too.
TOLERANCE = {mx.float32: (2e-5, 0), mx.float16: (1e-3, 0), mx.bfloat16: (4e-3, 2**-7)}
assert_attended = partial(launched_on.assert_attended, tolerances=TOLERANCE)

# Of keys and of values; every width as either, and either dense.
WIDTHS = [(2, 3), (3, 5), (4, 4), (5, 2), (6, 8), (8, 6), (8, None), (None, 4)]

# B, Hq, Hk, L, D, Dv: shares of 1, 2, 3, 4, 6, 8, 16 and 18 elements; rows of one simdgroup and,
# staged, of several.
SHAPES = [
    (1, 8, 2, 1, 128, 128),
    (2, 4, 4, 1, 64, 128),
    (1, 2, 1, 3, 96, 32),
    (1, 8, 2, 8, 128, 64),
    (1, 4, 1, 2, 256, 192),
    (1, 32, 1, 1, 576, 512),
]


def packed(rows, bits, group):
    return rows if bits is None else PackedRows.of(rows, bits, group)


def strided(rows, bits, group):
    """Packed rows that are a view into longer buffers."""
    longer = mx.pad(rows, [(0, 0), (0, 0), (2, 3), (0, 0)])
    return packed(longer, bits, group)[:, :, 2 : 2 + rows.shape[2]]


def operands(shape, N, dtype, bits, group):
    """Unit-normal q, k, v; keys and values packed."""
    B, Hq, Hk, L, D, Dv = shape
    q, k, v = (
        mx.random.normal(size).astype(dtype)
        for size in ((B, Hq, L, D), (B, Hk, N, D), (B, Hk, N, Dv))
    )
    return q, strided(k, bits[0], group), strided(v, bits[1], group)


def fits(case):
    """Groups divide the widths of what is packed."""
    sizes = zip(case["bits"], case["shape"][4:], strict=True)
    return all(bits is None or size % case["group"] == 0 for bits, size in sizes)


CASES = covering(
    {
        "bits": WIDTHS,
        "group": list(GROUP_SIZES),
        "dtype": DTYPES,
        "shape": SHAPES,
        "mask": [None, "causal", "bool", "additive"],
        "columns": ["slots", "sinks", "sinks, remainder and distances"],
    },
    fits,
)


def case_name(case):
    return " ".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", CASES[::STEP], ids=case_name)
def test_attention(monkeypatch, case):
    shape, dtype = case["shape"], case["dtype"]
    B, Hq, Hk, L, D, Dv = shape
    long = L * Hq // Hk * max(D, Dv) <= 1024
    for N, two_passes in itertools.product((64, 333, 4096) if long else (64, 333), (False, True)):
        block = -(-N // 3) if two_passes else None
        monkeypatch.setattr(attention_launches, "slots_per_block", partial(lambda x, *_: x, block))
        q, k, v = operands(shape, N, dtype, case["bits"], case["group"])
        of_all = (B, Hq, Hk, L, N, D, Dv)
        options = {"scale": D**-0.5, "mask": mask_of(case["mask"], of_all, dtype)}
        means = None
        if case["columns"] != "slots":
            options["sinks"] = mx.random.normal((Hq,))
        if "remainder" in case["columns"]:
            options["remainder"] = evicted(of_all)
            means = options["remainder"].mean_key
        ours = METAL.attend(q, k, v, means=means, **options)
        assert_attended(ours, reference_attend(q, k, v, **options), dtype)
        if means is not None:
            apart = dense(k).astype(mx.float32) - means[:, :, None]
            assert_close(ours.distances, mx.square(apart).sum(axis=-1), 1e-4, 1e-5)


@pytest.mark.parametrize(("bits", "queries"), [((3, 4), 1), ((8, 5), 20)])
def test_every_function(bits, queries):
    """Heads of different lengths, whose unused slots are no numbers."""
    B, G, D, Dv = 2, 2, 64, 96
    ranges = [(2, 26), (130, 50), (30, 90)]
    used = sum((mx.arange(190) >= s) & (mx.arange(190) < s + n) for s, n in ranges)[None, :, None]
    k, v = (
        packed(mx.where(used, mx.random.normal((B, 190, width)), 0), b, 32)
        for width, b in zip((D, Dv), bits, strict=True)
    )
    for rows in (k, v):
        object.__setattr__(rows, "scales", mx.where(used, rows.scales, mx.nan))
    call = {
        "q": mx.random.normal((B, 3 * G, queries, D)),
        "k": k,
        "v": v,
        "scale": 0.2,
        "mask": "causal",
        "seed": (mx.random.normal((B, 3 * G, queries)), mx.random.normal((B, 3, Dv))),
        "sinks": mx.random.normal((3 * G,)),
    }
    for flat in (True, False):
        if flat:
            call["ranges"] = ranges
        else:
            del call["ranges"]
            call["k"], call["v"] = (
                PackedRows(*(a[:, 130:180].reshape(B, 1, 50, -1) for a in x.arrays), x.bits, 32)
                for x in (k, v)
            )
            call["q"], call["sinks"] = call["q"][:, :G], call["sinks"][:G]
            call["seed"] = (call["seed"][0][:, :G], call["seed"][1][:, :1])
        for function in ("attention", "attention_with_scores", "attention_with_mass"):
            with recorded() as launches:
                ours = getattr(METAL, function)(**call)
                mx.eval(ours)
            assert launches or (function == "attention_with_scores" and queries > 8)
            expected = getattr(reference, function)(**call)
            ours, expected = (x if isinstance(x, tuple) else (x,) for x in (ours, expected))
            for a, b in zip(ours, expected, strict=True):
                np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("bits", BITS)
def test_mass_of_a_prompt(bits):
    nth = BITS.index(bits)
    group, dtype = GROUP_SIZES[nth % 3], DTYPES[(nth + nth // 3) % 3]
    B, Hq, Hk, L, N, D, Dv = 1, 4, 2, 20, 90, 128, 64
    q = mx.random.normal((B, Hq, L, D)).astype(dtype)
    k = strided(mx.random.normal((B, Hk, N, D)).astype(dtype), bits, group)
    v = strided(mx.random.normal((B, Hk, N, Dv)).astype(dtype), 8, 32)
    visible = mx.random.uniform(shape=(B, Hq, L, N)) > 0.3
    call = {"scale": D**-0.5, "mask": visible, "sinks": mx.random.normal((Hq,))}
    out, mass, lse = METAL.attention_with_mass(q, k, v, **call)
    expected = reference.attention_with_mass(q.astype(mx.float32), k, v, **call)
    assert out.dtype == dtype
    tolerance = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype]
    assert_close(out, expected[0], tolerance)
    assert_close(mass, expected[1], 2e-5, 2e-5)
    assert_close(lse, expected[2], 2e-5, 2e-5)


def test_the_public_op_launches(monkeypatch):
    monkeypatch.setattr(choice, "backend", lambda: METAL)
    monkeypatch.setattr("mlx_h2o.attention.ops.backend", lambda: METAL)
    q, k, v = operands((1, 4, 2, 1, 64, 64), 70, mx.float16, (4, 8), 64)
    with recorded() as launches:
        out, scores, lse = scaled_dot_product_attention_quantized_with_scores(
            q, *k.arrays, *v.arrays, scale=0.125, k_bits=4, v_bits=8, group_size=64
        )
        mx.eval(out, scores, lse)
    assert ["attention_vector" in counts.kernel for counts in launches] == [True]
    ours = attention_launches.VectorResult(out, lse, scores)
    assert_attended(ours, reference_attend(q, k, v, scale=0.125), mx.float16)


def test_few_words_and_scales():
    """MLX passes arrays of fewer than eight elements in another address space."""
    q, k, v = operands((1, 1, 1, 1, 32, 32), 1, mx.float16, (2, 4), 32)
    k, v = (PackedRows(*map(mx.contiguous, x.arrays), x.bits, 32) for x in (k, v))
    ours = METAL.attend(q, k, v, scale=0.2)
    assert_attended(ours, reference_attend(q, k, v, scale=0.2), mx.float16)


def test_any_strides():
    q, k, v = operands((1, 4, 2, 2, 64, 64), 45, mx.float32, (5, 4), 32)
    k, v = (
        PackedRows(*(mx.contiguous(a.swapaxes(2, 3)).swapaxes(2, 3) for a in x.arrays), x.bits, 32)
        for x in (k, v)
    )
    ours = METAL.attend(q, k, v, scale=0.125)
    assert_attended(ours, reference_attend(q, k, v, scale=0.125), mx.float32)


@pytest.mark.few(4)
@pytest.mark.pairwise
@pytest.mark.parametrize("export", [EXPORT_NOTHING, EXPORT_LOGITS])
@pytest.mark.parametrize("architecture", ["applegpu_g13g", "applegpu_g13d"])
@pytest.mark.parametrize(
    ("sizes", "bits", "group"),
    [
        ((8, 8, 1024, 128), (8, 8), 64),
        ((8, 2, 1024, 128), (4, 4), 64),
        ((16, 2, 4096, 128), (4, 4), 64),
        ((8, 2, 4096, 128), (2, 2), 128),
        ((4, 2, 2048, 128), (3, 5), 32),
        ((8, 4, 1024, 256), (5, 6), 64),
        ((8, 2, 2048, 64), (6, None), 64),
    ],
)
def test_every_byte_is_read_once(monkeypatch, sizes, bits, group, architecture, export):
    Hq, Hk, N, D = sizes
    monkeypatch.setattr(METAL, "architecture", lambda: architecture)
    q, k, v = operands((1, Hq, Hk, 1, D, D), N, mx.float16, bits, group)
    with recorded() as launches:
        mx.eval(METAL.attend(q, k, v, scale=D**-0.5, export=export).out)
    least = k.nbytes + v.nbytes + 2 * q.nbytes
    least += 4 * Hq * (N + 1) if export == EXPORT_LOGITS else 0
    moved = sum(counts.device_bytes for counts in launches)
    read = launches[0].bytes_read
    assert read["keys"] + read["key_scales"] + read["key_biases"] == k.nbytes
    assert moved <= 1.03 * least, moved / least


def test_masked_slots_are_not_read():
    q, k, v = operands((1, 4, 2, 1, 64, 64), 64, mx.float16, (4, 4), 64)
    with recorded() as launches:
        mx.eval(METAL.attend(q, k, v, scale=0.1, mask=mx.arange(64) % 4 == 0).out)
    assert launches[0].bytes_read["keys"] == k.words.nbytes // 4


APPENDS = covering(
    {
        "bits": [(2, 3), (3, 5), (4, 8), (5, 4), (8, 6), (6, None), (None, 2), (None, None)],
        "group": list(GROUP_SIZES),
        "dtype": DTYPES,
        "widths": [(128, 256), (64, 96), (576, 512)],
        "remembers": [False, True],
    },
    lambda case: fits({**case, "shape": (0, 0, 0, 0, *case["widths"])}),
)


@pytest.mark.few(6)
@pytest.mark.pairwise
@pytest.mark.parametrize("case", APPENDS, ids=case_name)
def test_overwrite(case):
    """What is written is what the reference packs, bit for bit; what was there is folded."""
    B, widths, dtype, group = 2, case["widths"], case["dtype"], case["group"]
    plan = plan_of((9, 5, 7), evict_every=2)
    heads = list(plan.heads)
    heads[1] = heads[1]._replace(victim=-1)
    plan = replace(plan, heads=tuple(heads))
    H, S = len(heads), plan.slots

    def pack(rows, bits):
        return rows if bits is None else PackedRows.of(rows, bits, group)

    held = [
        pack(mx.random.normal((B, S, width)).astype(dtype), bits)
        for width, bits in zip(widths, case["bits"], strict=True)
    ]
    sizes = {"norms": mx.zeros((B, S)), "value_lengths": mx.zeros((B, S), mx.float16)}
    slots = SlotArrays(*held, mx.full((B, S), -1, mx.int32), **sizes)
    old = [mx.array(np.array(dense(rows).astype(mx.float32))) for rows in held]
    expected = [[np.array(bits_of(a)) for a in arrays_of(rows)] for rows in held]
    positions, norms = np.array(slots.positions), np.array(slots.norms)
    lengths = np.array(slots.value_lengths)
    victims = mx.array(np.random.default_rng(1).integers(0, 5, (B, H, 2)), mx.int32)
    new = [rows_to_pack(B, H, width, dtype) for width in widths]
    new[0] = mx.contiguous(new[0].swapaxes(1, 2)).swapaxes(1, 2)
    new[1] = mx.stack([new[1], new[1]], axis=-1).flatten(-2)[..., ::2]
    before = Remainder.empty(B, H, *widths).fold(
        *(mx.random.normal((B, H, 5, width)) for width in widths)
    )
    written, after = step_launches.overwrite(
        HOST, plan, slots, victims, *new, before if case["remembers"] else None
    )
    assert (after is not None) == case["remembers"]
    for (h, head), b in itertools.product(enumerate(heads), range(B)):
        slot = head.length - 1 if head.victim < 0 else victims[b, h, 0].item()
        at = head.start + slot
        assert written[b, h].item() == slot
        if after is not None:
            folded = Remainder(*(array[b : b + 1, h : h + 1] for array in before.arrays.values()))
            if head.victim >= 0:
                folded = folded.fold(*(rows[b, None, None, at, None] for rows in old))
            for name, array in folded.arrays.items():
                ours = after.arrays[name][b, h]
                np.testing.assert_allclose(ours, array[0, 0], rtol=1e-5, atol=1e-6)
        rows = [pack(x[b : b + 1, h, 0], bits) for x, bits in zip(new, case["bits"], strict=True)]
        for arrays, row in zip(expected, rows, strict=True):
            for array, part in zip(arrays, arrays_of(row), strict=True):
                array[b, at] = np.array(bits_of(part))[0]
        positions[b, at] = OFFSET - 1
        norms[b, at] = mx.linalg.norm(dense(rows[1]).astype(mx.float32)).item()
        square = mx.square(new[1][b, h].astype(mx.float32)).sum()
        lengths[b, at] = mx.log(mx.maximum(square, 1e-12)).item()
    for rows, theirs in zip(held, expected, strict=True):
        for ours, array in zip(arrays_of(rows), theirs, strict=True):
            assert np.array_equal(np.array(bits_of(ours)), array)
    assert np.array_equal(np.array(slots.positions), positions)
    np.testing.assert_allclose(slots.norms, norms, rtol=1e-5)
    # Of the values as they came; a last bit may be rounded otherwise.
    np.testing.assert_allclose(slots.value_lengths, lengths, rtol=2**-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_is_not_hidden(dtype):
    """A group with an infinity or a NaN is read as NaNs; the others are as ever."""
    plan = plan_of((3, 3))
    row = mx.random.normal((1, 2, 1, 64))
    row[0, 0, 0, 5], row[0, 1, 0, 40] = mx.nan, mx.inf
    row = row.astype(dtype)
    slots = SlotArrays(
        *(PackedRows.of(mx.zeros((1, plan.slots, 64), dtype), 4, 32) for _ in range(2)),
        mx.zeros((1, plan.slots), mx.int32),
    )
    victims = mx.zeros((1, 2, 1), mx.int32)
    mx.eval(step_launches.overwrite(HOST, plan, slots, victims, row, row, None)[0])
    expected = dense(PackedRows.of(row, 4, 32))[0, :, 0]
    for rows in (slots.keys, slots.values):
        ours = dense(rows)[0, [head.start for head in plan.heads]]
        assert np.array_equal(np.isnan(ours).sum(axis=1), [32, 32])
        np.testing.assert_array_equal(ours, expected)


def rows_to_pack(B, H, width, dtype):
    """New rows, of which some are hard: constant, zero, negative, tiny, with outliers or ties."""
    rows = mx.random.normal((B, H, 1, width))
    rows[0, 0, :, : width // 2] = 0.0
    rows[0, 1] = -mx.abs(rows[0, 1]) - 3
    rows[0, 1, :, : width // 2] = -1.5
    rows[1, 0, :, ::7] = 1000 * rows[1, 0, :, ::7]
    rows[1, 1] = mx.round(2 * rows[1, 1]) / 2
    rows[1, 2] = 1e-9 * rows[1, 2]
    return rows.astype(dtype)


def arrays_of(rows):
    return rows.arrays if isinstance(rows, PackedRows) else [rows]


def bits_of(array):
    """A view that compares bit for bit, but for the sign of zeros: either is the least of both."""
    return (array + mx.zeros((), array.dtype)).view(
        mx.uint16 if array.dtype.size == 2 else mx.uint32
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("bits", BITS)
def test_kept_keys(bits):
    B, D = 2, 192
    nth = BITS.index(bits)
    plan = plan_of((70, 5, 40))
    rows = mx.random.normal((B, plan.slots, D)) + 0.3
    rows = PackedRows.of(rows.astype(DTYPES[nth % 3]), bits, (32, 64)[nth % 2])
    written = mx.zeros((B, 3), mx.int32)
    if nth < 3:
        means = step_launches.mean_kept_keys(HOST, plan, rows, written)
    worth = step_launches.unlike_directions(HOST, plan, rows, written)
    before = 0
    for h, head in enumerate(plan.heads):
        keys = dense(rows)[:, head.start : head.start + head.length]
        if nth < 3:
            assert_close(means[:, h], keys.mean(axis=1), 1e-5, 1e-4)
        unit = keys / mx.linalg.norm(keys, axis=-1, keepdims=True)
        mean = unit.mean(axis=1, keepdims=True)
        cosine = (unit * mean).sum(axis=-1) / mx.linalg.norm(mean, axis=-1)
        assert_close(worth[:, before : before + head.length], 1 - cosine, 1e-5)
        before += head.length
