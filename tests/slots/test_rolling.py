"""Positions without gaps: kept tokens are seen one after the other, whatever was forgotten."""

from itertools import product

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_h2o
from mlx_h2o import Spill, make_prompt_cache
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.loading.load import SAMPLE_TEXT, load
from mlx_h2o.models.make import spill_to
from mlx_h2o.slots.rope import Rope, forgotten_after
from mlx_h2o.spill.setting import Returns
from model_coverage import coverage_model
from tiny_models import TinyLayer, greedy_tokens, prompt_tokens, tiny_model

ROLLING = {"positions": "rolling", "remainder": False}


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("dims", "scale"), [(16, 1.0), (8, 0.5)])
def test_a_turned_key_is_the_one_that_came_later(dims, scale, traditional):
    theirs = nn.RoPE(dims, traditional=traditional, base=1000.0, scale=scale)
    keys = mx.random.normal((2, 3, 1, 16), key=mx.random.key(0))
    rope = Rope(dims, 1000.0, scale, traditional)
    by = mx.array([0, 5, -40])[None, :, None]
    turned = rope.turned(theirs(keys, offset=50), mx.broadcast_to(by, (2, 3, 1)))
    for head, place in enumerate((50, 55, 10)):
        assert mx.allclose(turned[:, head], theirs(keys, offset=place)[:, head], atol=1e-5)
    assert rope.turned(keys.astype(mx.float16), mx.zeros((2, 3, 1))).dtype == mx.float16


def test_forgotten_tokens_are_counted_after_each_row_in_any_order():
    positions = mx.array([[[9, 0, 4, 8]]])
    assert forgotten_after(positions, 10).tolist() == [[[0, 6, 3, 0]]]


@pytest.mark.parametrize("policy", ["salient", "h2o", "keydiff"])
@pytest.mark.parametrize("chunk", [1, 5])
def test_kept_tokens_are_attended_to_at_neighbouring_positions(policy, chunk):
    """Against keys that get their RoPE only now, at 0, 1, 2, ..."""
    rope, theirs = Rope(8, 10000.0), nn.RoPE(8)
    bare = TinyLayer(heads=2, group=1)
    settings = CacheSettings(max_size=20, policy=policy, remainder=False, rope=rope)
    cache = H2OKVCache.of(settings)
    for first in range(0, 100, chunk):
        q, k, v = bare.at(first, chunk)
        held = held_positions(cache, chunk)
        keys, values = cache.update_and_fetch(theirs(k, offset=first), v)
        out = cache.attend(
            theirs(q, offset=first), keys, values, scale=bare.scale, mask=cache.make_mask(chunk)
        )
        for head, kept in enumerate(held):
            seen = mx.array([*kept, *range(first, first + chunk)])
            k_all, v_all = (x[:, head : head + 1, seen] for x in bare.tokens[1:])
            q_now = theirs(q[:, head : head + 1], offset=len(kept))
            mask = "causal" if chunk > 1 else None
            expected = mx.fast.scaled_dot_product_attention(
                q_now, theirs(k_all), v_all, scale=bare.scale, mask=mask
            )
            assert mx.allclose(out[:, head : head + 1], expected, rtol=1e-3, atol=1e-4), first
    assert cache.evicted >= 80


def held_positions(cache, chunk) -> list[list[int]]:
    """What each head still holds when the next tokens are attended from, ascending."""
    held: list[list[int]] = []
    for run in cache.store.runs if cache.store else ():
        for head, row in enumerate(cache.slots(run).positions[0].tolist(), start=run.first):
            if chunk == 1 and run.victims:  # the new row comes into the next victim's slot
                row.pop(cache.layer.victims[0, head, -run.victims].item())
            held.append(sorted(row))
    return held or [[], []]


def test_a_row_comes_back_to_the_place_that_it_has_among_the_rows_held(tmp_path):
    """Queries that equal one absent key as it would be seen, and no key as it came."""
    rope, theirs, count = Rope(8, 100.0), nn.RoPE(8, base=100.0), 320
    settings = CacheSettings(max_size=24, policy="h2o", remainder=False, rope=rope)
    cache = H2OKVCache.of(settings)
    one = Returns(every=8, window=2, pages=2, rows=1, ahead=0)
    spill_to([cache], Spill(tmp_path, returns=one))
    k, v = (mx.random.normal((1, 2, count, 8), key=mx.random.key(i)) for i in (1, 2))
    # Each page has a direction of its own, which its mean tells; all keys are equally long.
    k = 0.3 * k + mx.repeat(k[:, :, : count // 16], 16, axis=2)
    k = 3 * k / mx.linalg.norm(k, axis=-1, keepdims=True)
    for first in range(0, count, 40):
        part = slice(first, first + 40)
        keys, values = cache.update_and_fetch(theirs(k[:, :, part], offset=first), v[:, :, part])
        cache.attend(mx.zeros((1, 2, 40, 8)), keys, values, scale=1.0, mask="causal")
    held = held_positions(cache, 40)
    wanted = 216  # at its own position it would be turned away from the query
    assert not any(wanted in of_head for of_head in held)
    seen_at = [count - 1 - sum(p > wanted for p in of_head) for of_head in held]
    ask = mx.repeat(theirs(4 * k[:, :, wanted : wanted + 1]), 2, axis=2)
    ask = rope.turned(ask, mx.array(seen_at)[None, :, None])
    new = 0.1 * mx.random.normal((2, 1, 2, 2, 8), key=mx.random.key(3))
    keys, values = cache.update_and_fetch(theirs(new[0], offset=count), new[1])
    out = cache.attend(ask, keys, values, scale=1.0, mask="causal")
    assert all(wanted in of_head for of_head in held_positions(cache, 2))
    assert mx.allclose(out[:, :, 0], v[:, :, wanted], atol=0.05)


def test_nothing_changes_while_nothing_is_forgotten():
    model = coverage_model("qwen3")
    prompt = prompt_tokens(20)
    absolute = make_prompt_cache(model, max_size=200, remainder=False)
    rolling = make_prompt_cache(model, max_size=200, **ROLLING)
    assert greedy_tokens(model, rolling, prompt, 30) == greedy_tokens(model, absolute, prompt, 30)


def test_a_file_remembers_the_rope(tmp_path):
    model = coverage_model("phi")
    cache = make_prompt_cache(model, max_size=24, **ROLLING)
    greedy_tokens(model, cache, prompt_tokens(60), 5)
    mlx_h2o.save_prompt_cache(tmp_path / "rolling", cache)
    loaded = mlx_h2o.load_prompt_cache(tmp_path / "rolling")
    assert "positions without gaps" in str(mlx_h2o.describe(loaded)[0])
    assert [entry.settings.rope for entry in loaded] == [Rope(16, 10000.0)] * 2
    more = prompt_tokens(20, 3)
    assert greedy_tokens(model, loaded, more, 9) == greedy_tokens(model, cache, more, 9)


NO_PLAIN_ROPE = ("gpt2", "llama4_text", "phimoe", "hunyuan")


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        *((name, ROLLING, "another one than mlx.nn.RoPE, or none") for name in NO_PLAIN_ROPE),
        ("deepseek_v3", ROLLING, "omit positions"),
        ("phi3small", ROLLING, "blocks of places"),
        ("llama", {"positions": "rolling", "remainder": True}, "remainder=False"),
        ("llama", {**ROLLING, "bits": 8}, "omit bits"),
        ("llama", {"positions": "relative"}, 'positions must be "absolute" or "rolling"'),
    ],
)
def test_models_and_settings_without_it_are_refused(name, settings, reason):
    with pytest.raises(ValueError, match=reason):
        make_prompt_cache(coverage_model(name), max_size=64, **settings)


def test_a_remainder_that_is_only_a_default_is_turned_off():
    model = tiny_model("llama")
    cache = make_prompt_cache(model, max_size=64, positions="rolling")
    wanted = make_prompt_cache(model, max_size=64, **ROLLING)
    assert [layer.config() for layer in cache] == [layer.config() for layer in wanted]


def test_a_rope_of_wider_keys_is_refused():
    cache = H2OKVCache.of(CacheSettings(max_size=20, remainder=False, rope=Rope(64, 10000.0)))
    with pytest.raises(ValueError, match="turns 64 channels, and this layer's keys have 32"):
        cache.update_and_fetch(mx.zeros((1, 2, 3, 32)), mx.zeros((1, 2, 3, 32)))


FACTS = {"Otto Shaw": "4876", "Clara Pole": "3159", "Hugh Frost": "9024", "Ruth Lane": "5502"}


@pytest.mark.slow
def test_what_was_said_long_before_the_trained_context_is_still_read():
    """The first tokens are kept and asked for 3,000 tokens later, by a model that was trained to
    see 2,048. Measured: all four without gaps, as after 700 tokens; none at their own positions."""
    model, tokenizer = load("builtin:recall-4m")
    story = tokenizer.encode(SAMPLE_TEXT.read_text())[:3000]
    answers: dict[str, int] = {"absolute": 0, "rolling": 0}
    for (name, number), positions in product(FACTS.items(), answers):
        fact = tokenizer.encode(f"The secret number of {name} is {number}.\n\n")
        question = tokenizer.encode(f"\n\nQuestion: What is the secret number of {name}?\nAnswer:")
        cache = make_prompt_cache(
            model,
            max_size=256,
            policy=f"streaming:sink={len(fact)}",
            budgets="uniform",
            remainder=False,
            positions=positions,
        )
        said = greedy_tokens(model, cache, [*fact, *story, *question], 6, chunk=256)
        answers[positions] += number in tokenizer.decode(said)
    assert answers["rolling"] >= 3
    assert answers["absolute"] <= 1
