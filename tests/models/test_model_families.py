"""Families of models: token for token mlx-lm's own while nothing is evicted, bounded afterwards."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_h2o
from mlx_h2o import H2OKVCache, Profile, make_prompt_cache
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.loading.identity import identity_of
from tiny_models import (
    BY_ITSELF,
    FAMILIES,
    VOCABULARY,
    bounded_layers,
    greedy_steps,
    greedy_tokens,
    prefill,
    prompt_tokens,
    tiny_model,
)

ATTEND_BY_THEMSELVES = ["gemma2_by_itself"]
PROMPT, STEPS = prompt_tokens(20), 40


@pytest.fixture(scope="module")
def models():
    """Each family's model, made once."""
    made: dict[str, nn.Module] = {}

    def model(family: str) -> nn.Module:
        if family not in made:
            made[family] = tiny_model(family)
        return made[family]

    return model


@pytest.mark.few(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_mlx_lms_own_while_nothing_is_evicted(models, family):
    model = models(family)
    expected = greedy_tokens(model, stock_prompt_cache(model), PROMPT, STEPS)
    assert len(set(expected)) > 5  # A model that repeats itself would prove nothing.
    cache = make_prompt_cache(model, max_size=200)
    assert greedy_tokens(model, cache, PROMPT, STEPS) == expected
    assert all(cache[i].evicted == 0 for i in bounded_layers(family))


@pytest.mark.few(5)
@pytest.mark.parametrize("policy", ["h2o", "paper", "ema", "tova", "streaming", "keydiff"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_no_policy_changes_a_token_before_it_evicts(models, family, policy):
    model = models(family)
    expected = greedy_tokens(model, stock_prompt_cache(model), PROMPT, STEPS)
    cache = make_prompt_cache(model, max_size=300, policy=policy)
    assert greedy_tokens(model, cache, PROMPT, STEPS) == expected


@pytest.mark.few(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_budget_holds_for_as_long_as_one_likes(models, family):
    """24 slots over 130 tokens: within the bytes after every step, positions counting on."""
    model = models(family)
    sizing = make_prompt_cache(model, max_size=24)
    prefill(model, sizing, prompt_tokens(60), 20)
    layers = bounded_layers(family)
    allowed = sum(sizing[i].nbytes for i in layers)
    cache = make_prompt_cache(model, max_bytes=allowed)
    seen = len(PROMPT)
    last = prefill(model, cache, PROMPT, 7)
    tokens = set()
    for token, logits in greedy_steps(model, cache, last, 110):
        seen += 1
        tokens.add(token)
        real = logits[: VOCABULARY - 1]  # phi3small hides the last token.
        assert mx.all(mx.isfinite(real)), seen
        assert sum(cache[i].nbytes for i in layers) <= allowed, seen
        for i in layers:
            assert cache[i].offset == seen
            assert cache[i].size() == min(seen, cache[i].store.runs[0].budget)
    assert len(tokens) > 3
    assert all(18 <= cache[i].size() <= 24 for i in layers)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_stays_half_precision(family, dtype):
    """No float32 mask, remainder or score may leak into the model's activations."""
    model = tiny_model(family, dtype=dtype)
    cache = make_prompt_cache(model, max_size=24)
    prefill(model, cache, prompt_tokens(50), 11)
    logits = model(mx.array([[5]]), cache=cache)
    assert logits.dtype == dtype
    assert mx.all(mx.isfinite(logits))
    assert cache[0].store.fields["keys"].dtype == dtype
    assert cache[0].evicted > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_describe_tells_per_layer_what_is_bounded_and_why(models, family):
    model = models(family)
    cache = make_prompt_cache(model, max_size=24)
    before = stock_prompt_cache(model)
    prefill(model, cache, PROMPT, 20)
    described = mlx_h2o.describe(cache)
    assert [line.layer for line in described] == [str(i) for i in range(len(cache))]
    assert all(line.bounded for line in described)
    for i, line in enumerate(described):
        assert line.kind == type(cache[i]).__name__
        assert line.nbytes == cache[i].nbytes > 0
        if i in bounded_layers(family):
            assert isinstance(before[i], KVCache)
            assert isinstance(cache[i], BoundedKVCache)
            assert line.budgets == cache[i].budgets
            policy = "salient" if cache[i].attending else "distinct"
            assert f"{line.budgets[0]} slots a KV head, policy {policy}" in line.reason
        else:
            # The model's own kind, and where a window has a size, its own size.
            assert type(cache[i]) is type(before[i])
            assert line.budgets is None
        assert line.reason in str(line)


@pytest.mark.parametrize(
    ("family", "kind", "reason"),
    [
        ("gemma3_text", RotatingKVCache, "the model's own sliding window of 16 tokens"),
        ("gpt_oss", RotatingKVCache, "the model's own sliding window of 16 tokens"),
        ("qwen3_next", ArraysCache, "a state of fixed size, not a list of tokens"),
        ("plamo2", ArraysCache, "a state of fixed size, not a list of tokens"),
    ],
)
def test_caches_that_are_bounded_already_stay_as_the_model_made_them(models, family, kind, reason):
    model = models(family)
    cache = make_prompt_cache(model, max_size=24)
    others = [i for i in range(len(cache)) if i not in bounded_layers(family)]
    assert others
    for i in others:
        assert type(cache[i]) is kind
        assert cache[i].empty()  # The trial that finds the shapes out leaves nothing behind.
        assert mlx_h2o.describe(cache)[i].reason == reason


def test_a_cache_of_an_unknown_kind_is_reported_as_unbounded():
    line = mlx_h2o.describe([KVCache()])[0]
    assert not line.bounded
    assert "may grow" in line.reason
    assert "NOT bounded" in str(line)


@pytest.mark.parametrize("family", ATTEND_BY_THEMSELVES)
def test_models_that_attend_by_themselves_get_keys_only_and_plain_rows(models, family):
    model = models(family)
    cache = make_prompt_cache(model, max_size=64)
    layers = bounded_layers(family)
    for i in layers:
        assert (cache[i].policy.name, cache[i].policy.mass_weight) == ("distinct", 0.0)
        assert not cache[i].attending
        assert cache[i].answers
    prefill(model, cache, prompt_tokens(100), 30)
    stores = [cache[i].store for i in layers]
    assert {store.reserved for store in stores} == {2}
    assert all("scores" not in store.fields for store in stores)
    # One mask serves all layers: they must hold the same number of tokens.
    assert len({cache[i].size() for i in layers}) == 1
    assert "as plain rows" in mlx_h2o.describe(cache)[layers[0]].reason


@pytest.mark.parametrize("policy", ["h2o", "tova", "ema", "paper", "distinct"])
@pytest.mark.parametrize("family", ATTEND_BY_THEMSELVES)
def test_a_policy_that_needs_attention_is_refused_by_the_models_name(models, family, policy):
    name = family.removesuffix(BY_ITSELF)
    with pytest.raises(ValueError, match=f"{name} attends by itself.*keydiff.*streaming"):
        make_prompt_cache(models(family), max_size=64, policy=policy)


@pytest.mark.parametrize("remainder", [True, False], ids=["remainder", ""])
@pytest.mark.parametrize("policy", ["keydiff", "streaming"])
@pytest.mark.parametrize("family", ATTEND_BY_THEMSELVES)
def test_policies_that_look_at_keys_only_run_there(models, family, policy, remainder):
    model = models(family)
    cache = make_prompt_cache(model, max_size=32, policy=policy, remainder=remainder)
    logits = prefill(model, cache, prompt_tokens(80), 9)
    assert mx.all(mx.isfinite(logits[: VOCABULARY - 1]))
    assert all(cache[i].evicted > 40 for i in bounded_layers(family))


@pytest.mark.parametrize("family", ATTEND_BY_THEMSELVES)
def test_a_model_that_attends_by_itself_fails_loudly_on_an_attending_cache(models, family):
    """Otherwise nothing would ever be evicted, or what is would be missed in silence."""
    model = models(family)
    cache = stock_prompt_cache(model)
    for i in bounded_layers(family):
        cache[i] = H2OKVCache(24)
    mlx_h2o.install()
    model(mx.array([[1]]), cache=cache)
    with pytest.raises(RuntimeError, match=r"did not ask the cache to attend.*PlainRowsKVCache"):
        model(mx.array([[1]]), cache=cache)


def test_mla_runs_without_the_remainder(models):
    """Its attention sees keys made of the cached ones, for which no mean key stands."""
    model = models("deepseek_v3")
    cache = make_prompt_cache(model, max_size=24)
    prefill(model, cache, prompt_tokens(60), 13)
    for entry in cache:
        assert not entry.answers
        assert len(entry.store.runs) == 1
        assert entry.evicted > 30
        # Attention is seen all the same: masses were gathered.
        assert entry.store.view(entry.store.runs[0], "scores").max().item() > 0
    assert "no remainder" in mlx_h2o.describe(cache)[0].reason


def test_mla_is_refused_a_remainder(models):
    model = models("deepseek_v3")
    cache = [H2OKVCache(24, policy="h2o") for _ in model.layers]
    mlx_h2o.install()
    with pytest.raises(RuntimeError, match="remainder=False"):
        prefill(model, cache, prompt_tokens(60), 13)


def test_a_sliding_mask_over_a_bounded_cache_is_refused():
    """A model that masks a window over a full cache needs that cache's every token."""
    for attending in (True, False):
        cache = (H2OKVCache if attending else PlainRowsKVCache)(24, policy="streaming")
        for n in (1, 5):
            with pytest.raises(ValueError, match="sliding window"):
                cache.make_mask(n, return_array=True, window_size=16)


def uneven_profile(model: nn.Module, heads: list[int], widths: list[int]) -> Profile:
    """A profile by which the first head of each layer deserves almost everything."""
    identity = identity_of(model, heads, widths)
    losses = [((9.0, 1.0, 0.0), *[(1.0, 0.0, 0.0)] * (count - 1)) for count in heads]
    return Profile(identity, (16, 64, 400), tuple(losses), "by hand")


def test_head_budgets_change_no_token_before_they_evict(models):
    model = models("llama")
    profile = uneven_profile(model, [2, 2], [12, 12])
    cache = make_prompt_cache(model, max_size=200, budgets=profile)
    large, small = cache[0].settings.filling[-1].budgets  # once all is full
    assert large > 2 * small >= 120
    expected = greedy_tokens(model, stock_prompt_cache(model), PROMPT, STEPS)
    assert greedy_tokens(model, cache, PROMPT, STEPS) == expected
    assert all(entry.evicted == 0 for entry in cache)


def test_head_budgets_evict_the_small_heads_first(models):
    model = models("llama")
    cache = make_prompt_cache(
        model, max_size=48, budgets=uneven_profile(model, [2, 2], [12, 12]), policy="h2o"
    )
    logits = prefill(model, cache, prompt_tokens(60), 13)
    assert mx.all(mx.isfinite(logits))
    for entry in cache:
        runs = {run.budget: run.length for run in entry.store.runs}
        assert runs == {budget: min(60, budget) for budget in entry.budgets}
        assert len(runs) == 2
        assert min(runs) < 60
        assert not entry.is_trimmable()


@pytest.mark.parametrize("family", ["deepseek_v3", "phi3small", *ATTEND_BY_THEMSELVES])
def test_head_budgets_are_refused_where_one_mask_serves_all(models, family):
    model = models(family)
    profile = uneven_profile(models("llama"), [2, 2], [12, 12])
    with pytest.raises(ValueError, match='budgets="uniform"'):
        make_prompt_cache(model, max_size=48, budgets=profile)


def test_a_model_without_a_plain_cache_is_told_that_it_is_bounded_already():
    model = tiny_model("gemma3_text")
    model.make_cache = lambda: [RotatingKVCache(max_size=16) for _ in model.layers]
    with pytest.raises(ValueError, match="gemma3_text has no plain KV cache to bound"):
        make_prompt_cache(model, max_size=48)
