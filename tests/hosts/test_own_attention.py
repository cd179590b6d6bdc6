"""Models that attend by themselves and ask a cache all the same; logits that are capped softly."""

import importlib
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_h2o
from mlx_h2o import H2OKVCache, make_policy, make_prompt_cache
from mlx_h2o.attention import ops
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.calibration import calibrate
from mlx_h2o.evaluate.side_by_side import side_by_side
from mlx_h2o.hosts import own_attention, routing
from mlx_h2o.slots.key_scaling import Frame
from model_coverage import coverage_model
from research import exact_kl
from tiny_models import TinyLayer, kept_positions, prefill, prompt_tokens, tiny_model

CAP = 2.0  # far below the logits of these layers, so that it shapes them
LAYER = TinyLayer(length=160)
# A cap that bites, since the tiny model's logits are larger, and blocks of which some are not seen.
MODELS = {
    "gemma2": {"attn_logit_softcapping": CAP},
    "plamo2": {},
    "phi3small": {"blocksparse_num_local_blocks": 1, "blocksparse_vert_stride": 3},
}
NAMES = [module.rpartition(".")[2] for module in own_attention.TABLE]


def model_of(name: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A tiny model of the table."""
    if name in MODELS:
        return tiny_model(name, dtype=dtype, **MODELS[name])
    return coverage_model(name, dtype)


def capped_weights(q: np.ndarray, k: np.ndarray, scale: float, seen: np.ndarray) -> np.ndarray:
    """The definition: softmax of c tanh(logits / c), `[Hq, L, N]`."""
    logits = scale * q @ np.repeat(k, q.shape[0] // k.shape[0], 0).swapaxes(-1, -2)
    logits = np.where(seen, CAP * np.tanh(logits / CAP), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def of_layer(layer: TinyLayer, first: int, count: int) -> list[np.ndarray]:
    return [np.array(x[0], np.float64) for x in layer.at(first, count)]


def feed(cache: H2OKVCache, layer: TinyLayer, sizes: list[int]) -> np.ndarray:
    """The next tokens of a layer through a cache, capped; outputs `[Hq, L, Dv]`."""
    outs = []
    for size in sizes:
        q, k, v = layer.at(cache.offset, size)
        mask = cache.make_mask(size)
        k, v = cache.update_and_fetch(k, v)
        out = cache.attend(q, k, v, scale=layer.scale, mask=mask, softcap=CAP)
        mx.eval(out)
        outs.append(np.array(out[0]))
    return np.concatenate(outs, axis=1)


# -- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, "causal", "array", "added"])
@pytest.mark.parametrize("L", [1, 5, 300])
def test_logits_are_capped_before_the_mask(mask, L):
    N = 320
    layer = replace(LAYER, length=N)
    (q, _, _), (_, k, v) = layer.at(N - L, L), layer.at(0, N)
    seen = np.tril(np.ones((N, N), bool))[N - L :] if mask else np.ones((L, N), bool)
    given = {"array": mx.array(seen), "added": mx.where(mx.array(seen), 0.0, -mx.inf)}
    arrays = (np.array(x[0], np.float64) for x in (q, k))
    weights = capped_weights(*arrays, layer.scale, seen)
    expected = weights @ np.repeat(np.array(v[0], np.float64), layer.group, 0)
    options = {"scale": layer.scale, "mask": given.get(mask, mask), "softcap": CAP}
    out, logits, lse = ops.scaled_dot_product_attention_with_scores(q, k, v, **options)
    again, mass, _ = ops.scaled_dot_product_attention_with_mass(q, k, v, **options)
    for got in (out, again, ops.scaled_dot_product_attention(q, k, v, **options)):
        np.testing.assert_allclose(np.array(got[0]), expected, atol=1e-5)
    np.testing.assert_allclose(np.exp(np.array(logits - lse[..., None])[0]), weights, atol=1e-5)
    of_heads = weights.reshape(layer.heads, layer.group, L, N).mean(1).sum(1)
    np.testing.assert_allclose(np.array(mass[0]), of_heads, atol=1e-4)


@pytest.mark.parametrize("softcap", [-1.0, float("nan"), float("inf")])
def test_what_is_no_cap_is_refused(softcap):
    q, k, v = LAYER.at(0, 4)
    with pytest.raises(ValueError, match="softcap must be 0"):
        ops.scaled_dot_product_attention(q, k, v, scale=1.0, softcap=softcap)


# -- a cache --------------------------------------------------------------------------------------


def test_scores_are_masses_of_the_capped_logits():
    cache = H2OKVCache(200, policy="h2o", remainder=False)
    sizes = [40, 7, *[1] * 13]
    out, T = feed(cache, LAYER, sizes), sum(sizes)
    q, k, v = of_layer(LAYER, 0, T)
    weights = capped_weights(q, k, LAYER.scale, np.tril(np.ones((T, T), bool)))
    np.testing.assert_allclose(out, weights @ np.repeat(v, LAYER.group, 0), atol=1e-5)
    mass = weights.reshape(LAYER.heads, LAYER.group, T, T).mean(1).sum(1)
    scores = np.array(cache.store.view(cache.store.runs[0], "scores"))[0]
    np.testing.assert_allclose(scores, mass, atol=1e-4)


@pytest.mark.parametrize("budgets", [[24, 24], [16, 32]])
def test_what_is_kept_is_attended_to_as_it_would_be_alone(budgets):
    cache = H2OKVCache(budgets=budgets, policy="h2o", remainder=False)
    feed(cache, LAYER, [60, *[1] * 20])
    assert [len(kept) for kept in kept_positions(cache)] == budgets
    _, keys, values = of_layer(LAYER, 0, 81)
    q, *_ = of_layer(LAYER, 80, 1)
    before = [set(kept) for kept in kept_positions(cache)]
    out = feed(cache, LAYER, [1])
    for head in range(LAYER.heads):
        # The new row took one slot before it was attended to.
        (victim,) = before[head] - set(kept_positions(cache)[head])
        kept = [*sorted(before[head] - {victim}), 80]
        group = slice(head * LAYER.group, (head + 1) * LAYER.group)
        seen = np.ones((1, len(kept)), bool)
        weights = capped_weights(q[group], keys[head : head + 1, kept], LAYER.scale, seen)
        np.testing.assert_allclose(out[group], weights @ values[head, kept], atol=1e-5)


def test_a_remainder_of_equal_keys_is_those_keys():
    """Then the mean logit is that of each, and nothing is lost by forgetting which was which."""
    q, k, v = LAYER.at(0, 60)
    same = mx.broadcast_to(k[:, :, 3:4], k[:, :, 4:40].shape)
    k = mx.concatenate([k[:, :, :4], same, k[:, :, 40:]], axis=2)
    cache = H2OKVCache(budgets=[20, 20], policy=make_policy("streaming", sink=4))
    outs = []
    for i in range(60):
        mask = cache.make_mask(1)
        rows = cache.update_and_fetch(k[:, :, i : i + 1], v[:, :, i : i + 1])
        at = q[:, :, i : i + 1]
        outs.append(cache.attend(at, *rows, scale=LAYER.scale, mask=mask, softcap=CAP))
    assert cache.evicted == 40
    full = ops.scaled_dot_product_attention(q, k, v, scale=LAYER.scale, mask="causal", softcap=CAP)
    np.testing.assert_allclose(np.array(outs[39]), np.array(full[:, :, 39:40]), atol=1e-4)


def test_a_remainder_outweighs_no_capped_logit():
    """However wide its keys are spread: each of n capped logits is below the cap."""
    cache = H2OKVCache(24, policy="streaming")
    feed(cache, TinyLayer(), [1] * 60)
    remainder = cache.store and cache.layer.remainder
    q, *_ = TinyLayer().at(60)
    r = remainder.column(50 * q, TinyLayer().scale, 4.0, CAP)
    most = CAP + mx.log(remainder.count).max().item()
    assert r.max().item() <= most + 1e-5
    assert remainder.column(50 * q, TinyLayer().scale, 4.0).max().item() > most


@pytest.mark.parametrize("store", [{"bits": 8, "group_size": 32}, {"bits": 8, "recent_bits": 16}])
def test_packed_rows_are_capped_too(store):
    layer = replace(LAYER, key_width=64, value_width=64)
    policy = make_policy("h2o", recent=0.25)
    stores = [H2OKVCache(200, policy=policy, **given) for given in ({}, store)]
    plain, packed = (feed(cache, layer, [30, *[1] * 60]) for cache in stores)
    assert 0 < np.abs(packed - plain).max() < 0.05 * np.abs(plain).max()


def test_a_frame_with_a_centre_is_refused_since_a_cap_does_not_move_with_it():
    shape = (2, 64)
    layer = replace(LAYER, key_width=64, value_width=64)
    for centre, refused in ((mx.zeros(shape), False), (mx.ones(shape), True)):
        frame = Frame(centre, mx.full(shape, 3.0))
        cache = H2OKVCache(48, policy="h2o", bits=8, frame=frame)
        if refused:
            with pytest.raises(ValueError, match="Capped logits do not move"):
                feed(cache, layer, [9])
        else:
            feed(cache, layer, [9])


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["salient", "h2o", "tova", "streaming"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_mlx_lms_own_before_anything_is_evicted(name, policy):
    """Over several blocks of phi3small's."""
    model, tokens = model_of(name), prompt_tokens(170)
    own, ours = stock_prompt_cache(model), make_prompt_cache(model, max_size=300, policy=policy)
    for first, last in ((0, 97), (97, 110), (110, 160), *((i, i + 1) for i in range(160, 170))):
        chunk = mx.array([tokens[first:last]])
        expected, logits = (model(chunk, cache=cache)[..., :120] for cache in (own, ours))
        assert mx.abs(logits - expected).max().item() < 1e-5 * mx.abs(expected).max().item()


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_no_coarser_than_mlx_lms_own(name):
    exact, half = model_of(name), model_of(name, mx.bfloat16)
    exact.update(tree_map(lambda weight: weight.astype(mx.float32), half.parameters()))
    tokens = mx.array([prompt_tokens(40)])
    expected = exact(tokens, cache=stock_prompt_cache(exact))[..., :120]
    off = []
    for cache in (stock_prompt_cache(half), make_prompt_cache(half, max_size=100)):
        logits = half(tokens, cache=cache)[..., :120]
        assert logits.dtype == mx.bfloat16
        off.append(mx.abs(logits - expected).mean().item())
    assert off[1] < 1.3 * off[0]


@pytest.mark.parametrize("name", sorted({*NAMES} - {"phi3small"}))
def test_they_have_what_any_model_has(name):
    """The exact remainder, undo, batches and a policy that sees attention."""
    model = model_of(name)
    cache = make_prompt_cache(model, max_size=24, undo=2)
    prefill(model, cache, prompt_tokens(60), 13)
    bounded = [entry for entry in cache if isinstance(entry, BoundedKVCache)]
    assert {type(entry) for entry in bounded} == {H2OKVCache}
    for entry in bounded:
        assert entry.answers
        assert entry.policy.name == "salient"
        assert entry.size() <= 24
        assert entry.evicted > 30
        assert hasattr(entry, "merge")


def test_mass_goes_to_the_head_whose_rows_were_seen():
    """plamo's query head i attends to the KV head i mod H."""
    model = model_of("plamo")
    cache = make_prompt_cache(model, max_size=100, policy="h2o", remainder=False)
    tokens = mx.array([prompt_tokens(30)])
    full = stock_prompt_cache(model)
    model(tokens, cache=cache)
    model(tokens, cache=full)
    block = model.layers[0]
    layer = block.self_attn
    q = layer.q_proj(block.norm(model.model.embed_tokens(tokens)))
    q = layer.rotary_emb(q.reshape(1, 30, 4, -1).transpose(0, 2, 1, 3))
    keys = np.array(full[0].keys[0, :, :30], np.float64)
    logits = layer.scale * np.array(q[0], np.float64) @ np.tile(keys, (2, 1, 1)).swapaxes(-1, -2)
    weights = np.exp(np.where(np.tril(np.ones((30, 30), bool)), logits, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    expected = weights.reshape(2, 2, 30, 30).mean(0).sum(1)
    scores = np.array(cache[0].store.view(cache[0].store.runs[0], "scores"))[0]
    np.testing.assert_allclose(scores, expected, atol=1e-4)


PHI = model_of("phi3small")


@settings(deadline=None)
@given(total=st.integers(1, 300), length=st.integers(1, 80), places=st.randoms())
def test_blocks_are_seen_by_places_not_by_slots(total, length, places):
    length = min(length, total)
    layer = PHI.layers[0].self_attn
    _, dense = layer._block_sparse_mask(length, total)
    expected = np.array(dense).reshape(layer.n_heads, length, total)
    order = list(range(total))
    places.shuffle(order)
    rows = mx.broadcast_to(mx.array(order), (1, layer.n_kv_heads, total))
    seen = own_attention.blocks_seen(layer, rows, total - length, length)
    assert np.array_equal(np.array(seen)[0], expected[..., order])


def test_blocks_of_places_need_a_cache_that_knows_them():
    routing.install()
    with pytest.raises(ValueError, match=r"make_prompt_cache know alone"):
        PHI(mx.array([[1, 2]]), cache=[H2OKVCache(40), H2OKVCache(40)])
    cache = make_prompt_cache(PHI, max_size=40)
    with pytest.raises(RuntimeError, match="no rows were handed out"):
        cache[0].places()


def test_a_profile_of_such_a_model_shares_slots_out():
    model = tiny_model("gemma2", attn_logit_softcapping=CAP)
    profile = calibrate.calibrate(model, prompt_tokens(64), length=64)
    cache = make_prompt_cache(model, max_size=48, budgets=profile)
    logits = prefill(model, cache, prompt_tokens(90), 30)
    assert mx.all(mx.isfinite(logits))
    with pytest.raises(ValueError, match="caps the logits"):
        exact_kl.calibrate_exactly(model, prompt_tokens(64), length=64)


def test_caches_side_by_side_are_capped_each():
    model, tokens = tiny_model("gemma2", attn_logit_softcapping=CAP), mx.array([prompt_tokens(9)])
    with only_reference():
        alone = model(tokens, cache=stock_prompt_cache(model))
        lists = [stock_prompt_cache(model), make_prompt_cache(model, max_size=40)]
        both = model(mx.concatenate([tokens] * 2), cache=side_by_side(lists))
    assert mx.allclose(both, mx.concatenate([alone] * 2), atol=1e-5).item()


# -- where mlx-lm's source is another -------------------------------------------------------------


@pytest.fixture
def uninstalled():
    mlx_h2o.uninstall()


def test_classes_are_put_back(uninstalled):
    classes = [importlib.import_module(module).Attention for module in own_attention.TABLE]
    originals = [one.__call__ for one in classes]
    routing.install()
    routing.install()
    for one, original in zip(classes, originals, strict=True):
        assert one.__call__ is not original
        assert one.__call__.__wrapped__ is original
    routing.uninstall()
    assert [one.__call__ for one in classes] == originals


def test_a_source_that_changed_is_left_alone_and_told(uninstalled, monkeypatch):
    name = "mlx_lm.models.gemma2"
    known = replace(own_attention.TABLE[name], digest="of another release")
    model = tiny_model("gemma2")
    told = pytest.warns(RuntimeWarning, match=r"mlx_lm\.models\.gemma2 is another.*only keys")
    with monkeypatch.context() as patched, told:
        patched.setitem(own_attention.TABLE, name, known)
        cache = make_prompt_cache(model, max_size=24)
    assert {type(entry) for entry in cache} == {PlainRowsKVCache}
    assert mx.all(mx.isfinite(prefill(model, cache, prompt_tokens(60), 13)))


def test_white_space_is_no_other_source():
    def spread(x):
        return   x  # fmt: skip

    assert own_attention.digest_of(spread)
    assert own_attention.digest_of(len) == ""
