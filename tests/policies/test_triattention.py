"""`triattention`: keys by what queries at a head's centre will make of them."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_h2o
from arrays import numpy_of
from mlx_h2o import H2OKVCache, QueryCentres, Slots, learn_query_centres, make_policy
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.calibration.centres_build import KEPT
from mlx_h2o.calibration.scaling_build import frame_tokens
from mlx_h2o.loading.identity import identity_of
from mlx_h2o.storage.key_scaling import Frame
from mlx_h2o.storage.rope import Rope
from model_coverage import coverage_model
from tiny_models import TinyLayer, greedy_tokens, kept_positions, prefill, prompt_tokens, tiny_model

D = 32


def slots_of(keys, centres, offset, **others) -> Slots:
    """All positions in order `[1, H, N, D]`, all of which may go."""
    B, H, N, _ = keys.shape
    positions = mx.broadcast_to(mx.arange(N), (B, H, N))
    may_go = mx.ones((B, H, N), mx.bool_)
    nothing = mx.zeros((B, H, N))
    of = {"values": keys, "positions": positions, "scores": nothing, "evictable": may_go} | others
    mean = mx.zeros((B, H, keys.shape[-1]))
    return Slots(keys=keys, offset=offset, evicted=0, evicted_mean_key=mean, centres=centres, **of)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("dims", "scale"), [(D, 1.0), (16, 0.5)])
def test_a_key_is_worth_the_centre_querys_logits_to_come(dims, scale, traditional):
    """Against mlx's own RoPE, query by query, and the norms of pairs one by one."""
    H, G, N, steps = 2, 3, 40, [1, 2, 4, 8]
    rope = Rope(dims, 1000.0, scale, traditional)
    theirs = nn.RoPE(dims, traditional=traditional, base=1000.0, scale=scale)
    q, k, rest = (mx.random.normal(s, key=mx.random.key(i)) for i, s in enumerate(
        [(H, G, D), (1, H, N, D), (H, G, dims // 2)]))  # fmt: skip
    spread = mx.abs(rest)
    centres = QueryCentres(q, spread, rope)
    policy = make_policy("triattention", horizon=15)
    found = numpy_of(policy.priority(slots_of(theirs(k), centres, N)))[0]
    assert policy.steps == steps
    for h in range(H):
        worths = []
        for g in range(G):
            asked = [theirs(q[h, g][None, None, None], offset=N - 1 + step) for step in steps]
            logits = np.mean([numpy_of(theirs(k)[0, h] @ one.reshape(D)) for one in asked], axis=0)
            bare = numpy_of(k[0, h])[:, :dims]
            pairs = bare.reshape(N, -1, 2) if traditional else bare.reshape(N, 2, -1).swapaxes(1, 2)
            worth = logits + np.linalg.norm(pairs, axis=-1) @ numpy_of(spread[h, g])
            worths.append((worth - worth.mean()) / worth.std())
        assert np.allclose(found[h], np.max(worths, axis=0), atol=2e-3)


def test_centres_are_the_mean_before_rope_and_how_far_queries_scatter():
    H, G, T = 2, 2, 50
    rope, theirs = Rope(16, 10000.0), nn.RoPE(16)
    bare = mx.random.normal((3, H * G, T, D), key=mx.random.key(1)) + 2.0
    centres = QueryCentres.of(theirs(bare), H, rope)
    expected = numpy_of(bare).mean(axis=(0, 2))
    assert np.allclose(numpy_of(centres.centre).reshape(-1, D), expected, atol=1e-4)
    pairs = numpy_of(bare)[..., :8] + 1j * numpy_of(bare)[..., 8:16]
    spread = np.abs(pairs).mean(axis=(0, 2)) - np.abs(pairs.mean(axis=(0, 2)))
    assert np.allclose(numpy_of(centres.spread).reshape(-1, 8), spread, atol=1e-4)
    alike = QueryCentres.of(theirs(mx.ones((1, H * G, T, D))), H, rope)
    assert mx.abs(alike.spread).max().item() < 1e-4


def test_a_head_that_looks_a_fixed_distance_back_keeps_what_lies_there():
    """All queries are one; all keys are what it would see best 20 tokens before itself."""
    rope, theirs, N, back = Rope(D, 100.0), nn.RoPE(D, base=100.0), 60, 20
    query = mx.random.normal((1, 1, 1, D), key=mx.random.key(0))
    keys = theirs(mx.broadcast_to(theirs(query, offset=back), (1, 1, N, D)))
    queries = theirs(mx.broadcast_to(query, (1, 1, N, D)))
    cache = H2OKVCache(
        budgets=[16],
        policy=make_policy("triattention", sink=0, recent=0, evict_every=1, horizon=1),
        centres=QueryCentres.of(queries, 1, rope),
        remainder=False,
    )
    cache.attend(queries, *cache.update_and_fetch(keys, keys), scale=1.0, mask="causal")
    (kept,) = kept_positions(cache)
    assert N - back in kept
    mass = mx.softmax(0.5 * theirs(query, offset=N) @ keys.swapaxes(-1, -2), axis=-1)[0, 0, 0]
    assert mass[mx.array(kept)].sum().item() > 0.95
    assert mass[-16:].sum().item() < 0.2


def test_the_highest_of_each_head_stay():
    layer, rope, T = TinyLayer(key_width=D), Rope(D, 10000.0), 90
    drawn = mx.random.split(mx.random.key(3))
    centre, rest = (mx.random.normal((2, 2, D), key=key) for key in drawn)
    centres = QueryCentres(centre, mx.abs(rest[..., : D // 2]) / 4, rope)
    policy = make_policy("triattention", sink=2, recent=6)
    cache = H2OKVCache(budgets=[30, 40], policy=policy, remainder=False, centres=centres)
    layer.feed(cache, T, chunk=T)
    places = mx.arange(T)
    may_go = mx.broadcast_to((places >= 2) & (places < T - 6), (1, 2, T))
    held = slots_of(layer.tokens[1][:, :, :T], centres, T, evictable=may_go)
    worth = numpy_of(policy.priority(held))[0, :, 2 : T - 6]
    for head, budget in enumerate((30, 40)):
        best = 2 + np.argsort(worth[head])[-(budget - 8) :]
        assert kept_positions(cache)[head] == sorted([0, 1, *best.tolist(), *range(T - 6, T)])


@pytest.mark.parametrize("framed", [False, True])
def test_packed_keys_are_ranked_as_the_model_made_them(framed):
    layer = TinyLayer(key_width=64, value_width=64)
    shifted = layer.tokens[1] + 5.0 * (mx.arange(64) == 7)
    frame = Frame.of(shifted) if framed else None
    given = {"policy": make_policy("triattention", sink=2, recent=6), "remainder": False}
    given |= layer.given("triattention")
    packed, plain = (
        H2OKVCache(budgets=[40, 48], **given, **more)
        for more in ({"bits": 8, "group_size": 32, "frame": frame}, {})
    )
    q, _, v = layer.at(0, 120)
    for cache in (packed, plain):
        keys = cache.update_and_fetch(shifted[:, :, :120], v)
        cache.attend(q, *keys, scale=layer.scale, mask="causal")
    for ours, theirs in zip(kept_positions(packed), kept_positions(plain), strict=True):
        assert len(set(ours) & set(theirs)) >= len(ours) - 2


def test_chunks_that_need_no_eviction_between_are_as_one():
    """Which go is asked when they go, at their distance then, so later cuts may differ."""
    layer = TinyLayer(key_width=D)
    policy = make_policy("triattention", sink=2, recent=6)
    caches = [H2OKVCache(budgets=[40, 40], policy=policy, **layer.given(policy)) for _ in range(3)]
    for cache, chunks in zip(caches, ([100], [40, 60], [20, 20, 60]), strict=True):
        for chunk in chunks:
            layer.feed(cache, chunk, chunk)
    assert kept_positions(caches[0]) == kept_positions(caches[1]) == kept_positions(caches[2])


# -- whole models ----------------------------------------------------------------------------------


def learnt(family="llama", **changes):
    model = tiny_model(family, **changes)
    learn_query_centres(model, prompt_tokens(200))
    return model


def test_centres_are_the_means_of_the_queries_that_a_layer_makes():
    model, tokens = tiny_model("llama"), prompt_tokens(200)
    first = learn_query_centres(model, tokens)[0]
    block = model.layers[0]
    rows = block.input_layernorm(model.model.embed_tokens(mx.array([tokens])))
    queries = numpy_of(block.self_attn.q_proj(rows)).mean(axis=(0, 1))
    assert np.allclose(numpy_of(first.centre).ravel(), queries, atol=1e-4)
    assert first.centre.shape == (2, 2, 12)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen3_next"])
def test_models_with_a_plain_rope_are_bounded_by_it(family):
    model = tiny_model(family)
    centres = learn_query_centres(model, prompt_tokens(200))
    settings = {"policy": "triattention", "remainder": False, "budgets": "uniform"}
    cache = mlx_h2o.make_prompt_cache(model, 50, **settings)
    ours = [entry for entry in cache if isinstance(entry, BoundedKVCache)]
    assert [entry.centres for entry in ours] == centres
    prefill(model, cache, prompt_tokens(90), 30)
    for entry in ours:
        assert entry.evicted > 40
        # Centres are charged, and what they leave is used.
        row = entry.share.widths.row_bytes
        held = max(map(len, kept_positions(entry))) * row + entry.centres.head_bytes
        assert 49 * row < held <= 50 * row


class Tokenizer:
    def encode(self, text):
        return [ord(letter) % 100 for letter in text[:500]]


def test_centres_are_learnt_once_and_kept(capsys):
    def make():
        model = tiny_model("qwen3")
        model.mlx_h2o_tokenizer = Tokenizer()
        cache = mlx_h2o.make_prompt_cache(model, 64, policy="triattention")
        return [
            entry.centres for entry in cache
        ], "Measuring query centres" in capsys.readouterr().err

    centres, learnt = make()
    assert learnt
    assert make() == (centres, False)
    path = KEPT.place_of(identity_of(tiny_model("qwen3"), [2, 2], [16, 16]))
    data = json.loads(path.read_text())
    data["layers"].pop()
    path.write_text(json.dumps(data))
    assert make() == (centres, True)
    assert make() == (centres, False)


def test_centres_hardly_depend_on_the_text():
    """Which the paper builds on: in a trained model they are the model's own."""
    model, tokenizer = mlx_h2o.load("builtin:recall-4m")
    tokens = frame_tokens(tokenizer)
    one, other = (learn_query_centres(model, part) for part in (tokens[:700], tokens[-700:]))
    pairs = [
        [numpy_of(layer.centre).reshape(-1, layer.keys[1]) for layer in layers]
        for layers in (one, other)
    ]
    a, b = (np.concatenate(of_layers) for of_layers in pairs)
    cosines = (a * b).sum(axis=-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    assert np.median(cosines) > 0.9


@pytest.mark.parametrize("settings", [{}, {"bits": 8}, {"unit": "layer"}, {"remainder": False}])
def test_saved_and_loaded_it_goes_on_alike_in_its_bytes(tmp_path, settings):
    model = learnt(hidden_size=128, head_dim=32)
    given = {"policy": "triattention", "recent": 6, "evict_every": 4, "group_size": 32} | settings
    if "bits" not in given:
        del given["group_size"]
    full = 2 * 4 * 2 * 2 * 32 * 200  # keys and values, float32, layers, heads, width, tokens
    cache = mlx_h2o.make_prompt_cache(model, max_bytes=full // 4, **{"bits": 16} | given)
    greedy_tokens(model, cache, prompt_tokens(150), 50, chunk=40)
    assert all(entry.evicted > 50 for entry in cache)
    assert full // 5 < sum(entry.nbytes for entry in cache) <= full // 4
    mlx_h2o.save_prompt_cache(tmp_path / "kept", cache)
    loaded = mlx_h2o.load_prompt_cache(tmp_path / "kept")
    assert [entry.centres for entry in loaded] == [entry.centres for entry in cache]
    more = prompt_tokens(20, seed=3)
    assert greedy_tokens(model, loaded, more, 30) == greedy_tokens(model, cache, more, 30)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "another one than mlx.nn.RoPE, or none"),
        ("llama4_text", "another one than mlx.nn.RoPE, or none"),
        ("deepseek_v3", "choose another policy"),
        ("phi3small", "choose another policy"),
    ],
)
def test_models_whose_queries_cannot_be_told_are_refused(name, reason):
    model = coverage_model(name)
    with pytest.raises(ValueError, match=reason):
        learn_query_centres(model, prompt_tokens(100))
    model.mlx_h2o_tokenizer = type("Tokenizer", (), {"encode": lambda _, text: [1] * 500})()
    with pytest.raises(ValueError, match=reason):
        mlx_h2o.make_prompt_cache(model, 64, policy="triattention", budgets="uniform")


def test_what_is_missing_is_named():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="learn_query_centres"):
        mlx_h2o.make_prompt_cache(model, 64, policy="triattention")
    with pytest.raises(ValueError, match="make_prompt_cache, which measures them, or give centres"):
        H2OKVCache(64, policy="triattention")
    with pytest.raises(ValueError, match="too few"):
        learn_query_centres(model, [1, 2, 3])
    with pytest.raises(ValueError, match="omit policy"):
        mlx_h2o.calibrate(model, prompt_tokens(300), policy="triattention")
    with pytest.raises(ValueError, match="omit positions"):
        mlx_h2o.make_prompt_cache(
            learnt(), 64, policy="triattention", positions="rolling", remainder=False
        )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"horizon": 0}, "horizon must be from 1"),
        ({"horizon": 2**30}, "horizon must be from 1"),
        ({"age_normalised": True}, "does not rank by scores"),
    ],
)
def test_settings_that_it_cannot_have_are_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        make_policy("triattention", **settings)


def test_centres_that_do_not_fit_are_refused():
    layer = TinyLayer(key_width=D)
    given = layer.given("triattention")
    centres = given["centres"]
    with pytest.raises(ValueError, match="does not use centres"):
        H2OKVCache(64, policy="h2o", **given)
    with pytest.raises(ValueError, match="must be QueryCentres or None; got int"):
        H2OKVCache(64, policy="triattention", centres=3)
    with pytest.raises(ValueError, match="centres are for"):
        TinyLayer(key_width=16).feed(H2OKVCache(64, policy="triattention", **given), 1)
    with pytest.raises(ValueError, match="key width"):
        QueryCentres(centres.centre[0], centres.spread, centres.rope)
    for wrong in (-1.0, mx.nan):
        with pytest.raises(ValueError, match="not below 0"):
            QueryCentres(centres.centre, centres.spread * 0 + wrong, centres.rope)


def test_files_without_their_centres_are_refused():
    layer = TinyLayer(key_width=D)
    cache = H2OKVCache(64, policy="triattention", **layer.given("triattention"))
    layer.feed(cache, 90, chunk=30)
    arrays, text = cache.state
    config = json.loads(text)
    for name in ("centres.centre", "centres.spread"):
        part = {key: array for key, array in arrays.items() if key != name}
        with pytest.raises(ValueError, match="Centres of queries are"):
            H2OKVCache.from_state((part, text))
    bare = {key: array for key, array in arrays.items() if not key.startswith("centres.")}
    with pytest.raises(ValueError, match="Centres of queries are"):
        H2OKVCache.from_state((bare, text))
    del config["centres"]
    with pytest.raises(ValueError, match="rope"):
        H2OKVCache.from_state((arrays, json.dumps(config)))
    with pytest.raises(ValueError, match="give centres"):
        H2OKVCache.from_state((bare, json.dumps(config)))
