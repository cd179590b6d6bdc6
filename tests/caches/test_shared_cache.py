"""Layers that attend to another's keys and values: one cache, and the masses of all."""

import copy
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base

import mlx_h2o
from mlx_h2o import make_prompt_cache
from mlx_h2o.budgets.settings import CacheSettings, ModelSettings, packing_of
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.caches.shared import SharedKVCache
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.models.make import bounded_caches
from model_coverage import coverage_model
from tiny_models import TinyLayer, greedy_steps, kept_positions, prefill, prompt_tokens

SHARERS = 3


def shared_cache(settings: CacheSettings, sharers: int = SHARERS) -> SharedKVCache:
    cache = SharedKVCache.of(settings)
    cache.sharers = sharers
    return cache


def settings_of(size=24, policy="h2o", **others) -> CacheSettings:
    return CacheSettings(max_size=size, policy=policy, **others)


def step(cache, layer, first, count):
    """All sharers attend to the next tokens, each with its own query heads of every group."""
    q, k, v = layer.at(first, count)
    B, Hq, L, D = q.shape
    parts = q.reshape(B, layer.heads, SHARERS, -1, L, D)
    mask = cache.make_mask(L)
    keys, values = cache.update_and_fetch(k, v)
    outs = []
    for i in range(SHARERS):
        own = parts[:, :, i].reshape(B, -1, L, D)
        outs.append(cache.attend(own, keys, values, scale=layer.scale, mask=mask))
    out = mx.stack([o.reshape(B, layer.heads, -1, L, o.shape[-1]) for o in outs], axis=2)
    return out.reshape(B, Hq, L, -1)


@pytest.mark.few(5)
@pytest.mark.pairwise
@pytest.mark.parametrize("policy", ["h2o", "salient", "ema", "tova", "streaming"])
@pytest.mark.parametrize("remainder", [True, False], ids=["remainder", ""])
@pytest.mark.parametrize("bits", [None, 8])
def test_sharers_are_as_query_heads_of_one_layer(policy, remainder, bits):
    """The same output, the same tokens kept: through prompts and single tokens, past evictions."""
    layer = TinyLayer(group=2 * SHARERS, key_width=32, value_width=32)
    packing = packing_of(bits, None, None, 32, None)
    settings = settings_of(policy=policy, remainder=remainder, packing=packing)
    shared, alone = shared_cache(settings), H2OKVCache.of(settings)
    for first, count in [(0, 30), (30, 9), *[(39 + i, 1) for i in range(30)]]:
        ours = step(shared, layer, first, count)
        whole = layer.feed(alone, count, chunk=count)
        assert mx.allclose(ours, whole, rtol=1e-4, atol=1e-5), (first, count)
    assert shared.evicted > 30
    assert kept_positions(shared) == kept_positions(alone)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4_text", "afm7", "iquestloopcoder"])
def test_models_whose_layers_share_keys_get_a_cache_for_all_of_them(name):
    model = coverage_model(name)
    cache = make_prompt_cache(model, max_size=24, policy="h2o", remainder=False)
    shared = [entry for entry in cache if isinstance(entry, SharedKVCache)]
    assert shared
    prefill(model, cache, prompt_tokens(20), 7)
    for entry in shared:
        # Every query head of every sharer gives a mass of one: nothing was evicted yet.
        total = entry.store.view(entry.store.runs[0], "scores").sum(axis=-1)
        assert mx.allclose(total, mx.full(total.shape, 20.0), rtol=1e-4)
    assert f"attended to by {shared[0].sharers} layers" in repr(mlx_h2o.describe(cache))


def test_stand_ins_have_the_shape_of_all_rows_and_nothing_in_them():
    layer, cache = TinyLayer(), shared_cache(settings_of(), 2)
    for first in range(60):
        q, k, v = layer.at(first)
        keys, values = cache.update_and_fetch(k, v)
        stand_ins = cache.keys_and_values()
        own = cache.attend(q, keys, values, scale=layer.scale)
        other = base.scaled_dot_product_attention(q, *stand_ins, None, layer.scale, None)
        assert mx.array_equal(own, other)
    assert [x.shape for x in stand_ins] == [(1, 2, 60, 8), (1, 2, 60, 6)]
    assert mx.all(mx.isnan(stand_ins[0]))
    assert cache.size() < 24


def test_too_few_and_too_many_who_attend_are_told():
    layer, cache = TinyLayer(), shared_cache(settings_of(), 2)
    q, k, v = layer.at(0)
    keys, values = cache.update_and_fetch(k, v)
    cache.attend(q, keys, values, scale=1.0)
    with pytest.raises(RuntimeError, match="did not ask the cache to attend"):
        cache.update_and_fetch(k, v)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        copy.deepcopy(cache)
    with pytest.raises(RuntimeError, match="other keys"):
        cache.attend(q, k + 0, values, scale=1.0)
    cache.attend(q, keys, values, scale=1.0)
    with pytest.raises(RuntimeError, match="2 layers were to attend"):
        cache.attend(q, keys, values, scale=1.0)


def test_a_file_remembers_how_many_attend(tmp_path):
    model = coverage_model("gemma4_text")
    cache = make_prompt_cache(model, max_size=24)
    prefill(model, cache, prompt_tokens(60), 13)
    mlx_h2o.save_prompt_cache(tmp_path / "shared", cache)
    loaded = mlx_h2o.load_prompt_cache(tmp_path / "shared")
    assert [type(entry) for entry in loaded] == [type(entry) for entry in cache]
    expected = prefill(model, copy.deepcopy(cache), prompt_tokens(30, 3), 1)
    assert mx.array_equal(prefill(model, loaded, prompt_tokens(30, 3), 1), expected)


def test_undo_is_refused():
    with pytest.raises(ValueError, match=r"gemma4_text share keys and values.*omit undo"):
        make_prompt_cache(coverage_model("gemma4_text"), max_size=24, undo=2)
    with pytest.raises(ValueError, match="omit undo"):
        shared_cache(settings_of(undo=1))


def test_keys_that_are_shared_in_an_unknown_way_are_refused():
    """As an mlx-lm before 0.32.1 does it in Gemma 3n: by the cache's `state`."""
    model = coverage_model("qwen3")
    kinds = [replace(kind, derived=True, sharers=2) for kind in layer_kinds(model)]
    with pytest.raises(ValueError, match=r"Layers of qwen3 share keys.*update mlx-lm"):
        bounded_caches(model, ModelSettings(24), kinds)


def test_mlx_lms_own_loop_decodes_with_it():
    """It looks a token ahead, and evaluates nothing but tokens."""
    model, prompt = coverage_model("gemma3n"), prompt_tokens(40)
    cache = make_prompt_cache(model, max_size=24)
    steps = generate_step(
        mx.array(prompt), model, max_tokens=40, prompt_cache=cache, prefill_step_size=13
    )
    said = [int(token) for token, _ in steps]
    again = make_prompt_cache(model, max_size=24)
    logits = prefill(model, again, prompt[:-1], 13)
    logits = prefill(model, again, prompt[-1:], 1)
    expected = [mx.argmax(logits).item()]
    expected += [mx.argmax(x).item() for _, x in greedy_steps(model, again, logits, 39)]
    assert said == expected
