"""The kernels that score prompts, and the Metal backend's functions, against the reference."""

import mlx.core as mx
import numpy as np
import pytest
from harness import recorded
from launched_on import mask_of

from mlx_h2o.attention.backends import reference
from mlx_h2o.attention.backends.gpu import METAL

# Out, lse and mass, relative to the largest.
TOLERANCE = {mx.float32: 2e-5, mx.float16: 3e-3, mx.bfloat16: 2e-2}

# B, Hq, Hk, L, N, D, Dv: fewer than a tile, tiles that are not full, a window before many keys.
SHAPES = [
    (1, 2, 1, 9, 20, 32, 64),
    (2, 4, 2, 40, 150, 64, 64),
    (1, 3, 1, 64, 300, 96, 32),
    (1, 2, 2, 130, 130, 64, 64),
]


def operands(shape, dtype=mx.float32):
    B, Hq, Hk, L, N, D, Dv = shape
    q = mx.random.normal((B, L, Hq, D)).transpose(0, 2, 1, 3)
    k = mx.random.normal((B, Hk, N + 3, D))[:, :, :N]
    v = mx.random.normal((B, Hk, N, Dv))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def seed_of(shape):
    B, Hq, Hk, L, _, _, Dv = shape
    return mx.random.normal((B, Hq, L)), mx.random.normal((B, Hk, Dv))


def assert_all_close(ours, expected, tolerance):
    ours = ours if isinstance(ours, tuple) else (ours,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype or tolerance > 1e-4
        a, b = (np.array(x.astype(mx.float32)) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


def float32(call):
    """The same call with operands in float32."""
    return {
        name: x.astype(mx.float32) if isinstance(x, mx.array) and x.dtype != mx.bool_ else x
        for name, x in call.items()
    }


@pytest.mark.few(5)
@pytest.mark.pairwise
@pytest.mark.parametrize("columns", ["slots", "sinks and seed"])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "additive"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mass(shape, mask, columns):
    q, k, v = operands(shape)
    call = {"q": q, "k": k, "v": v, "scale": 0.3, "mask": mask_of(mask, shape, q.dtype)}
    if columns != "slots":
        call |= {"sinks": mx.random.normal((shape[1],)), "seed": seed_of(shape)}
    with recorded() as launches:
        ours = METAL.attention_with_mass(**call)
    assert {counts.kernel.split("_")[3] for counts in launches} == {"lse", "mass"}
    assert_all_close(ours, reference.attention_with_mass(**call), 2e-5)
    assert "logits" not in {name for counts in launches for name in counts.bytes_written}


@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(dtype, queries):
    shape = (1, 4, 2, queries, 90, 64, 64)
    q, k, v = operands(shape, dtype)
    call = {"q": q, "k": k, "v": v, "scale": 0.125, "mask": "causal", "seed": seed_of(shape)}
    ours = METAL.attention_with_mass(**call)
    assert ours[0].dtype == dtype
    assert_all_close(ours, reference.attention_with_mass(**float32(call)), TOLERANCE[dtype])


@pytest.mark.few(4)
@pytest.mark.pairwise
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("queries", [1, 4, 20])
@pytest.mark.parametrize("function", ["attention", "attention_with_scores", "attention_with_mass"])
def test_heads_of_different_lengths(function, queries, mask):
    B, G, D, Dv = 2, 2, 64, 32
    ranges = [(2, 26), (130, 50), (30, 90)]
    used = sum((mx.arange(190) >= s) & (mx.arange(190) < s + n) for s, n in ranges)[None, :, None]
    shape = (B, 3 * G, 3, queries, 0, D, Dv)
    call = {
        "q": mx.random.normal((B, 3 * G, queries, D)),
        "k": mx.where(used, mx.random.normal((B, 190, D)), mx.nan),
        "v": mx.where(used, mx.random.normal((B, 190, Dv)), mx.nan),
        "scale": 0.2,
        "mask": mask,
        "seed": seed_of(shape),
        "sinks": mx.random.normal((3 * G,)),
        "ranges": ranges,
    }
    ours = getattr(METAL, function)(**call)
    assert_all_close(ours, getattr(reference, function)(**call), 2e-5)


@pytest.mark.parametrize("function", ["attention", "attention_with_scores"])
@pytest.mark.parametrize("queries", [1, 8, 30])
def test_seeds(function, queries):
    shape = (2, 4, 2, queries, 70, 64, 64)
    q, k, v = operands(shape)
    call = {"q": q, "k": k, "v": v, "scale": 0.2, "mask": "causal", "seed": seed_of(shape)}
    assert_all_close(getattr(METAL, function)(**call), getattr(reference, function)(**call), 2e-5)


def test_the_reference_where_there_is_no_kernel():
    q, k, v = operands((1, 2, 1, 9, 20, 48, 48))
    for function in ("attention", "attention_with_scores", "attention_with_mass"):
        with recorded() as launches:
            ours = getattr(METAL, function)(q, k, v, scale=0.2, mask="causal")
        assert_all_close(ours, getattr(reference, function)(q, k, v, scale=0.2, mask="causal"), 0)
        assert not launches


def test_the_same_prompt_gives_the_same_masses():
    q, k, v = operands(SHAPES[2])
    first, second = (METAL.attention_with_mass(q, k, v, scale=0.3)[1] for _ in range(2))
    assert mx.array_equal(first, second)
