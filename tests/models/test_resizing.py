"""`mlx_h2o.resize`: another budget for a whole model, shared out as if it had been the first."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.nn import Module
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o import (
    H2OKVCache,
    Profile,
    load_prompt_cache,
    make_policy,
    make_prompt_cache,
    resize,
    save_prompt_cache,
)
from mlx_h2o.budgets.cost import LayerShare, RowWidths
from mlx_h2o.budgets.plan import Plan
from mlx_h2o.budgets.profile import Measured
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.loading.identity import identity_of
from tiny_models import TinyLayer, greedy_tokens, prefill, prompt_tokens, tiny_model

SIZES = {"fewer": {"max_size": 30}, "more": {"max_size": 77}, "bytes": {"max_bytes": 30_000}}


GRID = (16, 32, 64, 128)
LOSSES = (
    ((9.0, 4.0, 1.0, 0.9), (2.0, 1.5, 1.4, 0.1)),
    ((5.0, 0.5, 0.1, 0.0), (8.0, 7.0, 0.2, 0.0)),
)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def profile_of(model: Module, echoes: tuple[float, ...] = ()) -> Profile:
    """Every head loses something else; with `echoes` also where text repeats."""
    identity = identity_of(model, [2, 2], [12, 12])
    if not echoes:
        return Profile(identity, GRID, LOSSES, "by hand")
    errors = np.array(LOSSES, np.float32).reshape(4, 1, 1, len(GRID))
    measured = Measured((4.0,), GRID[-1:], errors, echoes=np.array(echoes, np.float32))
    return Profile.of(identity, GRID, measured, "by hand")


def budgets_of(cache: list) -> list[list[int]]:
    """Of each layer, those of a long conversation."""
    settings = [entry.settings for entry in cache if isinstance(entry, BoundedKVCache)]
    return [list(s.filling[-1].budgets if s.filling else s.budgets) for s in settings]


@pytest.mark.few(8)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shared", ["by profile", "by its retrieval loss, too", "evenly"])
@pytest.mark.parametrize("way", ["unused", "in use", "through a file"])
def test_heads_get_what_a_new_cache_of_this_size_would_give_them(
    model, way, shared, size, tmp_path
):
    """To resize every entry alike threw the profile's shares away, and its retrieval loss later."""
    echoes = () if shared == "by profile" else (0.0, 0.0, 1e3, 0.0)
    budgets = "uniform" if shared == "evenly" else profile_of(model, echoes)
    cache = make_prompt_cache(model, max_size=50, budgets=budgets)
    if way != "unused":
        prefill(model, cache, prompt_tokens(90), 20)
        prefill(model, cache, prompt_tokens(5), 1)
    if way == "through a file":
        save_prompt_cache(tmp_path / "cache.safetensors", cache)
        cache = load_prompt_cache(tmp_path / "cache.safetensors")
    before = budgets_of(cache)
    resize(cache, **SIZES[size])
    wanted = make_prompt_cache(model, **SIZES[size], budgets=budgets)
    assert budgets_of(cache) == budgets_of(wanted) != before
    assert (len({b for layer in budgets_of(cache) for b in layer}) > 1) == (shared != "evenly")
    prefill(model, cache, prompt_tokens(200), 50)
    assert len(greedy_tokens(model, cache, [1], 30)) == 30
    for entry in cache:
        assert entry.size() == max(entry.budgets)
    if "max_bytes" in SIZES[size]:
        assert sum(entry.nbytes for entry in cache) <= SIZES[size]["max_bytes"]


def test_there_and_back_again_changes_no_share(model):
    cache = make_prompt_cache(model, max_size=50, budgets=profile_of(model), bits=None)
    before = budgets_of(cache)
    for size in (30, 77, 50):
        resize(cache, max_size=size)
        prefill(model, cache, prompt_tokens(30), 30)
    assert budgets_of(cache) == before
    for entry in cache:  # one layer alone, by hand, and all again
        entry.resize(20)
    resize(cache, max_size=50)
    assert budgets_of(cache) == before


def test_packed_layers_and_those_with_a_recent_zone_are_resized():
    model = tiny_model("qwen3")
    options = {"bits": 4, "group_size": 32, "recent_bits": 16}
    with pytest.raises(ValueError, match="group"):  # heads of 16 have no group of 32
        prefill(model, make_prompt_cache(model, max_size=64, **options), [1, 2, 3], 3)
    layers = [H2OKVCache(48, **options), H2OKVCache(48, **options)]
    tokens = TinyLayer(key_width=32, value_width=32)
    for layer in layers:
        tokens.feed(layer, 90, 30)
    for size in (40, 80):
        resize(layers, max_size=size)
        for layer in layers:
            tokens.feed(layer, 90, 30, first=0)
            assert layer.size() == layer.budgets[0] < size  # the remainder is charged


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2_by_itself", "qwen3_next", "deepseek_v3"])
def test_other_caches_stay_and_models_that_attend_by_themselves_follow(family):
    model = tiny_model(family)
    cache = make_prompt_cache(model, max_size=64)
    prefill(model, cache, prompt_tokens(90), 30)
    others = [id(entry) for entry in cache if not isinstance(entry, BoundedKVCache)]
    for size in (40, 100):
        resize(cache, max_size=size)
        rows = [entry.store.reserved for entry in cache if isinstance(entry, BoundedKVCache)]
        expected = budgets_of(make_prompt_cache(model, max_size=size))
        assert budgets_of(cache) == [
            [slots - reserved for slots in layer]
            for layer, reserved in zip(expected, rows, strict=True)
        ]
        logits = prefill(model, cache, prompt_tokens(120), 30)
        assert mx.all(mx.isfinite(logits))
    assert others == [id(entry) for entry in cache if not isinstance(entry, BoundedKVCache)]


def test_members_of_lists_are_resized():
    layers = [H2OKVCache(40), H2OKVCache(40)]
    tokens = TinyLayer()
    for layer in layers:
        tokens.feed(layer, 60, 20)
    plain = mlx_lm_cache.KVCache()
    resize([mlx_lm_cache.CacheList(layers[0], plain), mlx_lm_cache.CacheList(layers[1])], 30)
    assert budgets_of(layers) == [[28, 28]] * 2
    assert plain.empty()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_size": 6}, "max_size=6 is too small"),
        ({"max_bytes": 900}, "max_bytes=900 is too small"),
        ({"max_size": 30, "max_bytes": 9}, "exactly one of max_size, max_bytes"),
        ({}, "exactly one of max_size, max_bytes"),
        ({"max_size": "30"}, "max_size must be a whole number"),
    ],
)
def test_what_is_refused_changes_nothing(model, sizes, message):
    cache = make_prompt_cache(model, max_size=50)
    prefill(model, cache, prompt_tokens(90), 30)
    before = [entry.config() for entry in cache]
    with pytest.raises(ValueError, match=message):
        resize(cache, **sizes)
    assert [entry.config() for entry in cache] == before


@pytest.mark.parametrize("context", [None, 800])
def test_a_share_of_a_16_bit_cache_is_that_of_new_caches(model, context, tmp_path):
    options = {"budgets": profile_of(model), "bits": 16}
    cache = make_prompt_cache(model, max_bytes="50%", context=400, **options)
    prefill(model, cache, prompt_tokens(90), 20)
    resize(cache, max_bytes="25%", context=context)
    wanted = make_prompt_cache(model, max_bytes="25%", context=context or 400, **options)
    assert budgets_of(cache) == budgets_of(wanted)
    save_prompt_cache(tmp_path / "cache.safetensors", cache)
    cache = load_prompt_cache(tmp_path / "cache.safetensors")
    before = budgets_of(cache)
    with pytest.raises(ValueError, match="from a file do not know: give context"):
        resize(cache, max_bytes="50%")
    assert budgets_of(cache) == before
    resize(cache, max_bytes="25%", context=context or 400)
    assert budgets_of(cache) == before


def test_lists_that_one_size_says_nothing_about_are_refused():
    with pytest.raises(ValueError, match="no bounded cache"):
        resize([mlx_lm_cache.KVCache()], 30)
    with pytest.raises(ValueError, match="Before its first token"):
        resize([H2OKVCache(40)], 30)
    with pytest.raises(ValueError, match="different settings"):
        resize([H2OKVCache(40), H2OKVCache(40, policy="tova")], 30)


def test_bytes_hold_the_steps_that_can_be_taken_back():
    """The journal is charged against max_bytes, as where the caches were made."""
    model, limit = tiny_model("llama"), 90_000
    cache = make_prompt_cache(model, max_size=300, undo=8)
    prefill(model, cache, prompt_tokens(90), 20)
    resize(cache, max_bytes=limit)
    wanted = make_prompt_cache(model, max_bytes=limit, undo=8)
    assert budgets_of(cache) == budgets_of(wanted)
    prefill(model, cache, prompt_tokens(200), 50)
    assert len(greedy_tokens(model, cache, [1], 30)) == 30
    assert 0.7 * limit < sum(entry.nbytes for entry in cache) <= limit


# -- slots that layers were given -----------------------------------------------------------------

SHARES = st.lists(st.lists(st.integers(8, 400), min_size=1, max_size=4), min_size=1, max_size=5)


@settings(deadline=None)
@given(layers=SHARES, mean=st.integers(40, 600), remembers=st.booleans())
def test_every_head_keeps_its_part_of_the_whole(layers, mean, remembers):
    widths, policy = RowWidths(16, 16, 2, 2), make_policy("h2o")
    least = policy.least_budget()
    shares = [LayerShare(len(slots), widths, slots=tuple(slots)) for slots in layers]
    before = [slots for layer in layers for slots in layer]
    total = len(before) * (mean - widths.remainder_slots(remembers))
    sized = Plan(shares, policy, remembers, True, max_size=mean).slots
    slots = [count for layer in sized for count in layer]
    assert [len(layer) for layer in sized] == [len(layer) for layer in layers]
    assert sum(slots) == total
    assert min(slots) >= least
    if all(count * total >= least * sum(before) for count in before):  # none is held up by it
        parts = [count * total / sum(before) for count in before]
        assert all(abs(got - part) < 2 for got, part in zip(slots, parts, strict=True))
    # In bytes the same, and no slot more would fit.
    every = sum(map(widths.cost(policy, remembers).of, slots))
    assert Plan(shares, policy, remembers, True, max_bytes=every).slots == sized
    roomy = every + widths.slot_bytes(policy)
    more = Plan(shares, policy, remembers, True, max_bytes=roomy).slots
    assert sum(map(sum, more)) == total + 1


@pytest.mark.parametrize("way", ["unused", "in use", "through a file"])
def test_layers_keep_the_proportions_of_the_slots_they_were_given(model, way, tmp_path):
    given = [[20, 20], [80, 40]]
    cache = make_prompt_cache(model, budgets=given)
    if way != "unused":
        prefill(model, cache, prompt_tokens(90), 20)
    if way == "through a file":
        save_prompt_cache(tmp_path / "cache.safetensors", cache)
        cache = load_prompt_cache(tmp_path / "cache.safetensors")
    charged = cache[0].share.widths.remainder_slots(True)
    resize(cache, max_size=80 + charged)
    assert budgets_of(cache) == [[40, 40], [160, 80]]
    prefill(model, cache, prompt_tokens(200), 50)
    assert [entry.size() for entry in cache] == [40, 160]
    resize(cache, max_bytes=sum(entry.nbytes for entry in cache) // 2)
    (a, b), (c, d) = budgets_of(cache)
    assert a == b
    assert abs(c - 4 * a) < 5
    assert abs(d - 2 * a) < 3
    resize(cache, max_size=40 + charged)
    assert budgets_of(cache) == given
    with pytest.raises(ValueError, match=r"max_size=6 is too small.*make it at least \d+"):
        resize(cache, max_size=6)
    with pytest.raises(ValueError, match=r"max_bytes=900 is too small.*make it at least \d+"):
        resize(cache, max_bytes=900)
    assert budgets_of(cache) == given
