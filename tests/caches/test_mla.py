"""MLA: the cache holds latent rows and RoPE keys, and every bound holds as for any other cache."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_h2o
from mlx_h2o import make_prompt_cache
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.caches.latent import LatentKVCache
from model_coverage import coverage_model
from tiny_models import kept_positions, prefill, prompt_tokens

FAMILIES = ["deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "mistral4"]
LATENT, ROPE = 512, 64  # of DeepSeek-V3


def latent_layers(cache):
    members = [member for entry in cache for member in getattr(entry, "caches", [entry])]
    return [member for member in members if isinstance(member, LatentKVCache)]


@pytest.mark.few(5)
@pytest.mark.parametrize("evict_every", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_more_than_its_parts_are_held_or_attended_to(family, evict_every):
    """peak <= sink + heavy + recent + evict_every - 1 while decoding, after any prompt."""
    sink, heavy, recent = 4, 12, 8
    model = coverage_model(family)
    cache = make_prompt_cache(
        model,
        max_size=sink + heavy + recent + evict_every - 1,
        policy=f"h2o:sink={sink}:recent={recent}:evict_every={evict_every}",
    )
    prefill(model, cache, prompt_tokens(50), 17)
    layers = latent_layers(cache)
    assert layers
    for token in prompt_tokens(30, 2):
        prefill(model, cache, [token], 1)
        for entry in layers:
            assert entry.size() <= sink + heavy + recent + evict_every - 1
            (held,) = kept_positions(entry)
            newest = entry.offset - 1
            assert held[:sink] == list(range(sink))
            assert held[-recent:] == list(range(newest - recent + 1, newest + 1))
    assert {entry.offset for entry in layers} == {80}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mass_is_that_of_all_query_heads(family):
    model = coverage_model(family)
    cache = make_prompt_cache(model, max_size=200, policy="h2o")
    prefill(model, cache, prompt_tokens(20), 7)
    prefill(model, cache, prompt_tokens(10, 2), 1)
    for entry in latent_layers(cache):
        total = entry.store.view(entry.store.runs[0], "scores").sum().item()
        assert total == pytest.approx(30, rel=1e-4)  # one for each query, the mean over heads


@pytest.mark.parametrize("steps", [1, 40])
def test_absorbed_attention_of_real_widths(steps):
    """Latent rows of 512 and RoPE keys of 64, as DeepSeek-V3 decodes: latent keys, the RoPE part
    as a mask to add, 16 query heads over one KV head."""
    heads, scale, key = 16, (128 + ROPE) ** -0.5, mx.random.key(0)
    settings = CacheSettings(max_size=24, policy="h2o", remainder=False)
    cache = LatentKVCache.of(settings)
    rows = mx.random.normal((1, 1, steps + 10, LATENT + ROPE), key=key)
    queries = mx.random.normal((1, heads, steps + 10, LATENT + ROPE), key=key)
    for i in range(steps + 10):
        q, row = queries[:, :, i : i + 1], rows[:, :, i : i + 1]
        latent, rope = cache.update_and_fetch(row[..., :LATENT], row[..., LATENT:])
        mask = scale * (q[..., LATENT:] @ rope.swapaxes(-1, -2))
        out = cache.attend(q[..., :LATENT], latent, latent, scale=scale, mask=mask)
        whole = mx.concatenate([latent, rope], axis=-1)
        expected = mx.fast.scaled_dot_product_attention(q, whole, latent, scale=scale, mask=None)
        assert mx.allclose(out, expected, rtol=1e-3, atol=1e-4), i
    assert cache.size() == min(24, steps + 10)
    (held,) = kept_positions(cache)
    slots = cache.slots(cache.store.runs[0])
    order = mx.argsort(slots.positions[0, 0])
    assert mx.array_equal(slots.keys[0, 0][order], rows[0, 0, mx.array(held), :LATENT])


def test_reset_and_uninstall_give_mlx_lms_own_back():
    model: nn.Module = coverage_model("deepseek_v3")
    own = make_prompt_cache(model, max_size=24)
    first = prefill(model, own, prompt_tokens(60), 13)
    again = make_prompt_cache(model, max_size=24)
    assert mx.array_equal(prefill(model, again, prompt_tokens(60), 13), first)
    mlx_h2o.install(max_size=24)
    mlx_h2o.uninstall()
    caches = stock_prompt_cache(model)
    assert {type(entry) for entry in caches} == {KVCache}
    prefill(model, caches, prompt_tokens(60), 13)
    assert caches[0].size() == 60
