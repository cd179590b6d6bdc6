"""Slots that the caller gives each layer: as a list, or by a function."""

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import mlx_h2o
from mlx_h2o import make_prompt_cache
from mlx_h2o.caches.base import BoundedKVCache
from model_coverage import coverage_model
from tiny_models import prefill, prompt_tokens


def sizes(cache):
    return [entry.budgets for entry in cache if isinstance(entry, BoundedKVCache)]


@pytest.mark.parametrize(
    ("name", "budgets", "expected"),
    [
        ("qwen3", [20, 40], [[20, 20], [40, 40]]),
        ("qwen3", (20, [30, 50]), [[20, 20], [30, 50]]),
        ("qwen3", lambda layer, heads: 20 + 10 * layer, [[20, 20], [30, 30]]),
        ("openelm", lambda layer, heads: [24] * heads, [[24, 24], [24]]),
        ("gemma3_text", [None, 20, None, 40], [[20, 20], [40, 40]]),
        ("gemma3_text", lambda layer, heads: 20 * layer, [[20, 20], [60, 60]]),
        ("falcon_h1", [20, 30], [[20, 20], [30, 30]]),
        ("deepseek_v3", [24, 24], [[24], [24]]),
    ],
)
def test_every_layer_has_the_slots_that_it_was_given(name, budgets, expected):
    model = coverage_model(name)
    cache = make_prompt_cache(model, budgets=budgets)
    prefill(model, cache, prompt_tokens(100), 30)
    bounded = [e for entry in cache for e in getattr(entry, "caches", [entry])]
    assert sizes(bounded) == expected
    for entry in bounded:
        if isinstance(entry, BoundedKVCache):
            assert {run.length for run in entry.store.runs} == set(entry.budgets)


def test_installed_for_every_cache_until_a_caller_names_another_size():
    model = coverage_model("qwen3")
    mlx_h2o.install(budgets=[20, 40])
    try:
        assert sizes(mlx_lm_cache.make_prompt_cache(model)) == [[20, 20], [40, 40]]
        other = mlx_lm_cache.make_prompt_cache(model, 64)
        assert len({tuple(of_layer) for of_layer in sizes(other)}) == 1
    finally:
        mlx_h2o.uninstall()


def test_files_keep_them(tmp_path):
    model = coverage_model("qwen3")
    cache = make_prompt_cache(model, budgets=[20, [30, 50]])
    prefill(model, cache, prompt_tokens(100), 30)
    mlx_h2o.save_prompt_cache(tmp_path / "layers", cache)
    loaded = mlx_h2o.load_prompt_cache(tmp_path / "layers")
    assert sizes(loaded) == [[20, 20], [30, 50]]
    more = prompt_tokens(9, 2)
    assert mx.array_equal(prefill(model, loaded, more, 1), prefill(model, cache, more, 1))


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("qwen3", {"budgets": [20, 40], "max_size": 30}, "omit max_size and max_bytes"),
        ("qwen3", {"budgets": [20]}, "1 entries, and the model has 2 caches"),
        ("qwen3", {"budgets": [20, None]}, r"budgets\[1\] is for a KVCache: it must be slots"),
        ("gemma3_text", {"budgets": [20] * 4}, r"budgets\[0\] is for a RotatingKVCache.*None"),
        ("qwen3", {"budgets": [20, [30]]}, r"budgets\[1\] has 1 entries for 2 KV heads"),
        ("qwen3", {"budgets": [20, 0]}, r"budgets\[1\] must be at least 1"),
        ("qwen3", {"budgets": [20, 2.5]}, r"budgets\[1\] must be a whole number"),
        ("qwen3", {"budgets": lambda layer, heads: None}, r"budgets\[0\] must be a whole number"),
        ("qwen3", {"budgets": []}, "a function of a cache's index"),
        ("deepseek_v3", {"budgets": [20, 40]}, "all its layers and heads need the same"),
        ("phi3small", {"budgets": [30, 40]}, "all its layers and heads need the same"),
    ],
)
def test_what_is_no_slots_for_every_layer_is_refused(name, given, reason):
    with pytest.raises(ValueError, match=reason):
        make_prompt_cache(coverage_model(name), **given)
