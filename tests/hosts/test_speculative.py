"""mlx-lm takes tokens back: speculative decoding, its LRU cache of prompts, its trim functions."""

import sys
from contextlib import nullcontext

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm import stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache

import mlx_h2o
from covering import covering
from mlx_h2o import load, make_policy, make_prompt_cache
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.policies import policy_names
from tiny_models import prefill, prompt_tokens, tiny_model

# The module; mlx_lm.generate is a function of that name.
mlx_lm_generate = sys.modules["mlx_lm.generate"]
STEPS = 30
TEXT = "The old lighthouse keeper wrote in his diary: " * 3


@pytest.fixture(autouse=True)
def _routed():
    mlx_h2o.install()


def spoiled(model, noise=0.1, seed=7):
    """A draft model: the model with noise in its weights, often right and often wrong."""
    mx.random.seed(seed)

    def with_noise(weight):
        return weight + noise * mx.std(weight) * mx.random.normal(weight.shape, weight.dtype)

    model.update(tree_map(with_noise, model.parameters()))
    return model


def plainly(model, prompt, cache, **options):
    tokens = generate_step(mx.array(prompt), model, prompt_cache=cache, **options)
    return [int(token) for token, _ in tokens]


def speculatively(model, draft, prompt, cache, drafted, **options):
    """The tokens, and how many of them were drafted."""
    found = list(
        mlx_lm_generate.speculative_generate_step(
            mx.array(prompt), model, draft, prompt_cache=cache, num_draft_tokens=drafted, **options
        )
    )
    return [int(token) for token, _, _ in found], sum(from_draft for _, _, from_draft in found)


FACTORS = {
    "family": ["llama", "qwen3"],
    "policy": policy_names(),
    "drafted": [1, 2, 4],
    "prompt": [1, 2, 4, 60],
    "size": [24, 48],
    "reference": [False, True],
    "spare": [0, 1, 12],
    "evict_every": [1, 3],
    "remainder": [True, False],
}


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "case", covering(FACTORS, lambda case: True), ids=lambda case: "-".join(map(str, case.values()))
)
def test_speculative_decoding_gives_the_tokens_of_plain_decoding(case):
    """With a draft model that is half right, whose own cache is bounded too."""
    model = tiny_model(case["family"])
    draft = spoiled(tiny_model(case["family"]))
    settings = {
        "policy": make_policy(case["policy"], evict_every=case["evict_every"], recent=6),
        "remainder": case["remainder"],
        "undo": case["drafted"] + case["spare"],
    }
    prompt = prompt_tokens(case["prompt"], seed=case["prompt"])
    with only_reference() if case["reference"] else nullcontext():
        cache = make_prompt_cache(model, case["size"], **settings)
        plain = plainly(model, prompt, cache, max_tokens=STEPS)
        both = make_prompt_cache(model, case["size"], **settings)
        both += make_prompt_cache(draft, case["size"], **settings)
        options = {"max_tokens": STEPS}
        tokens, drafted = speculatively(model, draft, prompt, both, case["drafted"], **options)
    assert tokens == plain
    assert 0 < drafted < STEPS
    # Nothing of the rejected drafts stays. (The last token may have been a draft, and then stays.)
    held = {entry.offset - len(prompt) for entry in both[: len(cache)]}
    assert len(held) == 1
    assert held <= {STEPS - 1, STEPS}


@pytest.mark.few(2)
@pytest.mark.parametrize("reference", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "store",
    [{}, {"bits": 8}, {"k_bits": 8, "v_bits": 4, "recent_bits": 16}, {"bits": 4, "recent_bits": 8}],
    ids=str,
)
def test_the_embedded_model_speculates_with_its_profile(store, reference):
    """Heads with budgets of their own, through `stream_generate`, in two turns."""
    model, tokenizer = load("builtin:recall-4m")
    draft = spoiled(load("builtin:recall-4m")[0], 0.15)
    settings = {"max_size": 48, "undo": 3, **store}
    with only_reference() if reference else nullcontext():
        plain, both = make_prompt_cache(model, **settings), make_prompt_cache(model, **settings)
        assert len({size for entry in both for size in entry.budgets}) > 1
        draft_cache = make_prompt_cache(draft, **settings)
        caches = both + draft_cache
        said = 0
        for turn in (TEXT, " and then the long winter came"):
            options = {"prompt": tokenizer.encode(turn), "max_tokens": 24}
            answers = stream_generate(model, tokenizer, prompt_cache=plain, **options)
            expected = [answer.token for answer in answers]
            options |= {"draft_model": draft, "num_draft_tokens": 3, "prompt_cache": caches}
            got = list(stream_generate(model, tokenizer, **options))
            assert [answer.token for answer in got] == expected
            assert 0 < sum(answer.from_draft for answer in got) < 24
            assert plain[0].evicted > 0
            # Whether the last tokens were read already differs.
            said += len(options["prompt"]) + 22
            for cache in (plain, both, draft_cache):
                mlx_lm_cache.trim_prompt_cache(cache, cache[0].offset - said)


def test_a_long_prompt_is_read_in_the_chunks_of_plain_decoding(monkeypatch):
    model, draft = tiny_model("llama"), spoiled(tiny_model("llama"))
    prompt = prompt_tokens(700)
    settings = {"max_size": 40, "undo": 2}
    plain = plainly(model, prompt, make_prompt_cache(model, **settings), max_tokens=20)
    for options in ({}, {"prefill_step_size": 2048}):
        caches = make_prompt_cache(model, **settings) + make_prompt_cache(draft, **settings)
        tokens, _ = speculatively(model, draft, prompt, caches, 2, max_tokens=20, **options)
        assert tokens == plain


@pytest.mark.parametrize("loaded", [False, True])
def test_it_begins_after_a_prompt_was_read_alone_and_from_a_file(loaded, tmp_path):
    """What was read before need not be taken back: `undo` is of the next tokens."""
    model, draft = tiny_model("llama"), spoiled(tiny_model("llama"))
    prompt, settings = prompt_tokens(60), {"max_size": 24, "undo": 2}
    caches = []
    for one in (model, model, draft):
        cache = make_prompt_cache(one, **settings)
        mx.eval(one(mx.array([prompt]), cache=cache))
        if loaded:
            mlx_h2o.save_prompt_cache(tmp_path / "cache", cache)
            cache = mlx_h2o.load_prompt_cache(tmp_path / "cache")
        caches.append(cache)
    assert not mlx_lm_cache.can_trim_prompt_cache(caches[0])
    plain = plainly(model, [3], caches[0], max_tokens=STEPS)
    tokens, drafted = speculatively(model, draft, [3], caches[1] + caches[2], 2, max_tokens=STEPS)
    assert tokens == plain
    assert drafted > 0


def test_a_window_that_has_moved_on_is_still_refused():
    model = tiny_model("gemma3_text")
    cache, other = (make_prompt_cache(model, 32, undo=2) for _ in range(2))
    mx.eval(model(mx.array([prompt_tokens(60)]), cache=cache))
    with pytest.raises(ValueError, match="trimmable"):
        speculatively(model, model, [3], cache + other, 2, max_tokens=4)


# -- refused when it is asked for -----------------------------------------------------------------


@pytest.mark.parametrize("undo", [0, 2])
def test_a_draft_longer_than_the_undo_is_refused(undo):
    model, tokenizer = load("builtin:recall-4m")
    caches = [*make_prompt_cache(model, 64, undo=4), *make_prompt_cache(model, 64, undo=undo)]
    options = {"draft_model": model, "num_draft_tokens": 3, "prompt_cache": caches}
    with pytest.raises(ValueError, match=rf"num_draft_tokens=3 .* undo={undo}: .* undo=3"):
        next(stream_generate(model, tokenizer, "Once", **options))
    with pytest.raises(ValueError, match="num_draft_tokens=3"):
        mlx_lm_generate.speculative_generate_step(
            mx.array([1]), model, model, num_draft_tokens=3, prompt_cache=caches
        )
    assert all(entry.offset == 0 for entry in caches)


def test_caches_that_mlx_lm_makes_are_checked_too():
    model = tiny_model("llama")
    speculate = mlx_lm_generate.speculative_generate_step
    plain = plainly(model, [1, 2, 3], None, max_tokens=8)
    tokens, _ = speculatively(model, model, [1, 2, 3], None, 2, max_tokens=8)
    assert tokens == plain
    mlx_h2o.install(max_size=32)
    with pytest.raises(ValueError, match="undo=2"):
        speculate(mx.array([1, 2, 3]), model, model)
    mlx_h2o.install(max_size=32, undo=2)
    tokens, _ = speculatively(model, model, [1, 2, 3], None, 2, max_tokens=8)
    assert tokens == plain


def test_uninstall_puts_mlx_lms_functions_back():
    def functions():
        lru = mlx_lm_cache.LRUPromptCache
        return [
            mlx_lm_generate.speculative_generate_step,
            mlx_lm_cache.trim_prompt_cache,
            mlx_lm_cache.can_trim_prompt_cache,
            lru.fetch_nearest_cache,
            lru.insert_cache,
        ]

    ours = functions()
    mlx_h2o.uninstall()
    theirs = functions()
    assert [function.__wrapped__ for function in ours] == theirs
    assert not any(hasattr(function, "__wrapped__") for function in theirs)


# -- trimming lists -------------------------------------------------------------------------------


def test_all_layers_are_trimmed_or_none():
    """One layer has evicted, the other has room: what only the second can do is not done."""
    model = tiny_model("llama")
    small, large = (make_prompt_cache(model, size, undo=4)[0] for size in (24, 300))
    cache = [large, small]
    model(mx.array([prompt_tokens(60)]), cache=cache)
    prefill(model, cache, [1, 2, 3], 1)
    assert (large.trimmable, small.trimmable) == (63, 3)
    assert mlx_lm_cache.can_trim_prompt_cache(cache)
    for n in (4, 40):
        with pytest.raises(ValueError, match=f"Cannot take back {n} tokens"):
            mlx_lm_cache.trim_prompt_cache(cache, n)
        assert (large.offset, small.offset) == (63, 63)
    assert mlx_lm_cache.trim_prompt_cache(cache, 2) == 2
    assert (large.offset, small.offset) == (61, 61)
    members = [mlx_lm_cache.CacheList(large, small)]
    with pytest.raises(ValueError, match="Cannot take back 5 tokens"):
        mlx_lm_cache.trim_prompt_cache(members, 5)
    assert (large.offset, small.offset) == (61, 61)
    assert mlx_lm_cache.trim_prompt_cache(members, 0) == 0


def test_a_sliding_window_that_has_moved_on_is_an_error():
    """mlx-lm alone would take nothing back, say nothing, and go on with the rejected tokens."""
    model = tiny_model("gemma3_text")
    cache = make_prompt_cache(model, 32, undo=4)
    prefill(model, cache, prompt_tokens(30), 1)
    with pytest.raises(ValueError, match="own RotatingKVCache cannot be trimmed"):
        mlx_lm_cache.trim_prompt_cache(cache, 1)


def test_what_mlx_lm_made_is_trimmed_as_ever():
    model = tiny_model("gemma3_text")
    cache = mlx_lm_cache.make_prompt_cache(model)
    prefill(model, cache, prompt_tokens(30), 1)
    assert mlx_lm_cache.trim_prompt_cache(cache, 1) == 0
    cache = mlx_lm_cache.make_prompt_cache(tiny_model("llama"))
    tiny_model("llama")(mx.array([[1, 2, 3]]), cache=cache)
    assert mlx_lm_cache.trim_prompt_cache(cache, 2) == 2


# -- the server's LRU cache of prompts ------------------------------------------------------------


@pytest.mark.parametrize("undo", [0, 4])
def test_the_lru_cache_goes_back_only_where_nothing_was_evicted(undo):
    """A cache that has evicted serves its own continuation, and shorter ones stay beside it."""
    model = tiny_model("llama")
    lru = mlx_lm_cache.LRUPromptCache()
    tokens = prompt_tokens(70)

    def cached(count):
        cache = make_prompt_cache(model, 48, undo=undo)
        prefill(model, cache, tokens[: count - 3], count)
        prefill(model, cache, tokens[count - 3 : count], 1)
        return cache

    lru.insert_cache("model", tokens[:20], cached(20))
    found, rest = lru.fetch_nearest_cache("model", [*tokens[:12], 1, 2])
    assert (found[0].offset, rest) == (12, [1, 2])
    lru.insert_cache("model", tokens[:60], cached(60))
    # Other words after 58 tokens: it cannot go back, not even by few, and the shorter one serves.
    found, rest = lru.fetch_nearest_cache("model", [*tokens[:58], 1, 2])
    assert (found[0].offset, rest) == (20, [*tokens[20:58], 1, 2])
    found, rest = lru.fetch_nearest_cache("model", tokens)
    assert (found[0].offset, rest) == (60, tokens[60:])
    found, rest = lru.fetch_nearest_cache("model", tokens[:60])
    assert (found[0].offset, rest) == (60, [])
