"""Turns: what was attended to carries over, as much of it as is asked for."""

import copy
from contextlib import nullcontext
from typing import ClassVar

import mlx.core as mx
import pytest

import mlx_h2o
from covering import covering
from mlx_h2o import H2OKVCache, Policy, load_prompt_cache, make_policy, save_prompt_cache
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.evaluate.measures import TurnMeasure
from mlx_h2o.evaluate.methods import FULL, WINDOW, Method
from mlx_h2o.evaluate.reader import Reader, no_progress
from mlx_h2o.layer.pins_and_turns import checked_carry
from mlx_h2o.loading.load import SAMPLE_TEXT
from mlx_h2o.policies import policy_names
from tiny_models import TinyLayer, kept_positions, prefill, prompt_tokens, tiny_model

LAYER = TinyLayer(key_width=64, value_width=32)
STORES = {"dense": {}, "mixed": {"bits": 8, "recent_bits": 16, "group_size": 32}}
CASES = covering(
    {
        "policy": policy_names(),
        "store": list(STORES),
        "carry": [0.0, 0.5],
        "unit": ["head", "layer"],
        "evict_every": [1, 3],
        "aged": [True, False],
    },
    lambda case: True,
)


def name_of(case) -> str:
    return "-".join(str(value) for value in case.values())


def cache_of(case) -> H2OKVCache:
    options = {"evict_every": case["evict_every"], "unit": case["unit"], "recent": 8, "sink": 2}
    policy = make_policy(case["policy"], **options)
    if case["aged"] and policy.ranks_scores and policy.needs_attention:
        policy = make_policy(policy, age_normalised=True)
    return H2OKVCache(budgets=[40, 40], policy=policy, **STORES[case["store"]])


def scores_by_position(cache) -> dict[int, float]:
    """Of the first head."""
    slots = cache.slots(cache.store.runs[0])
    return dict(zip(slots.positions[0, 0].tolist(), slots.scores[0, 0].tolist(), strict=True))


@pytest.mark.few(5)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_after_a_turn_kernels_and_definition_agree(case):
    """Ages within the fused steps count from where the definition's do."""
    caches = []
    for place in (nullcontext, only_reference):
        with place():
            cache = cache_of(case)
            LAYER.feed(cache, 60, chunk=30)
            LAYER.feed(cache, 20)
            cache.new_turn(case["carry"])
            LAYER.feed(cache, 30)
            LAYER.feed(cache, 24, chunk=24)
            caches.append((cache, LAYER.feed(cache, 30)))
    (fused, one), (reference, other) = caches
    assert kept_positions(fused) == kept_positions(reference)
    assert mx.allclose(one, other, atol=1e-4).item()


def test_all_of_the_past_is_as_if_nothing_was_said():
    cache = H2OKVCache(40, policy="salient")
    LAYER.feed(cache, 80, chunk=20)
    twin = copy.deepcopy(cache)
    cache.new_turn()
    assert mx.array_equal(LAYER.feed(cache, 40), LAYER.feed(twin, 40)).item()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("carry", [0.5, 0.25])
def test_the_mean_mass_per_step_stays_and_the_memory_is_shorter(carry, store):
    cache = H2OKVCache(48, policy=make_policy("salient", sink=2, recent=8), **STORES[store])
    LAYER.feed(cache, 60, chunk=30)
    LAYER.feed(cache, 40)
    before = scores_by_position(cache)
    cache.new_turn(carry)
    since = int(100 - carry * 100)
    for position, score in scores_by_position(cache).items():
        steps = 100 - max(position, since)
        assert score == pytest.approx(before[position] * steps / (100 - position), rel=1e-5)
    slots = cache.slots(cache.store.runs[0])
    assert slots.ages.max().item() == 100 - since
    # A turn later again: a part of what was left.
    LAYER.feed(cache, 20)
    cache.new_turn(carry)
    assert cache.layer.aged_from == 120 - int(carry * (120 - since))


@pytest.mark.parametrize("policy", ["salient", "h2o", "ema", "tova"])
def test_reset_makes_all_tokens_alike(policy):
    cache = H2OKVCache(48, policy=make_policy(policy, sink=2, recent=8))
    LAYER.feed(cache, 60, chunk=30)
    LAYER.feed(cache, 40)
    cache.new_turn("reset")
    assert set(scores_by_position(cache).values()) == {0.0}
    assert set(cache.slots(cache.store.runs[0]).ages.flatten().tolist()) == {1.0}
    LAYER.feed(cache, 1)
    masses = scores_by_position(cache)
    if policy == "salient":  # all that is there is what the one step gave
        assert sum(masses.values()) == pytest.approx(1, abs=0.7)
        assert max(masses.values()) <= 1.0001


def test_turns_go_through_files_and_trimming(tmp_path):
    cache = H2OKVCache(40, policy="salient")
    LAYER.feed(cache, 80, chunk=20)
    cache.new_turn(0.25)
    LAYER.feed(cache, 5)
    save_prompt_cache(tmp_path / "c.safetensors", [cache])
    (twin,) = load_prompt_cache(tmp_path / "c.safetensors")
    assert twin.layer.aged_from == cache.layer.aged_from == 60
    assert mx.array_equal(LAYER.feed(cache, 40), LAYER.feed(twin, 40)).item()
    short = H2OKVCache(400, policy="h2o")
    LAYER.feed(short, 100, chunk=50)
    short.new_turn("reset")
    short.trim(60)
    LAYER.feed(short, 10)
    assert short.layer.aged_from == 39
    assert short.slots(short.store.runs[0]).ages.min().item() >= 1


def test_a_whole_model_begins_a_turn():
    model = tiny_model("llama")
    cache = mlx_h2o.make_prompt_cache(model, 48)
    prefill(model, cache, prompt_tokens(90), 30)
    mlx_h2o.new_turn(cache, "reset")
    assert all(entry.layer.aged_from == 89 for entry in cache)
    prefill(model, cache, prompt_tokens(40), 20)
    with pytest.raises(ValueError, match="carry"):
        mlx_h2o.new_turn(cache, 1.5)


@pytest.mark.parametrize("carry", [-0.1, 2, "all", None, float("nan")])
def test_what_is_no_part_of_the_past_is_refused(carry):
    with pytest.raises(ValueError, match="carry"):
        checked_carry(carry)


class Watched(Policy):
    """H2O that tells what prompts it was asked to rank."""

    seen: ClassVar[list] = []

    def prompt_priority(self, slots, window_mass):
        self.seen.append((slots.positions.shape[2], window_mass))
        return super().prompt_priority(slots, window_mass)


def test_a_document_in_mid_conversation_is_scored_as_a_prompt():
    """Its tokens, and those kept, are ranked by the mass of its own last queries."""
    policy = Watched(sink=2, recent=4, window=16)
    cache = H2OKVCache(32, policy=policy, remainder=False)
    LAYER.feed(cache, 40, chunk=40)
    LAYER.feed(cache, 25)
    policy.seen.clear()
    LAYER.feed(cache, 50, chunk=50)
    assert [count for count, _ in policy.seen] == [32 + 50] * 2
    for _, mass in policy.seen:
        # Sixteen queries, each of which gives a mass of one.
        assert mass.sum().item() == pytest.approx(16, rel=1e-4)


TURNS = TurnMeasure(
    conversations=4, turns=6, turn=72, asked_after=(6,), carries=(1.0, 0.0), pinned=True
)


@pytest.fixture(scope="module")
def conversations():
    reader = Reader("builtin:recall-4m", SAMPLE_TEXT.read_text(), "questions", 36, seed=3)
    full = TURNS.of(reader, Method(FULL), no_progress)["carry 1"]["fact"]["6"]
    assert sum(full) >= 3
    return reader, full


QUICK = ("salient",)


@pytest.mark.parametrize(
    "policy",
    [
        *QUICK,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in policy_names()
            if name not in (*QUICK, "paper", "h2o-paper")
        ),
    ],
)
def test_a_fact_of_turn_one_in_turn_six(conversations, policy):
    """Pinned it is known as the full cache knows it, by every policy at the same budget."""
    reader, full = conversations
    of_policy = f"{policy}:recent=0.25"
    method = Method(policy, of_policy, budgets="uniform", settings=(("bits", 16),), tokens=120)
    result = TURNS.of(reader, method, no_progress)
    known = {way: sum(of_way["fact"]["6"]) for way, of_way in result.items()}
    assert known["pinned"] >= sum(full) - 1
    assert known["pinned"] >= max(known["carry 1"], known["carry 0"])


def test_caches_without_turns_hold_each_conversation_once(conversations):
    reader, _ = conversations
    small = TurnMeasure(conversations=1, turns=2, turn=72, asked_after=(2,), pinned=True)
    window = small.of(reader, Method(WINDOW, tokens=64), no_progress)
    assert list(window) == ["carry 1"]
    full = (Method(FULL), small.of(reader, Method(FULL), no_progress))
    ours = (Method("ours", "salient", tokens=64), {**window, "pinned": window["carry 1"]})
    fact, _ = small.section([full, ours]).tables
    assert fact.columns == ("cache", "way", "after turn 2") or fact.columns[1] == "way"
    assert [row[:2] for row in fact.rows] == [
        (FULL, "carry 1"), ("ours, 64 tokens", "carry 1"), ("ours, 64 tokens", "pinned"),
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [{"asked_after": (9,)}, {"carries": ()}])
def test_turns_that_cannot_be_asked_are_refused(sizes):
    with pytest.raises(ValueError, match="turns"):
        TurnMeasure(**sizes)
