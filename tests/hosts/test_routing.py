"""Routing: reversible, everywhere, and only for caches that can attend."""

import importlib
import sys
from functools import partial

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama, qwen3
from mlx_lm.models.cache import KVCache, QuantizedKVCache

import mlx_h2o
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.hosts import routing
from tiny_models import tiny_model

NAME = "scaled_dot_product_attention"
LATE = "mlx_lm.models.olmo2"


@pytest.fixture
def original():
    """mlx-lm's own attention, with routing uninstalled."""
    mlx_h2o.uninstall()
    return base.scaled_dot_product_attention


def holders() -> dict[str, object]:
    """The attention that each loaded model module holds."""
    return {
        name: getattr(module, NAME)
        for name, module in list(sys.modules.items())
        if name.startswith("mlx_lm.models.") and hasattr(module, NAME)
    }


def test_install_reaches_every_module_and_uninstall_restores_the_same_object(original):
    sys.modules.pop(LATE, None)
    before = holders()
    assert {base.__name__, llama.__name__, qwen3.__name__} <= set(before)
    assert all(held is original for held in before.values())

    mlx_h2o.install()
    assert routing.installed()
    routed = base.scaled_dot_product_attention
    assert routed is not original
    late = importlib.import_module(LATE)  # Imported after: picks the wrapper up by itself.
    assert set(holders().values()) == {routed}
    assert late.__name__ in holders()

    mlx_h2o.uninstall()
    assert not routing.installed()
    assert set(holders().values()) == {original}
    assert late.__name__ in holders()


def test_installing_or_uninstalling_twice_changes_nothing(original):
    mlx_h2o.install()
    routed = base.scaled_dot_product_attention
    mlx_h2o.install()
    assert base.scaled_dot_product_attention is routed
    mlx_h2o.uninstall()
    mlx_h2o.uninstall()
    assert base.scaled_dot_product_attention is original
    mlx_h2o.install()
    assert llama.scaled_dot_product_attention is not original


def test_a_module_that_wrapped_attention_itself_is_left_alone(original, monkeypatch):
    """Only what *is* mlx-lm's function is replaced."""

    def theirs(*args, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(llama, NAME, theirs)
    mlx_h2o.install()
    assert llama.scaled_dot_product_attention is theirs
    mlx_h2o.uninstall()
    assert llama.scaled_dot_product_attention is theirs


def test_the_wrapper_reads_like_the_original(original):
    mlx_h2o.install()
    assert base.scaled_dot_product_attention.__name__ == original.__name__
    assert base.scaled_dot_product_attention.__wrapped__ is original


class Spy:
    """A cache that can attend, and says what it was asked."""

    attending = True

    def attend(self, q, keys, values, *, scale, mask, sinks):
        self.seen = (q, keys, values, scale, mask, sinks)
        return "attended"


@pytest.mark.parametrize("by_name", [False, True])
def test_a_cache_that_can_attend_is_asked_with_everything(original, by_name):
    """gpt-oss passes the cache and scale by place, most models by name."""
    mlx_h2o.install()
    q, k, v, sinks = (mx.zeros((i, 1, 1, 4)) for i in (1, 2, 3, 4))
    spy = Spy()
    if by_name:
        answer = llama.scaled_dot_product_attention(
            q, k, v, cache=spy, scale=0.5, mask="causal", sinks=sinks
        )
    else:
        answer = llama.scaled_dot_product_attention(q, k, v, spy, 0.5, "causal", sinks)
    assert answer == "attended"
    assert all(a is b for a, b in zip(spy.seen, (q, k, v, 0.5, "causal", sinks), strict=True))
    llama.scaled_dot_product_attention(q, k, v, cache=spy, scale=0.5, mask=None)
    assert spy.seen[-2:] == (None, None)


def test_other_caches_go_to_the_original_untouched(original, monkeypatch):
    """None, mlx-lm's own, and a bounded one whose model attends by itself."""
    seen = []

    def recorded(*args, **kwargs):
        seen.append((args, kwargs))
        return "stock"

    monkeypatch.setattr(base, NAME, recorded)
    mlx_h2o.install()
    resting = PlainRowsKVCache(24, policy="streaming")
    for cache in (None, KVCache(), resting):
        assert base.scaled_dot_product_attention(1, 2, 3, cache, scale=4, mask=5) == "stock"
        assert seen.pop() == ((1, 2, 3, cache), {"scale": 4, "mask": 5})
    mlx_h2o.uninstall()


def test_quantized_caches_still_work(original):
    """mlx-lm dispatches on them itself, with tuples in place of arrays."""
    outs = []
    for change in (mlx_h2o.uninstall, mlx_h2o.install):
        change()
        # Widths of 32 are the least that quantization takes.
        cache = QuantizedKVCache(group_size=32, bits=8)
        k, v = (mx.random.normal((1, 2, 9, 32), key=mx.random.key(i)) for i in (1, 2))
        q = mx.random.normal((1, 4, 9, 32), key=mx.random.key(3))
        k, v = cache.update_and_fetch(k, v)
        outs.append(
            qwen3.scaled_dot_product_attention(q, k, v, cache=cache, scale=0.2, mask="causal")
        )
    assert mx.array_equal(*outs)


def test_making_or_loading_a_cache_installs_routing(original, tmp_path):
    model = tiny_model("llama")
    cache = mlx_h2o.make_prompt_cache(model, max_size=32)
    assert routing.installed()
    mlx_h2o.save_prompt_cache(tmp_path / "cache.safetensors", cache)
    mlx_h2o.uninstall()
    mlx_h2o.load_prompt_cache(tmp_path / "cache.safetensors")
    assert routing.installed()


def test_what_a_newer_library_gives_its_attention_is_taken_or_refused(original):
    model = tiny_model("llama")
    cache = mlx_h2o.make_prompt_cache(model, max_size=32)[0]
    q, k, v = (mx.random.normal((1, heads, 3, 32)) for heads in (4, 2, 2))
    rows = cache.update_and_fetch(k, v)
    attend = partial(base.scaled_dot_product_attention, q, *rows, cache, scale=0.2, mask="causal")
    with pytest.raises(ValueError, match="window_size=8, which no bounded cache knows"):
        attend(window_size=8)
    assert attend(window_size=None).shape == q.shape


def test_functions_that_a_newer_mlx_lm_lacks_are_not_wrapped(original, monkeypatch):
    monkeypatch.delattr(sys.modules["mlx_lm.generate"], "speculative_generate_step")
    monkeypatch.delattr("mlx_lm.models.cache.can_trim_prompt_cache")
    monkeypatch.delattr("mlx_lm.models.cache.LRUPromptCache.insert_cache")
    model = tiny_model("llama")
    cache = mlx_h2o.make_prompt_cache(model, max_size=32)
    assert model(mx.array([[1]]), cache=cache).shape[1] == 1


def test_without_routing_a_bounded_cache_fails_loudly(original):
    """Stock attention over a bounded cache would be silently wrong once something is evicted."""
    model = tiny_model("llama")
    cache = mlx_h2o.make_prompt_cache(model, max_size=32)
    mlx_h2o.uninstall()
    model(mx.array([[1]]), cache=cache)
    with pytest.raises(RuntimeError, match=r"mlx_h2o\.install\(\)"):
        model(mx.array([[1]]), cache=cache)
