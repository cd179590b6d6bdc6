"""Numbers of any size at every door: an answer soon, a value or an error that names the field."""

import copy
import io
import json
import re
import signal
from contextlib import contextmanager, redirect_stderr

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import mlx_h2o
from mlx_h2o import H2OKVCache, Policy, _checks, cli, make_policy, make_prompt_cache
from mlx_h2o._byte_size import memory_size
from mlx_h2o.budgets.allocation import TooManyPins, room_for_pins, scaled
from mlx_h2o.budgets.settings import CacheSettings, ModelSettings
from mlx_h2o.cli.options import cache_settings
from mlx_h2o.hosts import routing
from mlx_h2o.models.install import NothingBounded
from mlx_h2o.policies import policy_names, register_policy
from mlx_h2o.policies.base import average_pool
from mlx_h2o.policies.snapkv import maximum_pool
from mlx_h2o.serve import protocol
from mlx_h2o.serve.pins import PinRequest
from tiny_models import TinyLayer, tiny_model

#: Seconds of processor time that one answer may take; most take milliseconds.
SOON = 5
HUGE = [
    sign * (base**power + more)
    for base, powers in ((2, (15, 16, 30, 31, 32, 53, 63, 64, 1024)), (10, (5, 10, 22, 30, 400)))
    for power in powers
    for more in (-1, 0, 1)
    for sign in (1, -1)
]
integers = st.sampled_from(HUGE) | st.integers(-(10**400), 10**400) | st.integers(-3, 70)
numbers = integers | st.floats() | st.booleans()
texts = st.sampled_from(["", "head", "layer", "10^25MB", "1e400", "25", "9" * 500 + "MB", "nan%"])
texts = texts | st.text(max_size=6) | integers.map(str) | integers.map(lambda n: f"{n}GB")
scalars = numbers | texts | st.none()
values = (
    scalars | st.lists(scalars, max_size=3) | st.lists(st.lists(integers, max_size=3), max_size=3)
)

POLICY_FIELDS = sorted(
    {name for policy in policy_names() for name in vars(make_policy(policy))} - {"name"}
)
OF_MODELS = (
    "max_size max_bytes context remainder bits k_bits v_bits group_size recent_bits undo positions "
    "pins frames"
).split()
OF_CACHES = "max_size max_bytes budgets remainder attending undo saturation filling pins".split()

# `soon` counts processor time instead.
unhurried = settings(deadline=None)


@contextmanager
def soon():
    """Raise where what is done inside takes more processor time than it may."""

    def late(*_):
        raise TimeoutError(f"This took more than {SOON} seconds of processor time.")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SOON)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def refusal(make) -> str | None:
    """What a ValueError says, or None: it ends soon, whatever it was given."""
    with soon():
        try:
            make()
        except ValueError as error:
            return str(error)
    return None


def ends_well(name, make) -> None:
    """It ends soon, with a value or with a short error that names the field."""
    said = refusal(make)
    assert said is None or (name in said and len(said) < 2000)


def policies_with(field):
    return [name for name in policy_names() if field in vars(make_policy(name))]


# -- arguments ------------------------------------------------------------------------------------


@unhurried
@given(st.sampled_from(OF_MODELS), values)
@example("max_size", 2**53 + 1)
@example("max_bytes", 10**25)
@example("pins", [[0, 10**9]])
def test_settings_of_a_model(name, value):
    size = {} if name in ("max_size", "max_bytes") else {"max_size": 64}
    if value is not None:
        ends_well(name, lambda: ModelSettings.of(**size, **{name: value}))


@unhurried
@given(st.sampled_from(POLICY_FIELDS), values, st.data())
@example("sink", 10**30, None)
@example("evict_every", 10**30, None)
@example("window", 10**22, None)
@example("pool", 500_001, None)
@example("recent", 10**400, None)
@example("recent", 1 - 2**-53, None)
def test_settings_of_a_policy(name, value, data):
    known = policies_with(name)
    policy = known[0] if data is None else data.draw(st.sampled_from(known))
    if value is not None:
        ends_well(name, lambda: make_policy(policy, **{name: value}))


@unhurried
@given(st.sampled_from(OF_CACHES), values)
def test_settings_of_a_cache(name, value):
    size = {} if name in ("max_size", "max_bytes", "budgets") else {"budgets": (40, 40)}
    if value is not None:
        ends_well(name, lambda: CacheSettings(**size, **{name: value}))


@unhurried
@given(texts)
@example("10^25MB")
@example("9" * 5000 + "TB")
def test_sizes_in_words(text):
    ends_well("max_bytes", lambda: memory_size("max_bytes", text))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_size", 2**30 + 1),
        ("max_bytes", 2**50 + 1),
        ("context", 10**10),
        ("undo", 2**16 + 1),
        ("max_bytes", "1601%"),
    ],
)
def test_each_has_a_largest_value(field, value):
    size = {} if field.startswith("max_") else {"max_size": 64}
    with pytest.raises(ValueError, match=rf"^{field} must be .*(at most|from)"):
        ModelSettings.of(**size, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("evict_every", 2**16 + 1),
        ("sink", 2**30 + 1),
        ("window", 2**30 + 1),
        ("pool", 2**12 + 1),
        ("age_weight", 1e19),
        ("recent", 2**30 + 1),
    ],
)
def test_each_field_of_a_policy_has_a_largest_value(field, value):
    with pytest.raises(ValueError, match=rf"^{field} must be .*(at most|from)"):
        ModelSettings.of(64, policy=f"salient:{field}={value}")


def test_a_size_beyond_positions_is_refused_by_name():
    with pytest.raises(ValueError, match="max_size must be at most 1073741824; got 10000000000"):
        make_prompt_cache(tiny_model("llama"), 10**10)


# -- requests -------------------------------------------------------------------------------------


@unhurried
@given(st.sampled_from(OF_MODELS[:-2]), values)
def test_settings_of_a_request(name, value):
    ends_well(name, lambda: protocol.cache_settings({name: value}, {"max_size": 64}))


@unhurried
@given(st.sampled_from(POLICY_FIELDS), scalars.map(str))
@example("sink", str(10**30))
@example("pool", "500001")
def test_fields_of_a_requests_policy(name, text):
    assume(":" not in text)  # it begins another field
    own = {"policy": f"{policies_with(name)[0]}:{name}={text}"}
    ends_well(name, lambda: protocol.cache_settings(own, {"max_size": 64}))


@unhurried
@given(values)
def test_pins_of_a_request(value):
    ends_well("pins", lambda: PinRequest.of(value))


# -- files ----------------------------------------------------------------------------------------


def saved(**settings):
    cache = H2OKVCache(24, **settings)
    TinyLayer().feed(cache, 40)
    return cache.state


SAVED = [saved(), saved(policy="snapkv", undo=2)]


def places(config, before=()):
    """Every place of a number in a configuration."""
    items = config.items() if isinstance(config, dict) else enumerate(config)
    for key, value in items:
        if isinstance(value, dict | list) and value:
            yield from places(value, (*before, key))
        else:
            yield (*before, key)


PLACES = [(i, place) for i, (_, text) in enumerate(SAVED) for place in places(json.loads(text))]


@unhurried
@given(st.sampled_from(PLACES), values)
@example((0, ("policy", "evict_every")), 10**30)
@example((0, ("policy", "sink")), 10**30)
@example((0, ("policy", "pool")), 500_001)
@example((0, ("offset",)), 2**63)
def test_numbers_of_a_file(where, value):
    which, place = where
    arrays, text = SAVED[which]
    config = json.loads(text)
    part = config
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    forged = json.dumps(config)
    said = refusal(lambda: H2OKVCache.from_state((arrays, forged)))
    assert said is None or len(said) < 2000


# -- the command line -----------------------------------------------------------------------------

PARSER = cli.parser()
FLAGS = {
    "max-kv-size": "size", "kv-memory": "kv-memory", "context": "context",
    "undo": "undo", "k-bits": "bits", "kv-group-size": "group",
}  # fmt: skip


@unhurried
@given(st.sampled_from(sorted(FLAGS)), scalars.map(str))
@example("max-kv-size", "999999999999")
@example("kv-memory", "25")
def test_flags(name, text):
    refused = io.StringIO()

    def parse():
        try:
            with redirect_stderr(refused):
                args = PARSER.parse_args(["generate", f"--{name}={text}"])
        except SystemExit:
            raise ValueError(refused.getvalue().splitlines()[-1]) from None
        cache_settings(args)

    ends_well(FLAGS[name], parse)


@unhurried
@given(st.sampled_from(POLICY_FIELDS), scalars.map(str))
def test_flags_of_a_policy(name, text):
    assume(":" not in text)  # it begins another field
    refused = io.StringIO()

    def parse():
        try:
            with redirect_stderr(refused):
                given = f"--policy={policies_with(name)[0]}:{name}={text}"
                args = PARSER.parse_args(["generate", given])
        except SystemExit:
            raise ValueError(refused.getvalue().splitlines()[-1]) from None
        cache_settings(args)

    ends_well(name, parse)


@pytest.mark.parametrize("given", ["99999999", "-1", "9" * 5000, "eighty", "1e3"])
def test_a_port_that_is_none_is_refused_in_a_line(given, capsys):
    try:
        code = cli.run(["serve", f"--port={given}"])
    except SystemExit as stop:  # what is no number at all does not come as far as the command
        code = stop.code
    assert code == 2
    said = capsys.readouterr().err
    assert re.search("--port(: it)? must be", said)
    assert len(said.splitlines()) == 1


def test_a_number_for_a_share_is_answered_with_the_share(capsys):
    with pytest.raises(SystemExit):
        PARSER.parse_args(["generate", "--kv-memory", "25"])
    assert 'did you mean "25%"?' in capsys.readouterr().err


# -- nothing counts up ----------------------------------------------------------------------------


@unhurried
@given(st.integers(0, 200), st.floats(0, 1, exclude_max=True), st.integers(1, 50))
def test_the_least_budget_is_the_least(sink, recent, evict_every):
    wanted = {"sink": sink, "recent": recent, "evict_every": evict_every}
    said = refusal(lambda: make_policy("h2o", **wanted))
    if said is not None:
        assert "need a head of more than" in said
        return
    policy = make_policy("h2o", **wanted)
    least = policy.least_budget()
    policy.check_budget(least)
    with pytest.raises(ValueError, match="too small"):
        policy.check_budget(least - 1)


def test_pins_that_are_far_too_many_are_counted_at_once():
    policy = make_policy("h2o", recent=0.25)
    with soon(), pytest.raises(TooManyPins) as refused:
        room_for_pins((100, 100), policy, ((0, 5 * 10**8),))
    assert refused.value.most == 100 - 4 - 25 - 1
    assert policy.least_budget(refused.value.most) <= 100 < policy.least_budget(71)


def test_shares_are_scaled_at_once():
    with soon():
        assert sum(scaled([1] * 50 + [10**9], 51 * 10**7, 10**7)) == 51 * 10**7


@pytest.mark.parametrize("pool", [average_pool, maximum_pool])
@pytest.mark.parametrize("width", [1, 3, 5, 7, 63, 101, 4095])
def test_a_pool_is_that_of_its_neighbours(pool, width):
    rng = np.random.default_rng(0)
    mass = rng.random((1, 2, 100)).astype(np.float32) ** 8
    positions = np.stack([rng.permutation(100) for _ in range(2)])[None]
    pooled = np.array(pool(mx.array(mass), mx.array(positions), width))
    for h in range(2):
        ordered = np.zeros(100 + 2 * width)
        ordered[width + positions[0, h]] = mass[0, h]
        for i, at in enumerate(positions[0, h] + width):
            near = ordered[at - width // 2 : at + width // 2 + 1]
            expected = near.sum() / width if pool is average_pool else near.max()
            assert pooled[0, h, i] == pytest.approx(expected, rel=2e-6)


def test_a_wide_pool_takes_no_more_memory_than_its_rows():
    mass, positions = mx.ones((1, 1, 4096)), mx.arange(4096)[None, None]
    mx.eval(mass, positions)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(average_pool(mass, positions, 4095))
    assert mx.get_peak_memory() - before < 64 * mass.nbytes


# -- what is not known ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "near"),
    [
        ({"max_sise": 64}, "max_size"),
        ({"max_size": 64, "policy": "h2o:evict_evry=2"}, "evict_every"),
        ({"max_size": 64, "pinz": []}, "pins"),
        ({"max_size": 64, "policy": "salent"}, "salient"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest(said, near):
    model = tiny_model("llama")
    for make in (
        lambda: make_prompt_cache(model, **said),
        lambda: mlx_h2o.install(**said),
        lambda: ModelSettings.of(**said),
        lambda: protocol.cache_settings(said, {}),
    ):
        if "pinz" in said and "install" in make.__code__.co_names:
            continue  # which has no pins
        with pytest.raises(ValueError, match=rf"{near}\?|policy 'salent'"):
            make()


@pytest.mark.parametrize("name", ["mlx-community/SmolLM2-135M-Instruct", "builtin:recall-4m"])
def test_a_models_name_is_no_model(name):
    with pytest.raises(ValueError, match=f"mlx_h2o.load\\('{name}'\\)"):
        make_prompt_cache(name, 64)


def test_install_without_a_size_says_that_nothing_is_bounded():
    mlx_h2o.uninstall()
    with pytest.warns(NothingBounded, match="bounds nothing"):
        mlx_h2o.install()


def test_what_was_imported_while_installed_is_mlx_lms_own_afterwards():
    import mlx_lm.models.cache

    model = tiny_model("llama")
    mlx_h2o.install(max_size=40)
    kept = {"make": mlx_lm.models.cache.make_prompt_cache}  # where no module holds it
    assert type(kept["make"](model)[0]) is H2OKVCache
    mlx_h2o.install(max_size=48)
    assert kept["make"](model)[0].settings.size == "46 slots"
    mlx_h2o.uninstall()
    assert {type(entry) for entry in kept["make"](model)} == {mlx_lm.models.cache.KVCache}
    routing.install()


class Wrong(Policy):
    """Gives what `wrong` says, instead of `[B, H, N]`."""

    wrong = ""

    def accumulate(self, scores, seen):
        return scores[..., 0] if self.wrong == "accumulate" else scores + seen.mass

    def priority(self, slots):
        return slots.scores[:, 0] if self.wrong == "priority" else slots.scores

    def prompt_priority(self, slots, window_mass):
        return None if self.wrong == "prompt_priority" else self.priority(slots)


register_policy("of wrong shape")(Wrong)


@pytest.mark.parametrize("wrong", ["accumulate", "priority", "prompt_priority", ""])
def test_a_policy_of_a_wrong_shape_is_named_before_anything_is_stored(wrong, monkeypatch):
    monkeypatch.setattr(Wrong, "wrong", wrong)
    layer, cache = TinyLayer(), H2OKVCache(24, policy=Wrong())
    if not wrong:
        layer.feed(cache, 60, 20)
        return
    with pytest.raises(ValueError, match=rf"Wrong\.{wrong} .*of shape \(1, 2, \d+\); it gave"):
        layer.feed(cache, 10)
    assert cache.empty()
    assert cache.offset == 0
    copy.deepcopy(cache)


def test_messages_show_huge_integers():
    assert _checks.shown(10**400) == "(an integer of about 401 digits)"
    assert "-(an integer of about 5001 digits)" in _checks.shown([-(10**5000)])
