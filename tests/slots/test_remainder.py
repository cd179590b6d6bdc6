"""The remainder: evicted tokens go on answering, rightly, whatever they were and however many."""

import math
from itertools import accumulate, pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_h2o import H2OKVCache, describe, make_policy, scaled_dot_product_attention_with_scores
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.slots.remainder import Remainder, antithetic_signs, plain_rows_for
from tiny_models import TinyLayer

WIDTH, VALUE_WIDTH, SCALE = 8, 6, 8**-0.5


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def folded(keys: np.ndarray, values: np.ndarray | None = None) -> Remainder:
    """The remainder of rows `[B, H, M, D]`; without values (only the logit matters) zeros serve."""
    values = np.zeros((*keys.shape[:3], VALUE_WIDTH), np.float32) if values is None else values
    empty = Remainder.empty(*keys.shape[:2], keys.shape[-1], values.shape[-1])
    return empty.fold(mx.array(keys), mx.array(values))


def answered(
    remainder: Remainder, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of attention over kept rows, joined by the remainder."""
    q, k, v = (mx.array(x) for x in (q, k, v))
    out, _, lse = scaled_dot_product_attention_with_scores(q, k, v, scale=SCALE)
    out, lse = remainder.join(out, lse, remainder.column(q, SCALE))
    return np.array(out), np.array(lse)


def full_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """out and lse over all rows, float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.astype(np.float64), *(np.repeat(x, group, 1).astype(np.float64) for x in (k, v))
    logits = SCALE * q @ k.swapaxes(-1, -2)
    lse = np.logaddexp.reduce(logits, axis=-1)
    return np.exp(logits - lse[..., None]) @ v, lse


def assert_full(out: mx.array, begin: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """The outputs of the queries from `begin` on are those over all rows before them."""
    for i in range(out.shape[2]):
        seen = begin + i + 1
        full, _ = full_attention(q[:, :, seen - 1 : seen], k[:, :, :seen], v[:, :, :seen])
        np.testing.assert_allclose(np.array(out[:, :, i : i + 1]), full, atol=1e-5)


def expected_column(q: np.ndarray, keys: np.ndarray, t: float = 4.0) -> np.ndarray:
    """docs/how-it-works/index.md's r in float64, one query head per KV head, from evicted keys."""
    q, keys = q.astype(np.float64), keys.astype(np.float64)
    mean, var = keys.mean(axis=2), keys.var(axis=2)
    x = 0.5 * SCALE**2 * (q**2 * var[:, :, None]).sum(-1)
    return np.log(keys.shape[2]) + SCALE * (q * mean[:, :, None]).sum(-1) + x / np.sqrt(1 + x / t)


def assert_same(a: Remainder, b: Remainder, tolerance: float = 1e-5) -> None:
    for name, array in a.arrays.items():
        other = np.array(b.arrays[name])
        np.testing.assert_allclose(
            np.array(array), other, atol=tolerance, rtol=tolerance, err_msg=name
        )


# -- evicted rows answer ---------------------------------------------------------------------------


def test_rows_all_alike_answer_exactly():
    """Evicted rows without variance lose nothing: out and lse are the full attention's."""
    B, H, group, kept, gone = 2, 3, 2, 10, 37
    q = 2 * normal(0, B, H * group, 4, WIDTH)
    k, v = normal(1, B, H, kept, WIDTH), normal(2, B, H, kept, VALUE_WIDTH)
    alike = normal(3, B, H, 1, WIDTH), normal(4, B, H, 1, VALUE_WIDTH)
    gone_k, gone_v = (np.repeat(x, gone, axis=2) for x in alike)
    out, lse = answered(folded(gone_k, gone_v), q, k, v)
    full_out, full_lse = full_attention(
        q, np.concatenate([k, gone_k], 2), np.concatenate([v, gone_v], 2)
    )
    np.testing.assert_allclose(out, full_out, atol=1e-5)
    np.testing.assert_allclose(lse, full_lse, atol=1e-5)


@pytest.mark.parametrize(
    ("calls", "left"),
    [([1] * 64, 55), ([40, *[1] * 24], 55), ([64], 55), ([30, 9], 21)],
    ids=["decode", "prompt, then decode", "prompt", "two prompts"],
)
def test_a_window_over_tokens_all_alike_is_the_full_cache(calls, left):
    """A streaming cache gives what an unbounded one gives where the tokens that left are alike."""
    H, group, budget, sink, total = 2, 2, 12, 3, sum(calls)
    q = 2 * normal(0, 1, H * group, total, WIDTH)
    k, v = normal(1, 1, H, total, WIDTH), normal(2, 1, H, total, VALUE_WIDTH)
    # Those that have left before the last call.
    k[:, :, sink:left], v[:, :, sink:left] = k[:, :, sink : sink + 1], v[:, :, sink : sink + 1]
    cache = H2OKVCache(budgets=[budget] * H, policy=make_policy("streaming", sink=sink))
    for begin, count in zip(accumulate([0, *calls[:-1]]), calls, strict=True):
        rows = [mx.array(x[:, :, begin : begin + count]) for x in (q, k, v)]
        keys, values = cache.update_and_fetch(*rows[1:])
        mask = "causal" if count > 1 else None
        assert_full(cache.attend(rows[0], keys, values, scale=SCALE, mask=mask), begin, q, k, v)
    assert cache.evicted == total - budget


def test_the_column_is_the_formula():
    """r = log n + scale q.mean + x / sqrt(1 + x / t), t = 4, over any size of x."""
    keys = 1.5 * normal(0, 2, 3, 50, WIDTH) + 1
    remainder = folded(keys)
    for size in (0.1, 1, 10):
        q = size * normal(1, 2, 3, 5, WIDTH)
        for own, t in (((), 4.0), ((2.0,), 2.0)):
            r = remainder.column(mx.array(q), SCALE, *own)
            np.testing.assert_allclose(np.array(r), expected_column(q, keys, t), 1e-5, 1e-4)


def test_query_heads_meet_their_own_kv_head():
    """With grouped queries the column and the value are those of the KV head of the group."""
    keys, values = normal(0, 1, 3, 20, WIDTH), normal(1, 1, 3, 20, VALUE_WIDTH)
    q, k, v = normal(2, 1, 6, 2, WIDTH), normal(3, 1, 3, 4, WIDTH), normal(4, 1, 3, 4, VALUE_WIDTH)
    out, lse = answered(folded(keys, values), q, k, v)
    for head in range(6):
        of = slice(head // 2, head // 2 + 1)
        alone = folded(keys[:, of], values[:, of])
        one, one_lse = answered(alone, q[:, head : head + 1], k[:, of], v[:, of])
        np.testing.assert_allclose(out[:, head : head + 1], one, atol=1e-6)
        np.testing.assert_allclose(lse[:, head : head + 1], one_lse, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "measured"),
    [(0.04, 0.04), (0.8, 0.8), (1.5, 1.3), (2.9, 2.1), (5.9, 3.9), (11.5, 6.4), (133, 23)],
)
def test_the_saturation_follows_the_measured_curve(x, measured):
    """The second-order term is within a tenth of what real keys showed (how-it-works/index.md)."""
    # Two keys at +-d have mean 0 and variance d^2, so one number sets x.
    d = math.sqrt(2 * x) / SCALE
    keys = np.zeros((1, 1, 2, WIDTH), np.float32)
    keys[..., 0] = [[d, -d]]
    q = np.eye(1, WIDTH, dtype=np.float32)[None, None]
    term = folded(keys).column(mx.array(q), SCALE).item() - math.log(2)
    assert term == pytest.approx(measured, rel=0.1)


def test_without_saturation_the_column_is_of_first_order():
    """0 leaves the term out, also where there is no variance and 0 / 0 would be no number."""
    one, spread = normal(0, 1, 2, 1, WIDTH), normal(1, 1, 2, 30, WIDTH)
    for keys in (one, spread):
        q = normal(2, 1, 4, 3, WIDTH)
        mean = keys.mean(axis=2, keepdims=True).repeat(2, axis=1)
        expected = math.log(keys.shape[2]) + SCALE * (q * mean).sum(-1)
        r = folded(keys).column(mx.array(q), SCALE, 0)
        np.testing.assert_allclose(np.array(r), expected, rtol=1e-5, atol=1e-6)


def test_each_head_may_have_its_own_saturation():
    """Together they give what each head alone gives, the unevicted one included."""
    ts, q = [0.0, 4.0, 0.7], mx.array(normal(2, 1, 6, 3, WIDTH))
    remainder = folded(normal(0, 1, 3, 20, WIDTH))
    remainder.count = mx.array([[20.0, 20.0, 0.0]])
    for given_as in (ts, tuple(ts), np.array(ts), mx.array(ts)):
        r = np.array(remainder.column(q, SCALE, given_as))
        for head, t in enumerate(mx.array(ts).tolist()):
            alone = remainder.heads(head, head + 1).column(q[:, 2 * head : 2 * head + 2], SCALE, t)
            np.testing.assert_array_equal(r[:, 2 * head : 2 * head + 2], np.array(alone))


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, "4", [4.0, -0.5], [4.0] * 3, []])
def test_a_saturation_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="saturation"):
        folded(normal(0, 1, 2, 20, WIDTH)).column(mx.array(normal(1, 1, 2, 1, WIDTH)), 1, wrong)
    with pytest.raises(ValueError, match="saturation"):
        H2OKVCache(budgets=[20, 20], saturation=wrong)


def test_saturations_are_saved_and_told():
    """As one number where all heads have the same."""
    for given_as, saved, told in (
        (4, 4.0, "go on answering"),
        ([0.5, 0.5], 0.5, ", saturation 0.5"),
        ([0, 4], [0.0, 4.0], ", saturation 0 to 4"),
    ):
        cache = H2OKVCache(24, saturation=given_as)
        TinyLayer().feed(cache, 30)
        config = cache.config()
        assert config["saturation"] == saved
        again = H2OKVCache.from_state(cache.state)
        assert again.config() == config
        assert describe([again])[0].reason.endswith(told)


def test_a_saturation_for_other_heads_is_refused_with_the_first_rows():
    cache = H2OKVCache(24, saturation=[4.0, 4.0, 4.0])
    with pytest.raises(ValueError, match="2 KV heads; got 3"):
        TinyLayer().feed(cache, 30)


def test_plain_rows_saturate_of_themselves():
    """They have no t, so that none may be asked for."""
    with pytest.raises(ValueError, match="omit saturation"):
        PlainRowsKVCache(64, policy="keydiff", saturation=0)


def test_the_column_converges_for_gaussian_keys():
    """Unsaturated, r tends to their true log-sum-exp; with t as shipped it is still near."""

    def error(n: int, saturation: float) -> float:
        keys = 0.4 * normal(n, 1, 1, n, WIDTH) + normal(1, 1, 1, 1, WIDTH)
        q = normal(2, 1, 1, 32, WIDTH)
        _, lse = full_attention(q, keys, np.zeros_like(keys))
        r = np.array(folded(keys).column(mx.array(q), SCALE, saturation))
        return float(np.abs(r - lse).mean())

    few, more, most = (error(n, 1e12) for n in (30, 1_000, 100_000))
    assert most < 1e-3 < few
    assert most < more / 2 < few / 4
    assert error(100_000, 4.0) < 5e-3


# -- folding ---------------------------------------------------------------------------------------

folding = settings(max_examples=30, deadline=None, derandomize=True)


@folding
@given(
    rows=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    seed=st.integers(0, 2**16),
    far=st.sampled_from([0.0, 5.0]),
)
def test_rows_fold_in_any_order_and_grouping(rows, cuts, seed, far):
    """All at once, in chunks (empty ones too), one by one, shuffled: the same statistics."""
    keys, values = normal(seed, 2, 2, rows, WIDTH) + far, normal(seed + 1, 2, 2, rows, VALUE_WIDTH)
    order = np.random.default_rng(seed).permutation(rows)
    # The plain definition, in float64.
    expected = Remainder(
        mx.full((2, 2), rows),
        mx.array(keys.mean(axis=2, dtype=np.float64).astype(np.float32)),
        mx.array(keys.astype(np.float64).var(axis=2).astype(np.float32)),
        mx.array(values.mean(axis=2, dtype=np.float64).astype(np.float32)),
    )
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    chunks = [order[a:b] for a, b in pairwise(edges)]
    for groups in ([order], chunks, [order[i : i + 1] for i in range(rows)]):
        remainder = Remainder.empty(2, 2, WIDTH, VALUE_WIDTH)
        for group in groups:
            if len(group):
                remainder = remainder.fold(
                    mx.array(keys[:, :, group]), mx.array(values[:, :, group])
                )
        assert_same(remainder, expected, 3e-5)


@folding
@given(
    weights=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    before=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
def test_a_weight_is_so_many_equal_rows(weights, before, seed):
    """A row of weight w counts as w copies of it; 0 leaves it out, even if it is all there is."""
    M = len(weights)
    keys, values = normal(seed, 1, 2, M, WIDTH), normal(seed + 1, 1, 2, M, VALUE_WIDTH)
    start = Remainder.empty(1, 2, WIDTH, VALUE_WIDTH)
    if before:
        start = folded(normal(seed + 2, 1, 2, before, WIDTH))
    weighted = start.fold(mx.array(keys), mx.array(values), mx.array(weights))
    repeated = start
    if sum(weights):
        copies = (mx.array(np.repeat(x, weights, axis=2)) for x in (keys, values))
        repeated = start.fold(*copies)
    assert_same(weighted, repeated, 3e-5)


def test_weights_may_differ_by_head_and_sequence():
    """Each head of each sequence folds only the rows that its own weights name."""
    keys, values = normal(0, 2, 2, 6, WIDTH), normal(1, 2, 2, 6, VALUE_WIDTH)
    weights = np.random.default_rng(2).integers(0, 2, (2, 2, 6))
    weights[0, 0] = 0
    remainder = Remainder.empty(2, 2, WIDTH, VALUE_WIDTH).fold(
        mx.array(keys), mx.array(values), mx.array(weights)
    )
    for b in range(2):
        for h in range(2):
            rows = keys[b, h, weights[b, h] == 1]
            assert remainder.count[b, h].item() == len(rows)
            if len(rows):
                mean = np.array(remainder.mean_key[b, h])
                np.testing.assert_allclose(mean, rows.mean(axis=0), atol=1e-6)
    assert not np.array(remainder.mean_key[0, 0]).any()


def test_half_precision_rows_fold_in_float32():
    """Statistics of float16 and bfloat16 rows are float32's, exact for what the rows say."""
    for dtype in (mx.float16, mx.bfloat16):
        keys, values = (mx.array(normal(s, 1, 1, 300, WIDTH) + 30).astype(dtype) for s in (0, 1))
        remainder = Remainder.empty(1, 1, WIDTH, WIDTH).fold(keys, values)
        assert {array.dtype for array in remainder.arrays.values()} == {mx.float32}
        assert_same(remainder, folded(*(np.array(x.astype(mx.float32)) for x in (keys, values))))


def test_some_heads_can_be_taken_and_replaced():
    """`heads` reads a range, `with_heads` writes one, and neither touches the others."""
    whole = folded(normal(0, 2, 5, 9, WIDTH), normal(1, 2, 5, 9, VALUE_WIDTH))
    other = folded(normal(2, 2, 5, 7, WIDTH), normal(3, 2, 5, 7, VALUE_WIDTH))
    for first, last in ((0, 5), (0, 2), (2, 4), (3, 5), (4, 5)):
        mixed = whole.with_heads(first, other.heads(first, last))
        for h in range(5):
            source = other if first <= h < last else whole
            for name, array in mixed.arrays.items():
                assert mx.array_equal(array[:, h], source.arrays[name][:, h]), (name, h)
    assert_same(whole.with_heads(1, whole.heads(1, 3)), whole, 0)


# -- nothing breaks it -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_an_empty_remainder_changes_nothing(dtype):
    """Before the first eviction out and lse keep their very bits, also where nothing is seen."""
    q, k, v = (mx.array(normal(s, 2, 2, 4, WIDTH)).astype(dtype) for s in range(3))
    visible = mx.array([[True, False, True, True], [False] * 4, [True] * 4, [False] * 3 + [True]])
    out, _, lse = scaled_dot_product_attention_with_scores(q, k, v, scale=SCALE, mask=visible)
    empty = Remainder.empty(2, 2, WIDTH, WIDTH)
    r = empty.column(q, SCALE)
    assert np.all(np.array(r) == -np.inf)
    joint, joint_lse = empty.join(out, lse, r)
    assert joint.dtype == dtype
    assert mx.array_equal(joint, out)
    assert mx.array_equal(joint_lse, lse)


def test_a_query_that_sees_nothing_kept_hears_the_remainder():
    """Where every kept slot is masked the answer is the mean value, not a NaN."""
    keys, values = normal(0, 1, 2, 20, WIDTH), normal(1, 1, 2, 20, VALUE_WIDTH)
    remainder = folded(keys, values)
    nothing = mx.zeros((1, 2, 1, VALUE_WIDTH)), mx.full((1, 2, 1), -mx.inf)
    r = remainder.column(mx.array(normal(2, 1, 2, 1, WIDTH)), SCALE)
    out, lse = remainder.join(*nothing, r)
    assert mx.array_equal(lse, r)
    np.testing.assert_allclose(np.array(out)[:, :, 0], values.mean(axis=2), atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(mx.float32, 1e4), (mx.float16, 1e4), (mx.float16, 65504.0), (mx.bfloat16, 1e4)],
)
@pytest.mark.parametrize("direction", ["along", "against", "across"])
def test_huge_queries_and_keys_stay_finite(dtype, size, direction):
    """Neither overflow nor NaN, with huge variance, none at all, or a single evicted row."""
    sign = {"along": 1, "against": -1, "across": 0}[direction]
    flip = np.where(np.arange(WIDTH) % 2, -1.0, 1.0).astype(np.float32)
    towards = flip if sign == 0 else np.full(WIDTH, sign, np.float32)
    q = mx.array(np.broadcast_to(size * towards, (1, 1, 1, WIDTH))).astype(dtype)
    row = size * np.ones((1, 1, 1, WIDTH), np.float32)
    spread = np.concatenate([row, -row, row], axis=2)
    values = size * normal(0, 1, 1, 3, WIDTH) / 10
    for keys in (spread, np.repeat(row, 3, axis=2), row):
        rows = mx.array(keys).astype(dtype), mx.array(values[:, :, : keys.shape[2]]).astype(dtype)
        remainder = Remainder.empty(1, 1, WIDTH, WIDTH).fold(*rows)
        for array in remainder.arrays.values():
            assert np.isfinite(np.array(array)).all()
        r = remainder.column(q, SCALE)
        assert np.isfinite(np.array(r)).all()
        # Bounded by the saturation: the term never exceeds sqrt(t x), and here does not fall far
        # below it either.
        asked = np.array(q.astype(mx.float32)).astype(np.float64)
        told = np.array(rows[0].astype(mx.float32)).astype(np.float64)
        x = 0.5 * SCALE**2 * float((asked**2 * told.var(axis=2, keepdims=True)).sum())
        linear = math.log(told.shape[2]) + SCALE * float((asked * told.mean(axis=2)).sum())
        term = r.item() - linear
        # What float32 cannot see beside products as large as these.
        slack = 1e-3 + 1e-6 * SCALE * float(np.abs(asked * told.mean(axis=2)).sum())
        assert 0 - slack <= term <= math.sqrt(4 * x) * (1 + 1e-5) + slack
        assert term >= math.sqrt(4 * x) * 0.99 - slack
        kept = mx.array(normal(1, 1, 1, 4, WIDTH)).astype(dtype)
        out, _, lse = scaled_dot_product_attention_with_scores(q, kept, kept, scale=SCALE)
        out, lse = remainder.join(out, lse, r)
        assert np.isfinite(np.array(out.astype(mx.float32))).all()
        assert np.isfinite(np.array(lse)).all()


@pytest.mark.slow
def test_ten_million_rows_in_chunks():
    """10 000 folds of 1000 rows leave statistics that are right against float64."""
    folds, M = 10_000, 1000
    bank = normal(0, 50, 1, 1, M, 4) + 20
    # Drifts from fold to fold, so that the means really move.
    drift = np.sin(np.arange(folds) / 500).astype(np.float32)
    device_bank = [mx.array(rows) for rows in bank]
    remainder = Remainder.empty(1, 1, 4, 4)
    for i in range(folds):
        rows = device_bank[i % 50] + float(drift[i])
        remainder = remainder.fold(rows, rows)
        if i % 50 == 0:
            mx.eval(*remainder.arrays.values())
    bank = bank.astype(np.float64)[np.arange(folds) % 50, 0, 0]
    of_fold = bank.mean(axis=1) + drift[:, None]
    expected_mean = of_fold.mean(axis=0)
    expected_var = bank.var(axis=1).mean(axis=0) + of_fold.var(axis=0)
    assert remainder.count.item() == folds * M
    np.testing.assert_allclose(np.array(remainder.mean_key)[0, 0], expected_mean, atol=1e-3)
    np.testing.assert_allclose(np.array(remainder.mean_value)[0, 0], expected_mean, atol=1e-3)
    np.testing.assert_allclose(np.array(remainder.var_key)[0, 0], expected_var, rtol=1e-3)


@pytest.mark.slow
def test_ten_million_rows_one_by_one():
    """2000 heads lose 5000 rows each, one a step as in decoding: every head stays right."""
    steps, H = 5_000, 2_000
    bank = mx.array(normal(0, 200, 1, H, 1, 4) + 3)
    remainder = Remainder.empty(1, H, 4, 4)
    for i in range(steps):
        rows = bank[i % 200]
        remainder = remainder.fold(rows, rows)
        if i % 100 == 0:
            mx.eval(*remainder.arrays.values())
    rows = np.array(bank).astype(np.float64)[:, 0, :, 0]
    assert np.all(np.array(remainder.count) == steps)
    for array in (remainder.mean_key, remainder.mean_value):
        np.testing.assert_allclose(np.array(array)[0], rows.mean(axis=0), atol=1e-3)
    np.testing.assert_allclose(np.array(remainder.var_key)[0], rows.var(axis=0), rtol=1e-3)


def test_a_row_still_counts_after_ten_million():
    """Single folds on top of a long history move count and mean by what they should."""
    key = mx.zeros((1, 1, 1, WIDTH))
    history = Remainder.empty(1, 1, WIDTH, WIDTH).fold(key, key, mx.array([1e7]))
    remainder = history
    for _ in range(1000):
        remainder = remainder.fold(key + 1, key + 1)
    assert remainder.count.item() == 10_001_000
    share = 1000 / 10_001_000
    np.testing.assert_allclose(np.array(remainder.mean_key), share, rtol=1e-3)
    np.testing.assert_allclose(np.array(remainder.var_key), share * (1 - share), rtol=1e-3)


# -- plain rows ------------------------------------------------------------------------------------


def test_sign_vectors_are_fixed():
    """The signs that every language must write: rows of a Hadamard matrix, then their minus."""
    assert antithetic_signs(1, 3).tolist() == [[0, 0, 0]]
    assert antithetic_signs(4, 5).tolist() == [
        [1, -1, 1, -1, 1],
        [1, 1, -1, -1, 1],
        [-1, 1, -1, 1, -1],
        [-1, -1, 1, 1, -1],
    ]
    # 6 & 5 = 4 and 3 & 3 has two bits.
    assert antithetic_signs(8, 6)[2].tolist() == [1, -1, -1, 1, 1, -1]


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_plain_rows_have_the_statistics_they_stand_for(rows):
    """Their mean is the mean key, their variance the keys' variance, their value the mean value."""
    remainder = folded(normal(0, 2, 3, 40, WIDTH) + 1, normal(1, 2, 3, 40, VALUE_WIDTH))
    keys, values = (np.array(x) for x in remainder.plain_rows(rows))
    assert keys.shape == (2, 3, rows, WIDTH)
    assert values.shape == (2, 3, rows, VALUE_WIDTH)
    half = rows // 2
    mean, var = np.array(remainder.mean_key), np.array(remainder.var_key)
    pairs = keys[:, :, :half] + keys[:, :, half:]
    np.testing.assert_allclose(pairs / 2, np.repeat(mean[:, :, None], half, 2), atol=1e-6)
    np.testing.assert_allclose(keys.var(axis=2), var, rtol=1e-5)
    mean_value = np.array(remainder.mean_value)[:, :, None]
    np.testing.assert_array_equal(values, np.repeat(mean_value, rows, 2))


def test_one_plain_row_is_the_mean():
    remainder = folded(normal(0, 1, 2, 40, WIDTH), normal(1, 1, 2, 40, VALUE_WIDTH))
    keys, values = remainder.plain_rows(1)
    assert mx.array_equal(keys[:, :, 0], remainder.mean_key)
    assert mx.array_equal(values[:, :, 0], remainder.mean_value)


def plain_rows_error(spread: float, rows: int, bias: float = 0.0) -> float:
    """Attention over kept and plain rows against the exact join: the largest difference."""
    n, H = 50, 2
    keys = spread * normal(0, 1, H, n, WIDTH) + normal(1, 1, H, 1, WIDTH)
    remainder = folded(keys, normal(2, 1, H, n, VALUE_WIDTH))
    q, k = normal(3, 1, H, 5, WIDTH), normal(4, 1, H, 6, WIDTH)
    v = normal(5, 1, H, 6, VALUE_WIDTH)
    exact, _ = answered(remainder, q, k, v)
    plain_k, plain_v = remainder.plain_rows(rows)
    mask = mx.concatenate([mx.full((rows,), math.log(n / rows) + bias), mx.zeros(6)])
    out, _, _ = scaled_dot_product_attention_with_scores(
        mx.array(q),
        mx.concatenate([plain_k, mx.array(k)], axis=2),
        mx.concatenate([plain_v, mx.array(v)], axis=2),
        scale=SCALE,
        mask=mask,
    )
    return float(np.abs(np.array(out) - exact).max())


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_plain_rows_approach_the_join(rows):
    """Without variance they are the join; with it the difference shrinks with the spread."""
    assert plain_rows_error(0.0, rows) < 1e-5
    wide, narrow = plain_rows_error(0.2, rows), plain_rows_error(0.05, rows)
    assert narrow < 1e-3
    # The error is of second order at most, so a quarter of the spread leaves a sixteenth or less.
    assert narrow < wide / 12
    # The yardstick can see a weight that is wrong by a tenth.
    assert plain_rows_error(0.0, rows, bias=0.1) > 1e-3


def test_eight_plain_rows_beat_one():
    """The signs carry the variance, which the mean alone leaves out."""
    assert plain_rows_error(0.4, 8) < plain_rows_error(0.4, 1) / 2


@pytest.mark.parametrize("calls", [[1] * 90, [60, *[1] * 30], [20, 50, 20], [5, 55, *[1] * 30]])
def test_plain_rows_of_tokens_all_alike_are_the_full_cache(calls):
    """Where a model attends by itself, rows and mask that it is handed lose nothing either."""
    H, budget, sink, total = 2, 40, 3, sum(calls)
    q, k = normal(0, 1, H, total, WIDTH), normal(1, 1, H, total, WIDTH)
    v = normal(2, 1, H, total, VALUE_WIDTH)
    rows = plain_rows_for(budget)
    assert rows == 2
    gone = slice(sink, total - (budget - rows - sink))
    k[:, :, gone], v[:, :, gone] = k[:, :, sink : sink + 1], v[:, :, sink : sink + 1]
    policy = make_policy("streaming", sink=sink)
    cache = PlainRowsKVCache(budgets=[budget] * H, policy=policy)
    for begin, L in zip(accumulate([0, *calls[:-1]]), calls, strict=True):
        part = slice(begin, begin + L)
        mask = cache.make_mask(L)
        keys, values = cache.update_and_fetch(mx.array(k[:, :, part]), mx.array(v[:, :, part]))
        out, _, _ = scaled_dot_product_attention_with_scores(
            mx.array(q[:, :, part]), keys, values, scale=SCALE, mask=mask
        )
        assert_full(out, begin, q, k, v)
    # The rows come out of the budget.
    assert cache.evicted == total - (budget - rows)


def test_the_number_of_plain_rows_follows_the_budget():
    """8 of 128 slots, fewer of fewer, always 1 or even, and never a burden on a small budget."""
    assert plain_rows_for(128) == plain_rows_for(4096) == 8
    counts = [plain_rows_for(budget) for budget in range(1, 300)]
    assert counts == sorted(counts)
    assert all(rows == 1 or rows % 2 == 0 for rows in counts)
    assert all(rows == 1 or rows <= budget / 16 for budget, rows in enumerate(counts, 1))


def test_bytes():
    """2 D + Dv + 1 float32 per KV head: 3 D + 1 where values are as wide as keys."""
    remainder = Remainder.empty(3, 5, 64, 48)
    assert Remainder.bytes_per_head(64, 48) == 4 * (2 * 64 + 48 + 1)
    assert Remainder.bytes_per_head(64, 64) == 4 * (3 * 64 + 1)
    assert remainder.nbytes == 3 * 5 * Remainder.bytes_per_head(64, 48)
    keys, values = mx.zeros((3, 5, 7, 64)), mx.zeros((3, 5, 7, 48))
    assert remainder.fold(keys, values).nbytes == remainder.nbytes
