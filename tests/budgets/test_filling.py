"""Sizes in bytes: nothing goes before the memory is full, and it is never exceeded."""

import copy
import json
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_h2o
from mlx_h2o import H2OKVCache
from mlx_h2o.budgets.allocation import check_curves
from mlx_h2o.budgets.growth import stages_of_model, stages_of_profile
from mlx_h2o.budgets.plan import FEWEST_CHOICES
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.loading.identity import ModelIdentity
from mlx_h2o.policies import make_policy
from mlx_h2o.slots.packed import Packing
from tiny_models import TinyLayer, kept_positions, prefill, prompt_tokens

ROOT = Path(__file__).parents[2]
#: What Swift's tests expect of the same profiles (tools/record_caches.py --stages).
RECORDED = ROOT / "swift/Tests/MLXH2OTests/Fixtures/stages.json"
#: One layer of two heads, 40 slots each on average.
STAGES = ((40, (60, 20)), (80, (52, 28)), (160, (24, 56)))


def filling(**settings) -> H2OKVCache:
    policy = make_policy(settings.pop("policy", "distinct"))
    settings = CacheSettings(budgets=(40, 40), policy=policy, filling=STAGES, **settings)
    return H2OKVCache.of(settings)


def full_outputs(tokens: TinyLayer, count: int) -> mx.array:
    q, k, v = tokens.at(0, count)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=tokens.scale, mask="causal")


@pytest.mark.parametrize("chunk", [1, 7, 40])
@pytest.mark.parametrize("policy", ["distinct", "h2o", "keydiff"])
def test_a_short_conversation_is_exact(chunk, policy):
    tokens, cache = TinyLayer(), filling(policy=policy)
    out = tokens.feed(cache, 40, chunk)
    assert mx.allclose(out, full_outputs(tokens, 40), atol=1e-5)
    assert cache.evicted == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("packing", [Packing(), Packing(8, 8, 32), Packing(4, 4, 32, 16)])
def test_budgets_follow_the_conversation_and_slots_are_never_exceeded(chunk, packing):
    tokens = TinyLayer(key_width=32, value_width=32)
    cache = filling(packing=packing)
    most = None
    for _ in range(0, 300, chunk):
        tokens.feed(cache, chunk, chunk)
        begun = [budgets for beyond, budgets in STAGES if beyond < cache.offset]
        assert tuple(cache.budgets) == (begun[-1] if begun else (40, 40))
        held = [run.length for run in cache.layer.runs for _ in range(run.heads)]
        window = cache.layer.window_length
        for length, budget in zip(held, cache.budgets, strict=True):
            assert length + window <= min(budget, cache.offset)
        assert sum(held) + 2 * window <= 80
        most = max(most or 0, cache.nbytes)
    assert cache.settings.filling == ()
    plain = H2OKVCache.of(CacheSettings(budgets=STAGES[-1][1], packing=packing))
    tokens.feed(plain, 300, chunk)
    assert cache.nbytes <= most
    if packing.recent is None:
        assert most <= plain.nbytes


def test_an_evicted_token_is_in_the_remainder():
    """At each change what leaves a head goes on answering: counts add up to all that came."""
    tokens, cache = TinyLayer(), filling()
    for count in (40, 1, 39, 1, 60, 60):
        tokens.feed(cache, count)
        held = [run.length for run in cache.layer.runs for _ in range(run.heads)]
        lost = cache.remainder.count[0].tolist()
        assert [a + b for a, b in zip(held, lost, strict=True)] == [cache.offset] * 2


@pytest.mark.parametrize("after", [20, 40, 55, 130])
@pytest.mark.parametrize("way", ["state", "copy"])
def test_a_copy_goes_on_through_the_same_stages(after, way):
    tokens, cache = TinyLayer(), filling()
    tokens.feed(cache, after)
    other = H2OKVCache.from_state(cache.state) if way == "state" else copy.deepcopy(cache)
    assert other.settings.filling == cache.settings.filling
    first, second = (tokens.feed(c, 200) for c in (cache, other))
    assert mx.allclose(first, second, atol=1e-5)
    assert kept_positions(cache) == kept_positions(other)


def test_a_prompt_that_is_longer_than_the_memory_goes_to_its_stage_at_once():
    tokens, cache = TinyLayer(), filling()
    tokens.feed(cache, 100, 100)
    assert cache.budgets == list(STAGES[1][1])
    assert [run.length for run in cache.layer.runs] == [52, 28]


def test_resizing_ends_it():
    tokens, cache = TinyLayer(), filling()
    tokens.feed(cache, 30)
    cache.resize([30, 30])
    tokens.feed(cache, 100)
    assert cache.budgets == [30, 30]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (((80, (20, 60)), (40, (60, 20))), "filling must be at least 81"),
        (((80, (20, 30, 30)),), "as many heads"),
        (((80, (2, 78)),), "too small"),
        (((80, ()),), "filling must be a list"),
        ((80,), "filling must be a list"),
        ("soon", "filling must be a list"),
    ],
)
def test_what_is_no_filling_is_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        CacheSettings(budgets=(40, 40), filling=stages)


def made_up(known: int) -> Profile:
    grid = (12, 24, 48, 96, known)
    losses = (((4.0, 2.0, 1.0, 0.5, 0.0), (0.4, 0.2, 0.0, 0.0, 0.0)),) * 2
    check_curves(grid, losses[0])
    return Profile(ModelIdentity("made-up", (2, 2), (8, 8), 0, ()), grid, losses, "by hand")


@pytest.mark.parametrize("mean", [14, 40, 100, 300])
def test_stages_double_and_end_with_the_profiles_shares(mean):
    profile = made_up(200)
    (first, uniform), *later = stages_of_profile(profile, mean, 12)
    assert (first, uniform) == (0, [[mean] * 2] * 2)
    assert later[0][0] == mean
    for (beyond, budgets), (longer, _) in pairwise(later):
        assert longer == 2 * beyond
        slots = [s for layer in budgets for s in layer]
        assert sum(slots) == 4 * mean
        assert max(slots) <= longer
    assert later[-1][1] == profile.budgets(mean)


def test_stages_are_those_that_swift_expects():
    for one in json.loads(RECORDED.read_text()):
        profile = Profile.load(ROOT / one["profile"])
        stages = stages_of_profile(profile, one["mean"], one["least"])
        assert [list(stage) for stage in stages] == one["stages"], one["profile"]


def test_layers_with_other_means_are_shared_out_once_the_first_is_full():
    profile, least = made_up(200), make_policy("distinct").least_budget() + FEWEST_CHOICES
    alike = profile.budgets(40, least)
    assert all(len(later) > 1 for _, later in stages_of_model(alike, (40, 40), least, profile))
    other = [profile.budgets(30, least)[0], profile.budgets(50, least)[1]]
    assert stages_of_model(other, (30, 50), least, profile) == [
        ((30, 30), ((30, tuple(other[0])),)),
        ((50, 50), ((30, tuple(other[1])),)),
    ]


@pytest.fixture(scope="module")
def embedded():
    return mlx_h2o.load("builtin:recall-4m")[0]


SIZES = [{"max_size": 48}, {"max_bytes": 120_000}, {"max_bytes": "12%"}]
STORED = [{}, {"bits": 16}, {"bits": 6}, {"bits": 4, "recent_bits": 16}, {"remainder": False}]


@pytest.mark.few(8)
@pytest.mark.pairwise
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("budgets", [None, "uniform"])
@pytest.mark.parametrize("policy", ["salient", "h2o", "keydiff"])
@pytest.mark.parametrize("chunk", [1, 40])
def test_nothing_is_evicted_while_all_of_it_fits(embedded, size, stored, budgets, policy, chunk):
    """Though the model's profile gives some heads a dozen slots later on."""
    model = embedded
    cache = mlx_h2o.make_prompt_cache(
        model, **size, **stored, budgets=budgets, policy=policy, context=400
    )
    fits = min(slots for entry in cache for slots in entry.budgets)
    if "max_size" in size:
        bare = mlx_h2o.make_prompt_cache(model, **size, **stored, budgets="uniform", policy=policy)
        assert fits == bare[0].budgets[0]
    tokens = prompt_tokens(fits + 1)
    prefill(model, cache, tokens[:fits], chunk)
    assert [entry.evicted for entry in cache] == [0] * len(cache)
    for entry in cache:
        assert {run.length + entry.layer.window_length for run in entry.layer.runs} == {fits}
    prefill(model, cache, tokens[fits:], 1)
    if budgets is None:
        assert len({slots for entry in cache for slots in entry.budgets}) > 1


def test_a_size_in_tokens_shares_out_as_before_in_the_end(embedded):
    """A prompt longer than all stages leaves every head the slots of the profile."""
    model = embedded
    cache = mlx_h2o.make_prompt_cache(model, 48)
    ends = [entry.settings.filling[-1].budgets for entry in cache]
    prefill(model, cache, prompt_tokens(entry_end(cache) + 1), 64)
    assert [tuple(entry.budgets) for entry in cache] == ends
    assert sum(map(sum, ends)) == sum(slots for entry in cache for slots in entry.budgets)


def entry_end(cache) -> int:
    return cache[0].settings.filling[-1].beyond


@pytest.mark.parametrize(
    "size",
    [{"max_size": 2**30}, {"max_size": 2**23}, {"max_bytes": 2**50}, {"max_bytes": "1600%"}],
    ids=str,
)
def test_a_size_far_above_the_context_is_an_exact_cache_that_grows(embedded, size):
    model = embedded
    cache = mlx_h2o.make_prompt_cache(model, **size)
    prefill(model, cache, prompt_tokens(60), 20)
    assert [entry.evicted for entry in cache] == [0] * len(cache)
    assert sum(entry.nbytes for entry in cache) < 8 << 20
