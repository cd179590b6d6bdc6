"""Pins: a pinned token stays, whatever the policy, the store, the kernels and the prompt."""

import copy
import pickle
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from covering import covering
from mlx_h2o import H2OKVCache, load_prompt_cache, make_policy, make_prompt_cache, save_prompt_cache
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.budgets.allocation import room_for_pins
from mlx_h2o.budgets.growth import Stage
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.policies import policy_names
from mlx_h2o.slots.pins import checked_spans, spans_of, stored_positions, true_positions, without
from tiny_models import TinyLayer, kept_positions, prefill, prompt_tokens, tiny_model

STORES = {
    "dense": {},
    "packed": {"bits": 8, "group_size": 32},
    "mixed": {"bits": 4, "recent_bits": 8, "group_size": 32},
}
BUDGETS = {"uniform": [40, 40], "ragged": [36, 60]}
SYSTEM = (0, 10)
LAYER = TinyLayer(key_width=64, value_width=32)

# Of the attack's keys, where a policy looks at something other than masses.
SHIFTS = {"ema-logits": None, "paper": None, "keydiff": 0.0}
CASES = covering(
    {
        "policy": policy_names(),
        "store": list(STORES),
        "budgets": list(BUDGETS),
        "reference": [False, True],
        "chunk": [1, 24],
        "evict_every": [1, 3],
        "unit": ["head", "layer"],
        "remainder": [True, False],
    },
    lambda case: case["budgets"] == "uniform" or case["unit"] == "head",
)


def name_of(case) -> str:
    return "-".join(str(value) for value in case.values())


def cache_of(case, sink=0, **settings) -> H2OKVCache:
    options = {"evict_every": case["evict_every"], "unit": case["unit"], "recent": 8}
    policy = make_policy(case["policy"], sink=sink, **options)
    return H2OKVCache(
        budgets=BUDGETS[case["budgets"]],
        policy=policy,
        remainder=case["remainder"],
        **STORES[case["store"]],
        **settings,
    )


def holds(cache, *spans) -> bool:
    wanted = {p for span in spans for p in range(*span)}
    return all(wanted <= set(head) for head in kept_positions(cache))


@dataclass(frozen=True)
class Attack(TinyLayer):
    """A prompt against the first tokens: nothing attends to them, their keys are in the middle of
    all others, their values are next to nothing, and everything else is asked for by turns.

    Attributes:
        shift: How far from the middle their keys are, against the queries; None: at 0, for a policy
            that ranks by the size of logits.
    """

    shift: float | None = 4.0

    @cached_property
    def tokens(self):
        q, k, v = TinyLayer.tokens.func(self)
        own = mx.arange(self.length)[:, None] < SYSTEM[1]
        wanted = mx.array([3.0 if self.shift else 8.0] + [0.0] * (self.key_width - 1))
        q, k = q + wanted, k + wanted
        middle = k[:, :, SYSTEM[1] :].mean(axis=2, keepdims=True)
        middle = 0 * middle if self.shift is None else middle - self.shift * wanted
        rows = q, mx.where(own, middle + 1e-3 * k, k), mx.where(own, 1e-3 * v, v)
        mx.eval(rows)
        return rows


def attack(**shape) -> Attack:
    return Attack(key_width=64, value_width=32, **shape)


@pytest.mark.few(6)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_distractors_do_not_evict_the_system_prompt(case):
    layer = attack(shift=SHIFTS.get(case["policy"], 4.0))
    with only_reference() if case["reference"] else nullcontext():
        cache, victim = cache_of(case), cache_of(case)
        assert cache.pin([SYSTEM])
        for one in (cache, victim):
            layer.feed(one, 72, chunk=case["chunk"])
            layer.feed(one, 60)
            layer.feed(one, 40, chunk=20)
    assert holds(cache, SYSTEM)
    # Without the pin it would have been lost: the attack is one.
    assert not holds(victim, SYSTEM)
    assert cache.nbytes == victim.nbytes
    assert sum(map(len, kept_positions(cache))) == sum(BUDGETS[case["budgets"]])


@pytest.mark.parametrize(
    "case",
    [*CASES[::4], *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c not in CASES[::4])],
    ids=name_of,
)
def test_pinned_first_tokens_are_what_sinks_are(case):
    with only_reference() if case["reference"] else nullcontext():
        pinned, sinks = cache_of(case, sink=0), cache_of(case, sink=5)
        pinned.pin([(0, 5)])
        outs = []
        for cache in (pinned, sinks):
            calls = [LAYER.feed(cache, 50, chunk=case["chunk"]), LAYER.feed(cache, 70)]
            outs.append(mx.concatenate([*calls, LAYER.feed(cache, 30, chunk=15)], axis=2))
    assert kept_positions(pinned) == kept_positions(sinks)
    # A step that brings a pinned token goes op by op, and rounds otherwise.
    assert mx.allclose(*outs, atol=1e-5).item()


@pytest.mark.parametrize("reference", [False, True])
def test_pinned_while_it_comes_token_by_token(reference):
    cache = H2OKVCache(
        48, policy=make_policy("salient", sink=2), bits=8, recent_bits=16, group_size=32
    )
    cache.pin([(30, 33), (100, 104)])
    with only_reference() if reference else nullcontext():
        LAYER.feed(cache, 220)
    assert holds(cache, (0, 2), (30, 33), (100, 104))


@pytest.mark.parametrize("batch", [1, 2])
def test_pinned_afterwards_as_far_as_it_is_held(batch):
    layer = TinyLayer(key_width=64, value_width=32, batch=batch)
    cache = H2OKVCache(budgets=[32, 48], policy=make_policy("h2o", sink=2, recent=8))
    layer.feed(cache, 120, chunk=30)
    layer.feed(cache, 10)
    heads = [set(head) for run in cache.store.runs for head in _heads(cache, run)]
    asked = (20, 130)
    everywhere = [p for p in range(*asked) if all(p in head for head in heads)]
    gone = [p for p in range(*asked) if not any(p in head for head in heads)]
    before = mx.array(cache.arrays()["slots.keys"])
    few = spans_of(everywhere[:6])
    answer = cache.pin([*few, *spans_of(gone[:4]), (140, 142)])
    assert answer.pinned == (*few, (140, 142))
    assert answer.gone == spans_of(gone[:4])
    assert not answer
    assert cache.pins == answer.pinned  # what is gone takes no room
    assert mx.array_equal(before, cache.arrays()["slots.keys"]).item()
    layer.feed(cache, 150)
    assert holds(cache, *answer.pinned)
    cache.unpin([(140, 142)])
    assert cache.pins == few
    cache.unpin()
    layer.feed(cache, 150, chunk=50)
    assert not holds(cache, *few)


def _heads(cache, run):
    return np.array(cache.slots(run).positions).reshape(-1, run.length).tolist()


def test_a_partly_lost_token_is_pinned_where_it_is_held():
    cache = H2OKVCache(budgets=[24, 60], policy=make_policy("keydiff", sink=2, recent=4))
    LAYER.feed(cache, 90, chunk=30)
    small, large = (set(head) for head in kept_positions(cache))
    partly = sorted(p for p in large - small if p < 80)[:3]
    answer = cache.pin(spans_of(partly))
    assert answer.partly == spans_of(partly)
    assert not answer.pinned
    LAYER.feed(cache, 100)
    assert set(partly) <= set(kept_positions(cache)[1])


# -- what it goes through -------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_kept_through_copies_files_resizing_and_trimming(store, tmp_path):
    cache = H2OKVCache(
        budgets=[36, 60], policy=make_policy("salient", sink=2, recent=8), **STORES[store]
    )
    cache.pin([(5, 12)])
    LAYER.feed(cache, 80, chunk=40)
    LAYER.feed(cache, 5)
    save_prompt_cache(tmp_path / "c.safetensors", [cache])
    twins = [
        copy.deepcopy(cache),
        pickle.loads(pickle.dumps(cache)),
        *load_prompt_cache(tmp_path / "c.safetensors"),
    ]
    expected = LAYER.feed(cache, 40)
    for twin in twins:
        assert twin.pins == ((5, 12),)
        assert mx.array_equal(LAYER.feed(twin, 40), expected).item()
        assert holds(twin, (5, 12))
    cache.resize([24, 24])
    LAYER.feed(cache, 20)
    assert holds(cache, (5, 12))
    fresh = H2OKVCache(64, policy="h2o")
    fresh.pin([(5, 12)])
    LAYER.feed(fresh, 30, chunk=30)
    fresh.trim(25)  # what comes there next is pinned as well
    LAYER.feed(fresh, 150, chunk=50, first=5)
    assert holds(fresh, (5, 12))


@pytest.mark.parametrize("reference", [False, True])
def test_undone_steps_leave_pins(reference):
    cache = H2OKVCache(40, policy=make_policy("salient", sink=0, recent=8), undo=3)
    with only_reference() if reference else nullcontext():
        cache.pin([(3, 9), (70, 72)])
        LAYER.feed(cache, 60, chunk=30)
        twin = copy.deepcopy(cache)
        for _ in range(20):
            LAYER.feed(cache, 3)
            cache.trim(2)
        LAYER.feed(twin, 20)
        expected = LAYER.feed(twin, 30)
        assert mx.array_equal(LAYER.feed(cache, 30), expected).item()
    assert holds(cache, (3, 9), (70, 72))


def test_pinning_ends_what_can_be_undone():
    cache = H2OKVCache(40, policy="h2o", undo=3)
    LAYER.feed(cache, 60, chunk=30)
    LAYER.feed(cache, 3)
    assert cache.trimmable == 3
    cache.pin([(60, 61)])
    assert cache.trimmable == 0


def test_plain_rows_and_latent_rows():
    plain = PlainRowsKVCache(48, policy=make_policy("keydiff", sink=2, recent=8))
    plain.pin([(5, 15)])
    LAYER.feed(plain, 60, chunk=20)
    LAYER.feed(plain, 120)
    assert holds(plain, (5, 15))
    model = tiny_model("deepseek_v3")
    cache = make_prompt_cache(
        model, 40, policy="h2o:recent=8", remainder=False, budgets="uniform", pins=[(4, 12)]
    )
    prefill(model, cache, prompt_tokens(90), 30)
    assert all(holds(entry, (4, 12)) for entry in cache)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_whole_model(family, tmp_path):
    model = tiny_model(family)
    cache = make_prompt_cache(model, 48, policy="salient:recent=8", pins=[(0, 9)])
    prefill(model, cache, prompt_tokens(120), 30)
    answer = mlx_h2o.pin(cache, [(118, 120), (200, 201)])
    assert answer
    assert answer.pinned == ((118, 120), (200, 201))
    prefill(model, cache, prompt_tokens(120, seed=2), 30)
    bounded = [entry for entry in cache if isinstance(entry, BoundedKVCache)]
    assert all(holds(entry, (0, 9), (118, 120), (200, 201)) for entry in bounded)
    lost = mlx_h2o.pin(cache, [(0, 1), (20, 117)])
    assert (0, 1) in lost.pinned
    assert lost.gone
    mlx_h2o.resize(cache, 160)
    assert all(entry.pins for entry in bounded)
    mlx_h2o.unpin(cache)
    assert not any(entry.pins for entry in bounded)
    with pytest.raises(ValueError, match="no bounded cache"):
        mlx_h2o.pin([], [(0, 1)])


# -- room -----------------------------------------------------------------------------------------


def test_small_heads_get_slots_of_the_large_ones():
    policy = make_policy("salient", sink=4, recent=0.25)
    roomy = room_for_pins([16, 40, 200, 17], policy, [(0, 30)])
    least = policy.least_budget(26)
    assert sum(roomy) == 273
    assert min(roomy) == least
    assert roomy[2] == max(roomy)
    policy.check_budget(least)
    with pytest.raises(ValueError, match="too small"):
        make_policy("salient", sink=30, recent=0.25).check_budget(least - 1)
    cache = H2OKVCache(budgets=[16, 90], policy=policy)
    LAYER.feed(cache, 12, chunk=12)
    cache.pin([(0, 12), (40, 60)])
    assert sum(cache.budgets) == 106
    LAYER.feed(cache, 200, chunk=20)
    assert holds(cache, (0, 12), (40, 60))
    cache.resize([20, 100])
    LAYER.feed(cache, 30)
    assert holds(cache, (0, 12), (40, 60))
    assert sum(cache.budgets) == 120


def test_budgets_that_follow_have_room_too():
    settings = CacheSettings(
        budgets=(64, 64), filling=(Stage(64, (20, 108)), Stage(128, (16, 112))), pins=[(0, 40)]
    )
    least = settings.policy.least_budget(36)
    assert all(min(stage.budgets) >= least for stage in settings.filling)
    assert all(sum(stage.budgets) == 128 for stage in settings.filling)
    cache = H2OKVCache.of(settings)
    LAYER.feed(cache, 200, chunk=20)
    LAYER.feed(cache, 40)
    assert holds(cache, (0, 40))


def test_too_many_pins_are_an_error_with_numbers():
    cache = H2OKVCache(budgets=[40, 44], policy=make_policy("h2o", sink=4, recent=10))
    LAYER.feed(cache, 30, chunk=30)
    config = cache.config()
    with pytest.raises(ValueError, match=r"28 pinned .* 4 sinks, 10 recent .* 43 slots .* 42 a"):
        cache.pin([(2, 30), (50, 52)])
    assert cache.config() == config
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="max_size at least"):
        make_prompt_cache(model, 48, pins=[(0, 60)])
    bounded = make_prompt_cache(model, 48)
    with pytest.raises(ValueError, match="Pin at most"):
        mlx_h2o.pin(bounded, [(0, 60)])
    assert not any(entry.pins for entry in bounded)


@pytest.mark.parametrize(
    "spans", [[(3, 3)], [(-1, 4)], [(0, 1, 2)], [3], "system", [(0.5, 4)], 7, [(4, 2)]]
)
def test_what_is_no_span_is_refused(spans):
    with pytest.raises(ValueError, match="spans"):
        H2OKVCache(64).pin(spans)
    with pytest.raises(ValueError, match="pins"):
        checked_spans("pins", spans)


def test_positions_and_their_marks():
    positions = mx.array([[0, 4, 5, 9, 10]], mx.int32)
    stored = stored_positions(positions, [(4, 6), (10, 20)])
    assert stored.tolist() == [[0, -5, -6, 9, -11]]
    assert mx.array_equal(true_positions(stored), positions).item()
    assert stored_positions(stored, []).tolist() == positions.tolist()
    assert checked_spans("s", [(5, 7), (0, 2), (1, 3), (7, 8)]) == ((0, 3), (5, 8))
    assert without([(0, 10)], [(2, 3), (8, 20)]) == ((0, 2), (3, 8))


def test_a_file_with_marks_that_no_pin_names_is_refused(tmp_path):
    cache = H2OKVCache(32, policy="h2o")
    cache.pin([(0, 8)])
    LAYER.feed(cache, 50, chunk=25)
    arrays, text = cache.state
    with pytest.raises(ValueError, match="no pin names"):
        H2OKVCache.from_state((arrays, text.replace("[[0, 8]]", "[[0, 7]]")))
