"""Attention with scores: equal to MLX's own, and its scores, lse and masses to their definition."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrays import numpy_of
from mlx_h2o import scaled_dot_product_attention_with_scores
from mlx_h2o.attention.ops import attention_mass

B, N, D, DV = 2, 17, 8, 12
SCALE = 0.31
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# Half a unit in the last place of a result near 1, with room for the sums before it.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
HEADS = [(4, 4), (6, 2), (3, 1)]
MASKS = ["none", "causal", "bool", "additive", "lowest", "infinite"]


def definition(q, k, v, mask, sinks):
    """Out, scores and lse in float64; the mask is boolean or additive, `[..., L, N]`."""
    k, v = (np.repeat(numpy_of(x), q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = SCALE * numpy_of(q) @ k.swapaxes(-1, -2)
    s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    lse = np.logaddexp.reduce(s, axis=-1)
    lse = lse if sinks is None else np.logaddexp(lse, numpy_of(sinks)[:, None])
    return np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None]) @ v, s, lse


def operands(Hq, Hk, L, dtype=mx.float32, n=N, seed=0):
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = (B, Hq, L, D), (B, Hk, n, D), (B, Hk, n, DV)
    drawn = (1.5 * mx.random.normal(s, key=key) for s, key in zip(shapes, keys, strict=True))
    return tuple(x.astype(dtype) for x in drawn)


def mask_of(kind, L, dtype, n=N):
    """A mask as a caller passes it, and what it means to `definition`."""
    aligned = np.arange(n) <= np.arange(n - L, n)[:, None]
    if kind == "none":
        return None, np.ones((L, n), bool)
    if kind == "causal":
        return "causal", aligned
    visible = np.random.default_rng(L).random((B, 1, L, n)) < 0.6
    visible[..., 3] = True  # MLX's own attention has no answer for rows that see nothing.
    if kind == "bool":
        return mx.array(visible), visible
    bias = mx.random.normal((B, 1, L, n), key=mx.random.key(5)).astype(dtype)
    if kind == "additive":
        return bias, numpy_of(bias)
    hidden = mx.finfo(dtype).min if kind == "lowest" else -mx.inf
    mask = mx.where(mx.array(visible), bias, mx.array(hidden, dtype))
    return mask, np.where(visible, numpy_of(bias), -np.inf)


@pytest.mark.pairwise
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("L", [1, 5])
@pytest.mark.parametrize(("Hq", "Hk"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_is_mlx_attention_and_scores_are_the_definition(dtype, Hq, Hk, L, kind, with_sinks):
    q, k, v = operands(Hq, Hk, L, dtype)
    mask, meaning = mask_of(kind, L, dtype)
    sinks = mx.linspace(-2, 2, Hq).astype(dtype) if with_sinks else None
    out, scores, lse = scaled_dot_product_attention_with_scores(
        q, k, v, scale=SCALE, mask=mask, sinks=sinks
    )
    assert (out.dtype, scores.dtype, lse.dtype) == (dtype, mx.float32, mx.float32)
    assert out.shape == (B, Hq, L, DV)
    assert scores.shape == (B, Hq, L, N)
    assert lse.shape == (B, Hq, L)

    stock = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=mask, sinks=sinks)
    tolerance = TOLERANCE[dtype]
    # MLX rounds its own way to 16 bits, so the two may differ by twice as much.
    np.testing.assert_allclose(numpy_of(out), numpy_of(stock), atol=8 * tolerance, rtol=tolerance)
    expected_out, expected_scores, expected_lse = definition(q, k, v, meaning, sinks)
    np.testing.assert_allclose(numpy_of(out), expected_out, atol=4 * tolerance, rtol=tolerance)
    # Scores stay float32 whatever the operands.
    np.testing.assert_allclose(numpy_of(scores), expected_scores, atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(numpy_of(lse), expected_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.pairwise
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("L", [1, 5])
@pytest.mark.parametrize(("Hq", "Hk"), HEADS)
def test_mass_sums_to_the_queries_less_what_attention_sinks_took(Hq, Hk, L, kind, with_sinks):
    q, k, v = operands(Hq, Hk, L)
    mask, meaning = mask_of(kind, L, mx.float32)
    sinks = mx.linspace(-2, 2, Hq) if with_sinks else None
    _, scores, lse = scaled_dot_product_attention_with_scores(
        q, k, v, scale=SCALE, mask=mask, sinks=sinks
    )
    mass = attention_mass(scores, lse, Hk)
    assert mass.shape == (B, Hk, N)
    assert mass.dtype == mx.float32
    taken = np.zeros((B, Hk))
    if with_sinks:
        share = np.exp(numpy_of(sinks)[:, None] - numpy_of(lse))
        taken = share.sum(-1).reshape(B, Hk, -1).mean(-1)
        assert taken.min() > 0
    np.testing.assert_allclose(numpy_of(mass.sum(-1)), L - taken, rtol=1e-5)
    _, s, expected_lse = definition(q, k, v, meaning, sinks)
    weights = np.exp(s - expected_lse[..., None]).reshape(B, Hk, -1, L, N)
    np.testing.assert_allclose(numpy_of(mass), weights.mean(2).sum(2), atol=1e-5)


@pytest.mark.parametrize("hidden", ["bool", "lowest", "infinite"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_keys_receive_nothing_and_blind_rows_answer_zero(dtype, hidden):
    q, k, v = operands(4, 2, 3, dtype)
    visible = np.ones((3, N), bool)
    visible[:, 4] = False  # A key that no query sees.
    visible[1] = False  # A query that sees no key.
    mask = mx.array(visible)
    if hidden != "bool":
        lowest = mx.finfo(dtype).min if hidden == "lowest" else -mx.inf
        mask = mx.where(mask, mx.array(0, dtype), mx.array(lowest, dtype))
    out, scores, lse = scaled_dot_product_attention_with_scores(q, k, v, scale=SCALE, mask=mask)
    assert mx.all(scores[..., 4] == -mx.inf)
    assert mx.all(lse[:, :, 1] == -mx.inf)
    assert mx.all(mx.isfinite(lse[:, :, ::2]))
    assert mx.all(out[:, :, 1] == 0)
    assert not mx.any(mx.isnan(out.astype(mx.float32)))
    mass = attention_mass(scores, lse, 2)
    assert mx.all(mass[..., 4] == 0)
    np.testing.assert_allclose(numpy_of(mass.sum(-1)), 2.0, rtol=1e-5)


def test_only_attention_sinks_answer_a_blind_row():
    """The extra column has no value: the row's output is zero and its lse the sink's logit."""
    q, k, v = operands(4, 2, 1)
    sinks = mx.array([-1.0, 0.0, 1.0, 2.0])
    out, scores, lse = scaled_dot_product_attention_with_scores(
        q, k, v, scale=SCALE, mask=mx.zeros((1, N), mx.bool_), sinks=sinks
    )
    assert mx.all(out == 0)
    assert mx.array_equal(lse, mx.broadcast_to(sinks[:, None], lse.shape))
    assert mx.all(attention_mass(scores, lse, 2) == 0)


def test_a_mask_of_another_float_width_is_added_exactly():
    """gpt-oss and MLA pass masks in float32 to half-precision queries."""
    q, k, v = operands(4, 2, 5, mx.float16)
    bias = mx.random.normal((5, N), key=mx.random.key(9))
    _, scores, _ = scaled_dot_product_attention_with_scores(q, k, v, scale=SCALE, mask=bias)
    expected = definition(q, k, v, numpy_of(bias), None)[1]
    np.testing.assert_allclose(numpy_of(scores), expected, atol=2e-5)


def test_a_stream_may_be_chosen():
    q, k, v = operands(4, 2, 5)
    here = scaled_dot_product_attention_with_scores(q, k, v, scale=SCALE)
    there = scaled_dot_product_attention_with_scores(
        q, k, v, scale=SCALE, stream=mx.new_stream(mx.cpu)
    )
    for a, b in zip(here, there, strict=True):
        assert mx.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": mx.zeros((4, 5, D))}, r"q must be \[batch, heads, tokens, width\]"),
        ({"k": mx.zeros((B, 2, N, D, 1))}, "k must be"),
        ({"v": mx.zeros((N, DV))}, "v must be"),
        ({"q": mx.zeros((B, 4, 5, D), mx.int32)}, "q must be float32, float16 or bfloat16"),
        ({"k": mx.zeros((B, 2, N, D), mx.uint8)}, "k must be float32, float16 or bfloat16"),
        ({"v": mx.zeros((B, 2, N, DV), mx.complex64)}, "v must be float32, float16 or bfloat16"),
        ({"v": mx.zeros((B, 2, N - 1, DV))}, "agree in batch, heads and tokens"),
        ({"v": mx.zeros((B, 4, N, DV))}, "agree in batch, heads and tokens"),
        ({"q": mx.zeros((B, 4, 5, D + 1))}, "agree in batch and width"),
        ({"q": mx.zeros((1, 4, 5, D))}, "agree in batch and width"),
        ({"q": mx.zeros((B, 3, 5, D))}, "3 query heads are no multiple of 2 KV heads"),
        ({"mask": "sliding"}, 'mask must be None, "causal" or an array'),
        ({"mask": 0.0}, 'mask must be None, "causal" or an array'),
        ({"mask": mx.ones((5, N), mx.int32)}, "mask"),
        ({"mask": mx.zeros((5, N - 1))}, "mask|broadcast"),
        ({"mask": mx.zeros((3 * B, 1, 5, N))}, "mask|broadcast"),
        # These would broadcast the scores to the mask's shape, and the output to nonsense.
        ({"mask": mx.zeros((1, 1, B, 4, 5, N))}, "mask"),
        ({"q": mx.zeros((B, 4, 1, D)), "mask": mx.zeros((2, N))}, "mask"),
        ({"mask": "causal", "q": mx.zeros((B, 4, N + 1, D))}, "at least as many keys as queries"),
        ({"sinks": mx.zeros(2)}, r"sinks must be \[4\], one per query head"),
        ({"sinks": mx.zeros((4, 1))}, r"sinks must be \[4\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name(changes, text):
    q, k, v = operands(4, 2, 5)
    operand = {"q": q, "k": k, "v": v, "mask": None, "sinks": None} | changes
    with pytest.raises(ValueError, match=text):
        scaled_dot_product_attention_with_scores(
            operand["q"],
            operand["k"],
            operand["v"],
            scale=1.0,
            mask=operand["mask"],
            sinks=operand["sinks"],
        )


@pytest.mark.parametrize(
    ("scores", "lse", "heads", "text"),
    [
        ((1, 4, 2), (1, 4), 2, r"scores must be \[B, Hq, L, N\]"),
        ((1, 4, 2, 9), (1, 4, 9), 2, r"lse \[B, Hq, L\]"),
        ((1, 4, 2, 9), (1, 4, 2), 3, "4 query heads cannot be grouped over 3 KV heads"),
        ((1, 4, 2, 9), (1, 4, 2), 0, "cannot be grouped over 0"),
    ],
)
def test_mass_refuses_scores_that_do_not_fit(scores, lse, heads, text):
    with pytest.raises(ValueError, match=text):
        attention_mass(mx.zeros(scores), mx.zeros(lse), heads)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_and_mask_matches_the_definition(data):
    """Rows that see nothing included, which no stock attention answers."""
    draw = data.draw
    Hk, G, L = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    n = draw(st.integers(L, 20))
    q, k, v = operands(Hk * G, Hk, L, mx.float32, n, seed=draw(st.integers(0, 9)))
    shape = draw(st.sampled_from([(L, n), (1, n), (1, 1, L, n), (B, 1, L, n), (B, Hk * G, L, n)]))
    flags = draw(
        st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
    )
    visible = np.array(flags).reshape(shape)
    bias = draw(st.sampled_from([None, -np.inf, float(mx.finfo(mx.float32).min)]))
    mask = mx.array(visible) if bias is None else mx.array(np.where(visible, 0.5, bias), mx.float32)
    meaning = visible if bias is None else np.where(visible, 0.5, -np.inf)
    sinks = mx.linspace(-3, 3, Hk * G) if draw(st.booleans()) else None
    out, scores, lse = scaled_dot_product_attention_with_scores(
        q, k, v, scale=SCALE, mask=mask, sinks=sinks
    )
    for got, expected in zip((out, scores, lse), definition(q, k, v, meaning, sinks), strict=True):
        np.testing.assert_allclose(numpy_of(got), expected, atol=2e-5, rtol=1e-5)
    mass = numpy_of(attention_mass(scores, lse, Hk))
    unseen = ~np.broadcast_to(visible, scores.shape).reshape(B, Hk, G * L, n).any(2)
    assert np.all(mass[unseen] == 0)
    assert np.all(mass.sum(-1) <= L + 1e-4)
