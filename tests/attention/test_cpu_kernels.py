"""The CPU kernels compute what backends/reference.py defines, in every form, from any layout."""

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arrays import numpy_of
from concurrently import in_threads
from covering import STEP, Case, covering
from mlx_h2o import _ext
from mlx_h2o.attention.backends import cpu, reference

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
DTYPES = [F32, F16, BF16]
# Fewer examples, and every so-manieth case, where the machine is slow (sanitizers).
EXAMPLES = int(os.environ.get("MLX_H2O_EXAMPLES", "150"))


@pytest.fixture(autouse=True)
def _on_the_cpu():
    """The kernels' device, where it is not the default one anyway."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


# -- operands -------------------------------------------------------------------------------------


def laid_out(x: mx.array, layout: str) -> mx.array:
    """The same numbers elsewhere in memory, between NaNs that no kernel has any business with."""

    def between_nans(x: mx.array, axis: int, before: int, after: int) -> mx.array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (before, after)
        return mx.contiguous(mx.pad(x, widths, constant_values=mx.nan))

    rows, width = x.shape[-2:]
    if layout == "slots of more":
        return between_nans(x, -2, 3, 5)[..., 3 : 3 + rows, :]
    if layout == "part of wider rows":
        return between_nans(x, -1, 3, 2)[..., 3 : 3 + width]
    if layout == "every other number":
        beside = mx.stack([x, mx.full(x.shape, mx.nan, x.dtype)], axis=-1)
        return mx.contiguous(beside.reshape(*x.shape[:-1], 2 * width))[..., ::2]
    if layout == "tokens before heads":
        return mx.contiguous(x.swapaxes(-3, -2)).swapaxes(-3, -2)
    if layout == "backwards":
        return mx.contiguous(x[..., ::-1, :])[..., ::-1, :]
    if layout == "one batch for all":
        return mx.broadcast_to(x[:1], x.shape)
    assert layout == "dense"
    return mx.contiguous(x)


LAYOUTS = [
    "dense",
    "slots of more",
    "part of wider rows",
    "every other number",
    "tokens before heads",
    "backwards",
    "one batch for all",
]


def mask_of(
    kind: str, dtype: mx.Dtype, axes: str, layout: str, shape: tuple[int, ...], seed: int
) -> Any:
    """A mask over logits `[B, Hq, L, N]`; `axes` names those it has more than one entry along."""
    if kind in ("none", "causal"):
        return None if kind == "none" else kind
    rng = np.random.default_rng(seed)
    sizes = [size if name in axes else 1 for name, size in zip("BHLN", shape, strict=True)]
    visible = rng.random(sizes) < 0.6
    N = sizes[3]
    for i in range(sizes[2]):
        row = visible[:, :, i]
        if i % 4 == 1:  # It sees nothing,
            row[:] = False
        elif i % 4 == 2:  # the last slot only,
            row[..., : N - 1] = False
            row[..., N - 1] = True
        elif i % 4 == 3:  # or nothing of the first tile (a padded prompt).
            row[..., : min(40, N - 1)] = False
    if kind == "bool":
        mask = mx.array(visible)
    else:
        bias = mx.array(rng.standard_normal(sizes)).astype(dtype)
        hidden = {"bias": 0.0, "lowest": mx.finfo(dtype).min, "infinite": -mx.inf}[kind]
        mask = bias if kind == "bias" else mx.where(mx.array(visible), bias, hidden).astype(dtype)
    mask = laid_out(mask, layout)
    # Leading axes of length 1 may be missing.
    return mask[0, 0] if sizes[:2] == [1, 1] else mask


@dataclass
class Call:
    """An attention call; `options` are its keyword arguments."""

    q: mx.array
    k: mx.array
    v: mx.array
    options: dict[str, Any] = field(default_factory=dict)

    def of(self, backend: Any, form: str) -> Any:
        return getattr(backend, form)(self.q, self.k, self.v, **self.options)


def call_of(case: Case, seed: int) -> Call:
    """Random operands for a case of `covering`."""
    B, Hk, G, L, N = (case[name] for name in ("B", "Hk", "G", "L", "N"))
    D, Dv = case["widths"]
    keys = iter(mx.random.split(mx.random.key(seed), 6))

    def drawn(shape: tuple[int, ...], size: float = 1.0) -> mx.array:
        return size * mx.random.normal(shape, key=next(keys))

    q, k, v = drawn((B, Hk * G, L, D), 2.0), drawn((B, Hk, N, D)), drawn((B, Hk, N, Dv))
    options: dict[str, Any] = {"scale": D**-0.5}
    kind, mask_dtype = case["mask"]
    axes, layout = case["mask axes"], case["mask layout"]
    options["mask"] = mask_of(kind, mask_dtype, axes, layout, (B, Hk * G, L, N), seed)
    if case["sinks"] is not None:
        options["sinks"] = drawn((Hk * G,)).astype(case["sinks"])
    if case["seed"] != "none":
        logits, values = drawn((B, Hk * G, L), 3.0), drawn((B, Hk, Dv))
        if case["seed"] == "partly":
            # A head that nothing was evicted from has an empty column.
            logits[:, ::2] = -mx.inf
        options["seed"] = logits, values
    k_dtype, v_dtype = case["kv"]
    return Call(
        laid_out(q.astype(case["q"]), case["q layout"]),
        laid_out(k.astype(k_dtype), case["k layout"]),
        laid_out(v.astype(v_dtype), case["v layout"]),
        options,
    )


def work_of(case: Case) -> int:
    """Multiplications of a case."""
    D, Dv = case["widths"]
    return case["B"] * case["Hk"] * case["G"] * case["L"] * case["N"] * (D + Dv)


def may_be(case: Case) -> bool:
    causal = case["mask"][0] == "causal"
    return work_of(case) < 4e7 and not (causal and case["N"] < case["L"])


FACTORS = {
    "widths": [
        *[(1, 1), (1, 33), (20, 20), (32, 1), (33, 33), (64, 64), (80, 80), (96, 100)],
        *[(100, 96), (128, 128), (128, 20), (256, 256), (576, 512)],
    ],
    "N": [1, 7, 31, 32, 33, 255, 256, 257, 1000],
    "L": [1, 2, 5, 8, 33, 70],
    "G": [1, 2, 3, 4, 5, 7, 8, 16, 33],
    "Hk": [1, 2, 3],
    "B": [1, 2],
    "q": DTYPES,
    "kv": [(k, v) for k in DTYPES for v in DTYPES],
    "q layout": LAYOUTS,
    "k layout": LAYOUTS,
    "v layout": LAYOUTS,
    "mask": [
        *[("none", None), ("causal", None), ("bool", None)],
        *[(kind, dtype) for kind in ("bias", "lowest", "infinite") for dtype in DTYPES],
    ],
    "mask axes": ["BHLN", "LN", "N", "BN", "HLN", "L", "BL"],
    "mask layout": LAYOUTS,
    "sinks": [None, F32, F16],
    "seed": ["none", "all", "partly"],
}
CASES = covering(FACTORS, may_be)


# -- comparison -----------------------------------------------------------------------------------


def close(got: mx.array, expected: mx.array, what: str, rtol: float, atol: float = 1e-5) -> None:
    assert got.shape == expected.shape, what
    assert got.dtype == expected.dtype, what
    np.testing.assert_allclose(
        numpy_of(got), numpy_of(expected), rtol=rtol, atol=atol, err_msg=what
    )


def check(call: Call, expected: tuple[mx.array, mx.array, mx.array], mass: mx.array) -> None:
    """All three forms of a call against out, scores, lse and mass."""
    out, scores, lse = expected
    # A unit in the last place of 16 bits; of float32 some, for sums that come in another order.
    unit = {F32: 5e-6, F16: 2**-10, BF16: 2**-7}[call.q.dtype]
    close(call.of(cpu, "attention"), out, "out without scores", unit)
    for form, side, atol in (
        ("attention_with_scores", scores, 1e-5),
        ("attention_with_mass", mass, 1e-6),
    ):
        got_out, got_side, got_lse = call.of(cpu, form)
        close(got_out, out, f"out of {form}", unit)
        close(got_lse, lse, f"lse of {form}", 5e-6)
        close(got_side, side, form, 1e-5, atol)


def agree(call: Call) -> tuple[mx.array, mx.array, mx.array]:
    """All three forms of a call are the reference's; its out, scores and lse."""
    out, scores, lse = call.of(reference, "attention_with_scores")
    B, heads, N, _ = call.k.shape
    check(call, (out, scores, lse), reference.attention_mass(scores, lse, heads))
    # What no query sees receives nothing at all, however small.
    unseen = mx.all((scores == -mx.inf).reshape(B, heads, -1, N), axis=2)
    assert not mx.any(mx.where(unseen, call.of(cpu, "attention_with_mass")[1], 0))
    return out, scores, lse


@pytest.mark.parametrize("number", range(0, len(CASES), STEP))
def test_every_pair_of_choices_gives_the_references_attention(number):
    out, scores, lse = agree(call_of(CASES[number], number))
    # Nothing of what lies around the operands was read, by the reference either.
    assert not any(mx.any(mx.isnan(x)) for x in (out, scores, lse))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_call_gives_the_references_attention(data):
    case = {name: data.draw(st.sampled_from(values), name) for name, values in FACTORS.items()}
    case["N"] = data.draw(st.integers(1, 300), "slots")
    case["L"] = data.draw(st.integers(1, min(case["N"], 40)), "queries")
    case["G"] = data.draw(st.integers(1, 36), "query heads")
    case["widths"] = data.draw(st.tuples(st.integers(1, 140), st.integers(1, 140)), "wide")
    while work_of(case) > 2e7:
        case["G"], case["L"] = (case["G"] + 1) // 2, (case["L"] + 1) // 2
    agree(call_of(case, data.draw(st.integers(0, 2**20), "seed")))


# -- a range of slots for each head ---------------------------------------------------------------

RANGE_FACTORS = {
    "lengths": [
        *[[1], [0], [0, 1], [31, 33], [257, 0, 64], [1000, 10], [256], [7, 512, 100, 32]],
        *[[40, 40, 40], [300, 299]],
    ],
    "gap": [0, 3],
    "shuffled": [False, True],
    "widths": [(1, 1), (33, 20), (64, 64), (80, 96), (128, 128), (576, 512)],
    "L": [1, 2, 8, 33],
    "G": [1, 2, 3, 5, 8, 33],
    "B": [1, 2],
    "q": DTYPES,
    "kv": [(k, v) for k in DTYPES for v in DTYPES],
    "q layout": LAYOUTS,
    "k layout": LAYOUTS,
    "v layout": LAYOUTS,
    "mask": [("none", None), ("causal", None)],
    "sinks": [None, F32],
    "seed": ["none", "all", "partly"],
}


def range_may_be(case: Case) -> bool:
    fits = case["mask"][0] == "none" or min(case["lengths"]) >= case["L"]
    return fits and work_of(case | {"N": sum(case["lengths"]), "Hk": 1}) < 4e7


RANGE_CASES = covering(RANGE_FACTORS, range_may_be)


def ranges_of(case: Case, rng: np.random.Generator) -> tuple[list[tuple[int, int]], int]:
    """(first slot, number of slots) of each head, and how many slots there are."""
    ranges: list[tuple[int, int]] = [(0, 0)] * len(case["lengths"])
    heads = np.arange(len(ranges))
    if case["shuffled"]:
        rng.shuffle(heads)
    slots = case["gap"]
    for head in heads:
        ranges[head] = slots, case["lengths"][head]
        slots += case["lengths"][head] + case["gap"]
    return ranges, slots


@pytest.mark.parametrize("number", range(0, len(RANGE_CASES), STEP))
def test_heads_with_ranges_of_their_own_are_attentions_of_one_head_each(number):
    case = RANGE_CASES[number]
    ranges, slots = ranges_of(case, np.random.default_rng(number))
    heads, G = len(ranges), case["G"]
    case = case | {"Hk": heads, "N": 1, "mask axes": "", "mask layout": ""}
    call = call_of(case, number)
    B, L, (D, Dv) = case["B"], case["L"], case["widths"]
    # Between the ranges lie NaNs.
    k, v = (mx.full((B, slots, width), mx.nan) for width in (D, Dv))
    for h, (start, length) in enumerate(ranges):
        key = mx.random.key(100 * number + h)
        k[:, start : start + length] = mx.random.normal((B, length, D), key=key)
        v[:, start : start + length] = mx.random.normal((B, length, Dv), key=key)
    call = replace(
        call,
        k=laid_out(k.astype(call.k.dtype), case["k layout"]),
        v=laid_out(v.astype(call.v.dtype), case["v layout"]),
        options=call.options | {"ranges": ranges},
    )

    outs, lses = [], []
    scores, mass = mx.full((B, G, L, slots), -mx.inf), mx.zeros((B, slots))
    for h, (start, length) in enumerate(ranges):
        of_head, options = slice(h * G, (h + 1) * G), dict(call.options)
        del options["ranges"]
        if "sinks" in options:
            options["sinks"] = options["sinks"][of_head]
        if "seed" in options:
            logits, values = options["seed"]
            options["seed"] = logits[:, of_head], values[:, h : h + 1]
        if length:
            rows = (x[:, None, start : start + length] for x in (call.k, call.v))
        else:  # The reference knows no attention over nothing: one slot that no query sees.
            rows = (mx.zeros((B, 1, 1, D)), mx.zeros((B, 1, 1, Dv)))
            options["mask"] = mx.zeros((1, 1), mx.bool_)
        out, s, lse = Call(call.q[:, of_head], *rows, options).of(
            reference, "attention_with_scores"
        )
        outs.append(out)
        lses.append(lse)
        if length:
            scores[..., start : start + length] = s
            mass[:, start : start + length] = reference.attention_mass(s, lse, 1)[:, 0]
    out, lse = (mx.concatenate(parts, axis=1) for parts in (outs, lses))
    assert not mx.any(mx.isnan(out))
    check(call, (out, scores, lse), mass)


# -- numbers at the edge --------------------------------------------------------------------------


def every_number(dtype: mx.Dtype) -> mx.array:
    """All 65536 of a 16-bit format."""
    return mx.arange(65536).astype(mx.uint16).view(dtype)


@pytest.mark.parametrize("L", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_16_bit_number_is_widened_exactly(dtype, L):
    """Subnormals, infinities and NaNs too: one slot alone gives its value, and its key as logit."""
    numbers = every_number(dtype)
    v = numbers.reshape(1, 128, 1, 512)
    ones = mx.ones((1, 128, L, 1))
    out = cpu.attention(ones, mx.zeros((1, 128, 1, 1)), v, scale=1.0)
    assert mx.array_equal(out, mx.broadcast_to(v.astype(F32), out.shape), equal_nan=True)
    _, scores, _ = cpu.attention_with_scores(
        ones[:, :1], numbers.reshape(1, 1, -1, 1), mx.zeros((1, 1, 65536, 1)), scale=1.0
    )
    expected = mx.broadcast_to(numbers.astype(F32), scores.shape)
    assert mx.array_equal(scores, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_the_output_is_rounded_to_the_nearest_and_ties_to_even(dtype):
    numbers = np.array(every_number(dtype).astype(F32))
    numbers = np.unique(numbers[np.isfinite(numbers)]).astype(np.float64)
    halfway = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    beyond = np.float32([65519.996, 65520, 7e4, 3e38, np.inf, np.nan, 1e-45, 2.0**-25, 3e-8])
    parts = [halfway, np.nextafter(halfway, np.inf), np.nextafter(halfway, -np.inf), beyond]
    x = np.concatenate([*parts, -beyond])
    v = mx.array(np.pad(x, (0, -len(x) % 8)).reshape(1, 8, 1, -1))
    out = cpu.attention(mx.zeros((1, 8, 1, 1), dtype), mx.zeros((1, 8, 1, 1)), v, scale=1.0)
    assert out.dtype == dtype
    assert mx.array_equal(out.astype(F32), v.astype(dtype).astype(F32), equal_nan=True)


def test_weights_are_exponentials_to_a_few_units_in_the_last_place():
    x = np.concatenate([np.linspace(0, -87.3, 4001), np.linspace(-87.4, -1000, 99)])
    x = x.astype(np.float32)
    k = mx.stack([mx.zeros(x.shape), mx.array(x)], axis=-1)[None, ..., None]
    v = mx.broadcast_to(mx.array([0.0, 1.0])[:, None], k.shape)
    out = cpu.attention(mx.ones((1, len(x), 1, 1)), k, v, scale=1.0)
    expected = np.exp(x.astype(np.float64)) / (1 + np.exp(x.astype(np.float64)))
    # Below the normal numbers a weight may be nothing.
    np.testing.assert_allclose(numpy_of(out).ravel(), expected, rtol=5e-7, atol=1.2e-38)


def plain_call(L: int = 3, N: int = 70, D: int = 24, **options: Any) -> Call:
    """Two KV heads with three query heads each; slots reach into a third tile."""
    keys = mx.random.split(mx.random.key(L), 3)
    shapes = (2, 6, L, D), (2, 2, N, D), (2, 2, N, 20)
    drawn = (mx.random.normal(s, key=key) for s, key in zip(shapes, keys, strict=True))
    return Call(*drawn, {"scale": 0.3} | options)


@pytest.mark.parametrize("number", [mx.nan, mx.inf, -mx.inf], ids=str)
@pytest.mark.parametrize(
    "where", ["q", "k", "late k", "v", "mask", "sinks", "seed's logit", "seed's value"]
)
def test_what_is_not_finite_spreads_as_far_as_in_the_reference(where, number):
    call = plain_call()
    if where == "mask":
        mask = mx.zeros((3, 70))
        mask[1, 35] = number
        call.options["mask"] = mask
    elif where == "sinks":
        call.options["sinks"] = mx.array([0, 0, number, 0, 0, 0])
    elif where.startswith("seed"):
        logits, values = mx.zeros((2, 6, 3)), mx.ones((2, 2, 20))
        if where == "seed's logit":
            logits[1, 2, 1] = number
        else:
            values[1, 0, 7] = number
        call.options["seed"] = logits, values
    else:
        operand = {"q": call.q, "k": call.k, "late k": call.k, "v": call.v}[where]
        operand[1, 0, {"q": 1, "late k": 69}.get(where, 2), 7] = number
    agree(call)


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-20, 1e4, 1e18, 1e30, 3e38])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_tiny_and_huge_numbers_count_as_in_the_reference(operand, size):
    """Subnormal operands, one-hot rows, logits and sums beyond the largest number."""
    call = plain_call()
    # All of one sign: infinities of both would meet as NaNs here and there, as the order of the
    # sum has it.
    operands = {"q": mx.abs(call.q), "k": mx.abs(call.k), "v": mx.abs(call.v)}
    operands[operand] = operands[operand] * size
    agree(Call(**operands, options=call.options))


def test_logits_too_far_apart_for_one_exponential():
    """Tiles and blocks of slots whose largest logits differ by hundreds, in any order."""
    for order in (1, -1):
        call = plain_call(N=600)
        steps = mx.linspace(-600, 0, 600)[::order]
        call.options["mask"] = mx.broadcast_to(steps, (3, 600))
        agree(call)


# -- how it computes ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["slots of more", "part of wider rows", "tokens before heads"])
def test_keys_and_values_are_read_where_they_lie(layout):
    keys = mx.random.split(mx.random.key(0), 3)
    q = mx.random.normal((1, 8, 1, 64), key=keys[0])
    k, v = (laid_out(mx.random.normal((1, 4, 4096, 64), key=key), layout) for key in keys[1:])
    mx.eval(q, k, v)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(cpu.attention_with_mass(q, k, v, scale=1.0))
    assert mx.get_peak_memory() - before < k.nbytes / 8


def test_a_compiled_function_may_be_called_again():
    call = plain_call(mask="causal")

    @mx.compile
    def compiled(q: mx.array, k: mx.array, v: mx.array) -> tuple[mx.array, ...]:
        return cpu.attention_with_mass(q, k, v, **call.options)

    for q in (call.q, -call.q):
        expected = replace(call, q=q).of(cpu, "attention_with_mass")
        got = compiled(q, call.k, call.v)
        assert all(mx.array_equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ranges": [(1 << 40, 1)]}, "leaves the slots"),
        ({"ranges": [(0, 1 << 40)]}, "incompatible function arguments"),
        ({"ranges": [(60, 11), (0, 5)]}, "leaves the slots"),
        ({"ranges": [(-1, 5), (0, 5)]}, "leaves the slots"),
        ({"ranges": [(0, -1), (0, 5)]}, "leaves the slots"),
        ({"ranges": [(2**31 - 1, 2**31 - 1), (0, 5)]}, "leaves the slots"),
        ({"ranges": []}, "no multiple"),
        ({"sinks": mx.zeros(5)}, "sinks"),
        ({"seed": (mx.zeros((2, 6, 2)), mx.zeros((2, 2, 20)))}, "seed"),
        ({"seed": (mx.zeros((2, 6, 3)), mx.zeros((2, 2, 21)))}, "seed"),
        ({"mask": mx.zeros((4, 70))}, "broadcast"),
    ],
)
def test_the_kernels_refuse_what_would_leave_the_operands(changes, text):
    """A caller without the checks of mlx_h2o.attention.ops."""
    call = plain_call()
    k, v = (call.k[:, 0], call.v[:, 0]) if "ranges" in changes else (call.k, call.v)
    with pytest.raises((ValueError, TypeError), match=text):
        cpu.attention(call.q, k, v, scale=1.0, **changes)


def long_calls() -> list[Call]:
    """Calls with work for several threads, in all the ways in which it is cut up."""
    rng = np.random.default_rng(0)
    k, v = (mx.array(rng.standard_normal((2, 2, 3000, 48)).astype(np.float32)) for _ in range(2))
    q = mx.array(rng.standard_normal((2, 10, 70, 48)).astype(np.float32))
    flat_k, flat_v = (x.reshape(2, 6000, 48) for x in (k, v))
    ragged = {"scale": 0.2, "ranges": [(0, 5000), (5000, 7), (5007, 0), (5200, 800), (5100, 100)]}
    return [
        Call(q[:, :, :1], k, v, {"scale": 0.2, "sinks": mx.arange(10) / 5}),
        Call(q[:, :, :9], k, v, {"scale": 0.2, "mask": "causal"}),
        Call(q, k[:, :, :300], v[:, :, :300], {"scale": 0.2, "mask": "causal"}),
        Call(q[:, :, :1], flat_k, flat_v, ragged),
    ]


FORMS = ["attention", "attention_with_scores", "attention_with_mass"]


def outputs(calls: list[Call]) -> list[mx.array]:
    arrays = []
    for call in calls:
        for form in FORMS:
            result = call.of(cpu, form)
            arrays += [result] if isinstance(result, mx.array) else list(result)
    mx.eval(arrays)
    return arrays


def test_any_number_of_threads_gives_the_same_bits(threads):
    calls = long_calls()
    threads(1)
    alone = outputs(calls)
    for count in (2, 3, 5):
        threads(count)
        assert _ext.threads() == count
        for _ in range(3):
            for got, expected in zip(outputs(calls), alone, strict=True):
                assert mx.array_equal(got, expected)


def test_several_python_threads_at_once_compute_what_one_does(threads):
    calls = long_calls()
    expected = outputs(calls)
    threads(3)

    def job() -> list[list[mx.array]]:
        return [outputs(calls) for _ in range(3)]

    def resizing() -> list[list[mx.array]]:
        for count in (1, 4, 2, 3, 2, 4, 1, 3) * 4:
            _ext.set_threads(count)
            time.sleep(0.003)
        return []

    for rounds in in_threads([job, job, resizing, job, job]):
        for arrays in rounds:
            assert all(mx.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))


# -- instruction sets -----------------------------------------------------------------------------


# Instruction sets beside the oldest, which every run tries.
OTHERS = ("avx2", "avx512", "avx512bf16", "wide")
# What the extension chooses for itself, in a process that loads nothing else.
CHOICE = """
import importlib.util, sys, mlx.core
spec = importlib.util.spec_from_file_location("_ext", sys.argv[1])
extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
print(extension.isa())
"""


@pytest.mark.skipif("MLX_H2O_ISA" in os.environ, reason="this process is one of those")
@pytest.mark.parametrize(
    "isa", ["sse2", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)]
)
def test_every_instruction_set_does_the_same(isa):
    """Every third of these cases, and packing, in a process in which this is all that runs."""
    environment = os.environ | {"MLX_H2O_ISA": isa, "MLX_H2O_STEP": str(3 * STEP)}
    choice = subprocess.run(
        [sys.executable, "-c", CHOICE, _ext.__file__],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    if choice.stdout.strip() != isa:
        assert isa != "sse2" or platform.machine() not in ("x86_64", "AMD64")
        pytest.skip("not built, or not for this machine")
    if isa == _ext.isa():
        pytest.skip("tested by this process")
    chosen = (
        "pair or ranges or widened or rounded or exponentials or finite or apart or chosen or packs"
    )
    files = [__file__, str(Path(__file__).with_name("test_pack_by_range.py"))]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-k", chosen, "-p", "no:cacheprovider", *files],
        env=environment | {"MLX_H2O_THREADS": "3"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_instruction_set_and_threads_may_be_chosen():
    assert _ext.isa() == os.environ.get("MLX_H2O_ISA", _ext.isa())
    assert _ext.threads() == int(os.environ.get("MLX_H2O_THREADS", _ext.threads()))
