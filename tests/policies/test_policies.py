"""Policies: each keeps what its docstring says, in an example built so that others would not."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from mlx_h2o import H2OKVCache, Slots, make_policy
from mlx_h2o.policies import Observation, policy_names, register_preset, registry
from mlx_h2o.policies.selection import select_victims
from tiny_models import TinyLayer, kept_positions


def observation(*masses: list[float]) -> Observation:
    """Queries that give one KV head's slots these masses (the last slot takes what is left)."""
    rows = [[*mass, 1 - sum(mass)] for mass in masses]
    logits = mx.log(mx.array(rows))[None, None]
    return Observation(logits, mx.logsumexp(logits, axis=-1), heads=1)


def slots(scores, keys=None, values=None, *, positions=None, offset=None, evicted=0, mean=None):
    """One KV head's slots, all of them evictable."""
    N = len(scores)
    keys = mx.ones((N, 2)) if keys is None else mx.array(keys, mx.float32)
    values = mx.ones((N, 2)) if values is None else mx.array(values, mx.float32)
    return Slots(
        keys=keys[None, None],
        values=values[None, None],
        positions=mx.array(list(range(N)) if positions is None else positions)[None, None],
        scores=mx.array(scores, mx.float32)[None, None],
        offset=N if offset is None else offset,
        evictable=mx.ones((1, 1, N), mx.bool_),
        evicted=evicted,
        evicted_mean_key=mx.zeros((1, 1, 2)) if mean is None else mx.array(mean)[None, None],
    )


def order(policy, of: Slots) -> list[int]:
    """Slots from the first to go to the last."""
    chosen = select_victims(policy.priority(of), of.positions, of.evictable, of.positions.shape[-1])
    return chosen[0, 0].tolist()


def accumulated(policy, *seen: Observation) -> list[float]:
    """A policy's scores of one KV head after these observations."""
    scores = mx.zeros((1, 1, seen[0].logits.shape[-1]))
    for one in seen:
        scores = policy.accumulate(scores, one)
    return scores[0, 0].tolist()


EARLY, LATE = [0.7, 0.1, 0.1], [0.1, 0.1, 0.6]


def test_h2o_keeps_the_highest_accumulated_mass():
    policy = make_policy("h2o")
    scores = accumulated(policy, observation(EARLY), observation(LATE), observation(LATE))
    assert scores == pytest.approx([0.9, 0.3, 1.3, 0.5])
    assert order(policy, slots(scores)) == [1, 3, 0, 2]


def test_tova_keeps_what_the_last_query_attended_to():
    policy = make_policy("tova")
    scores = accumulated(policy, observation(LATE), observation(EARLY))
    assert scores == pytest.approx([0.7, 0.1, 0.1, 0.1])
    # The same within one call of several queries.
    assert accumulated(policy, observation(LATE, EARLY)) == pytest.approx(scores)
    assert order(policy, slots(scores))[-1] == 0


def test_streaming_loses_the_oldest_wherever_it_lies():
    positions = [9, 3, 7, 5]
    of = slots([1.0, 9.0, 0.0, 2.0], positions=positions, offset=10)
    assert order(make_policy("streaming"), of) == [1, 3, 2, 0]


def test_streaming_is_sinks_and_a_window():
    layer, cache = TinyLayer(), H2OKVCache(16, policy="streaming", remainder=False)
    layer.feed(cache, 50)
    # The next victim, the oldest but the sinks, is in its slot until it is overwritten.
    assert kept_positions(cache) == [[0, 1, 2, 3, *range(38, 50)]] * 2


def test_keydiff_keeps_the_odd_direction():
    """Length does not count: a long key of the common direction is still common."""
    keys = [[1, 0.1], [9, 0], [0.1, 1], [1, -0.1], [0.5, 0.02]]
    policy = make_policy("keydiff")
    assert order(policy, slots([0.0] * 5, keys))[-1] == 2
    keys[1] = [-9, 0]
    assert order(policy, slots([0.0] * 5, keys))[-1] == 1


def test_distinct_keeps_the_key_far_from_the_evicted_mean():
    """Among the kept, the odd one is at the mean of the evicted: it is nothing to keep."""
    policy = make_policy("distinct", age_weight=0.0)
    keys = [[5, 5], [5, 5.5], [0, 1], [5.5, 5]]
    mass = [0.04, 0.03, 0.02, 0.01]  # The same for each step of their age.
    evicted = slots(mass, keys, evicted=100, mean=[0.0, 1.0])
    assert order(policy, evicted)[0] == 2
    # Before enough is evicted the mean of the kept stands in, and the odd key is the one to keep.
    assert order(policy, slots(mass, keys, evicted=3, mean=[0.0, 1.0]))[-1] == 2


def test_distinct_weighs_mass_and_age():
    keys = [[0, 1], [1, 0], [0, -1], [-1, 0]]  # All equally far from the evicted mean.
    of = slots([0.4, 0.01, 0.2, 0.1], keys, evicted=100)  # Mass per step 0.1, 0.0033, 0.1, 0.1.
    assert order(make_policy("distinct", mass_weight=1.0, age_weight=0.0), of)[0] == 1
    # Age alone makes it a window.
    assert order(make_policy("distinct", mass_weight=0.0, age_weight=1.0), of) == [0, 1, 2, 3]


def salience(of: Slots, policy) -> np.ndarray:
    """Salient's formula, by numpy."""

    def z(x: np.ndarray) -> np.ndarray:
        return (x - x.mean()) / (x.std() + 1e-6)

    keys, values = np.array(of.keys[0, 0]), np.array(of.values[0, 0])
    age = of.offset - np.array(of.positions[0, 0])
    apart = np.square(keys - np.array(of.evicted_mean_key[0])).sum(-1)
    return (
        z(np.log(np.array(of.scores[0, 0]) / age + 1e-6))
        + policy.distance_weight * z(np.log(apart))
        + policy.value_weight * z(np.log(np.square(values).sum(-1)))
        - policy.age_weight * z(np.log(age))
    )


@pytest.mark.parametrize("weights", [(0.3, 0.3, 0.3), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)])
def test_salient_keeps_the_highest_by_its_formula(weights):
    rng = np.random.default_rng(1)
    names = ("distance_weight", "value_weight", "age_weight")
    policy = make_policy("salient", **dict(zip(names, map(float, weights), strict=True)))
    of = slots(
        rng.exponential(size=12),
        rng.normal(size=(12, 2)),
        rng.normal(size=(12, 2)),
        positions=rng.permutation(30)[:12].tolist(),
        offset=30,
        evicted=16,
        mean=[0.5, 0.2],
    )
    assert order(policy, of) == np.argsort(salience(of, policy)).tolist()


def test_salient_reads_the_lengths_that_were_kept():
    """A value packed to nothing is as long as it was when it came."""
    policy = make_policy("salient", distance_weight=0.0, value_weight=5.0, age_weight=0.0)
    of = slots([0.3, 0.2, 0.1], values=[[0, 0], [0, 0], [0, 0]])
    of.value_lengths = mx.array([[[3, 1, 2]]], mx.float16)
    assert order(policy, of) == [1, 2, 0]


@pytest.mark.parametrize("option", ["age_normalised", "value_weighted"])
def test_salient_has_weights_of_its_own(option):
    with pytest.raises(ValueError, match="does not rank by scores"):
        make_policy("salient", **{option: True})


def test_ema_forgets_what_h2o_never_does():
    seen = [observation([0.9, 0.05])] + [observation([0.02, 0.08])] * 60
    remembered, forgotten = (accumulated(make_policy(name), *seen) for name in ("h2o", "ema"))
    assert remembered[0] == pytest.approx(0.9 + 60 * 0.02, rel=1e-5)
    decayed = 0.05 * 0.9 * 0.95**60 + 0.02 * (1 - 0.95**60)
    assert forgotten[0] == pytest.approx(decayed, rel=1e-4)
    early, often = [0.9] + [0.0] * 20, [0.0] + [0.04] * 20
    seen = [observation([a, b]) for a, b in zip(early, often, strict=True)]
    for name, loses in (("h2o", 1), ("ema", 0)):
        policy = make_policy(name, **({"decay": 0.8} if name == "ema" else {}))
        assert order(policy, slots(accumulated(policy, *seen)))[0] == loses


def test_snapkv_keeps_the_neighbours_of_a_hit():
    """A prompt's window pools by the most; h2o's average lets one hit be diluted."""
    policy = make_policy("snapkv", pool=3)
    mass = mx.array([[[0.0, 0.9, 0.0, 0.0, 0.4, 0.4, 0.0, 0.0]]])
    positions = mx.array([[[7, 1, 2, 3, 4, 5, 6, 0]]])  # The first and the last slot are swapped.
    of = slots([0.0] * 8, positions=positions[0, 0].tolist(), offset=8)
    pooled = policy.prompt_priority(of, mass)[0, 0].tolist()
    assert pooled == pytest.approx([0.0, 0.9, 0.9, 0.4, 0.4, 0.4, 0.4, 0.9])


def test_snapkvs_window_goes_on_while_decoding():
    """What a window's length of queries did not look at fades to about a third."""
    policy = make_policy("snapkv", window=10)
    seen = [observation([0.9, 0.05])] + [observation([0.0, 0.5])] * 10
    scores = accumulated(policy, *seen)
    assert scores[0] == pytest.approx(0.09 * 0.9**10, rel=1e-4)
    assert order(policy, slots(scores))[0] == 0


def test_ema_takes_one_step_per_query_of_a_call():
    policy = make_policy("ema")
    apart = accumulated(policy, observation(EARLY), observation(LATE))
    assert accumulated(policy, observation(EARLY, LATE)) == pytest.approx(apart)


def test_ema_logits_ranks_by_size_and_counts_masked_entries_as_zero():
    """Two query heads of one KV head: the mean of |s| over both, a masked one giving 0."""
    logits = mx.array([[-8.0, 1.0, -mx.inf, 2.0], [-6.0, -3.0, 4.0, -mx.inf]])[None, :, None]
    seen = Observation(logits, mx.logsumexp(logits, axis=-1), heads=1)
    scores = accumulated(make_policy("ema-logits", decay=0.9), seen)
    assert scores == pytest.approx([0.7, 0.2, 0.2, 0.1])
    # A strongly negative logit means no attention, and is kept all the same: the report's rule.
    assert order(make_policy("ema-logits"), slots(scores))[-1] == 0


@pytest.mark.parametrize("name", ["h2o", "ema", "tova", "ema-logits"])
def test_age_normalisation_favours_the_young(name):
    """Slot 0 gathered more in all, slot 1 more per step."""
    of = slots([4.0, 3.0], positions=[0, 8], offset=10)
    assert order(make_policy(name), of) == [1, 0]
    assert order(make_policy(name, age_normalised=True), of) == [0, 1]


@pytest.mark.parametrize("name", ["h2o", "ema", "tova", "ema-logits"])
def test_value_weighting_favours_long_values(name):
    of = slots([3.0, 2.0], values=[[0.1, 0.0], [3.0, 4.0]])
    assert order(make_policy(name), of) == [1, 0]
    assert order(make_policy(name, value_weighted=True), of) == [0, 1]


@pytest.mark.parametrize("setting", ["age_normalised", "value_weighted"])
def test_options_change_what_a_cache_keeps(setting):
    kept = []
    for value in (False, True):
        cache = H2OKVCache(24, policy=make_policy("h2o", **{setting: value}), remainder=False)
        TinyLayer().feed(cache, 120)
        kept.append(kept_positions(cache))
    assert kept[0] != kept[1]


def test_layer_unit_drops_the_same_token_everywhere():
    for unit, agree in (("layer", True), ("head", False)):
        cache = H2OKVCache(24, policy=make_policy("h2o", unit=unit), remainder=False)
        layer = TinyLayer()
        layer.feed(cache, 40, chunk=40)
        layer.feed(cache, 40)
        first, second = kept_positions(cache)
        assert (first == second) is agree


def test_the_report_preset_has_its_numbers():
    """4 sinks, 128 recent and so 124 heavy of 256; one choice for all heads of a layer."""
    paper = make_policy("paper")
    assert (paper.name, paper.sink, paper.recent_slots(256)) == ("ema-logits", 4, 128)
    assert 256 - paper.sink - paper.recent_slots(256) == 124
    assert (paper.unit, paper.decay, paper.prompt) == ("layer", 0.95, "full")
    cache = H2OKVCache(256, policy="paper", remainder=False)
    TinyLayer().feed(cache, 400, chunk=60)
    first, second = kept_positions(cache)
    assert first == second
    assert len(first) == 256
    assert first[:4] == [0, 1, 2, 3]
    assert first[-128:] == list(range(272, 400))


def test_the_h2o_paper_preset_has_its_numbers():
    """Half heavy hitters, half recent, no attention sinks."""
    paper = make_policy("h2o-paper")
    assert (paper.name, paper.sink, paper.recent_slots(256)) == ("h2o", 0, 128)
    assert (paper.unit, paper.prompt) == ("head", "full")
    cache = H2OKVCache(64, policy="h2o-paper", remainder=False)
    TinyLayer().feed(cache, 200, chunk=60)
    for head in kept_positions(cache):
        assert len(head) == 64
        assert head[-32:] == list(range(168, 200))


def test_a_preset_yields_to_settings():
    assert make_policy("paper", recent=64, unit=None).recent == 64
    assert make_policy("paper", unit=None).unit == "layer"
    policy = make_policy("h2o", sink=2)
    assert make_policy(policy, recent=3) == make_policy("h2o", sink=2, recent=3)
    assert policy.recent == 0.5


@pytest.mark.parametrize("name", ["nope", "", "H2O", "full"])
def test_an_unknown_policy_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="Unknown policy") as refusal:
        make_policy(name)
    for known in ("distinct", "h2o", "streaming", "paper", "h2o-paper"):
        assert known in policy_names()
        assert known in str(refusal.value)


@pytest.mark.parametrize("name", ["distinct", "h2o", "paper"])
def test_an_unknown_setting_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="no field heavy, temperature") as refusal:
        make_policy(name, heavy=3, temperature=1.0)
    for known in ("sink", "recent", "evict_every"):
        assert known in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("h2o", {"sink": -1}, "sink must be at least 0; got -1"),
        ("h2o", {"recent": -5}, "recent must be .*; got -5"),
        ("h2o", {"recent": -0.5}, "recent must be .*; got -0.5"),
        ("h2o", {"recent": 1.0}, "share .* below 1.0; got 1.0"),
        ("h2o", {"recent": float("nan")}, "recent must be a finite number; got nan"),
        ("h2o", {"unit": "model"}, 'unit must be "head" or "layer"'),
        ("h2o", {"prompt": "snap"}, 'prompt must be "window" or "full"'),
        ("h2o", {"evict_every": 0}, "evict_every"),
        ("h2o", {"window": 0}, "window"),
        ("h2o", {"sink": 1.5}, "sink must be a whole number; got 1.5"),
        ("h2o", {"pool": 4}, "pool must be odd; got 4"),
        ("h2o", {"pool": -1}, "pool must be at least 1"),
        ("ema", {"decay": 1.0}, "decay must be at least 0 and below 1"),
        ("ema-logits", {"decay": -0.1}, "decay must be at least 0 and below 1"),
    ],
)
def test_values_out_of_range_are_refused(name, settings, text):
    with pytest.raises(ValueError, match=text):
        make_policy(name, **settings)


def test_only_policies_can_be_registered():
    with pytest.raises(ValueError, match=r"must subclass mlx_h2o\.Policy"):
        mlx_h2o.register_policy("stranger")(dict)
    for name in ("h2o", "paper"):  # saved caches name them
        with pytest.raises(ValueError, match="choose another name"):

            @mlx_h2o.register_policy(name)
            class Another(mlx_h2o.Policy):
                pass

    assert "stranger" not in policy_names()


def test_which_policies_run_without_seeing_attention():
    """What a model that attends by itself may be given."""
    blind = {name for name in policy_names() if not make_policy(name).needs_attention}
    assert blind == {"keydiff", "streaming"}
    assert not make_policy("distinct", mass_weight=0.0).needs_attention


@pytest.fixture
def loud_values():
    """A policy of one's own: subclass, register, override what a slot is worth."""

    @mlx_h2o.register_policy("loud-values")
    @dataclass(frozen=True)
    class LoudValues(mlx_h2o.Policy):
        """Keeps the tokens with the largest values."""

        power: float = 1.0

        def priority(self, slots: mlx_h2o.Slots) -> mx.array:
            return mx.linalg.norm(slots.values.astype(mx.float32), axis=-1) ** self.power

    yield "loud-values"
    del registry._POLICIES["loud-values"]


@pytest.mark.parametrize("budgets", [[24, 24], [16, 32]], ids=["uniform", "ragged"])
def test_a_registered_policy_works_end_to_end(loud_values, budgets):
    """By name, with settings, listed, and through prompts, decoding, saving and loading."""
    assert loud_values in policy_names()
    # Prompts are scored by attention unless told to use the policy's own priority.
    policy = make_policy(loud_values, power=2.0, sink=0, recent=4, prompt="full")
    cache = H2OKVCache(budgets=budgets, policy=policy)
    layer = TinyLayer()
    layer.feed(cache, 60, chunk=20)
    layer.feed(cache, 60)
    loudness = mx.linalg.norm(layer.tokens[2][0, :, :116], axis=-1)
    for head, budget in enumerate(budgets):
        # Each step the quietest goes, so the loudest remain; the last slot is the next victim's.
        loudest = mx.argsort(-loudness[head])[: budget - 5].tolist()
        assert set(loudest) < set(kept_positions(cache)[head])
    restored = H2OKVCache.from_state(cache.state)
    assert restored.policy == policy
    assert mx.array_equal(layer.feed(restored, 5), layer.feed(cache, 5))


def test_a_registered_policy_may_have_a_preset(loud_values):
    register_preset("very-loud", loud_values, power=3.0)
    try:
        assert make_policy("very-loud").power == 3.0
        assert "very-loud" in policy_names()
    finally:
        del registry._PRESETS["very-loud"]
