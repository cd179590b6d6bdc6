"""Pins beside what else a cache can be: rolling, shared, compressed, batched, of given budgets."""

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from mlx_h2o import H2OKVCache, make_policy, make_prompt_cache
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.batch import BatchH2OKVCache
from mlx_h2o.caches.shared import SharedKVCache
from mlx_h2o.slots.rope import Rope
from model_coverage import coverage_model
from tiny_models import Characters, TinyLayer, kept_positions, prefill, prompt_tokens, tiny_model

SLOW = pytest.mark.slow
PINS = ((0, 5), (20, 24), (110, 112))


def pinned(spans: Any = PINS) -> set[int]:
    return {position for span in spans for position in range(*span)}


def holds(cache: Any, spans: Any = PINS) -> bool:
    return all(pinned(spans) <= set(head) for head in kept_positions(cache))


def policies(name: str) -> tuple[Any, Any]:
    """Without sinks, for pins in their place, and with."""
    return tuple(make_policy(name, sink=sink, recent=8) for sink in (0, 5))


@pytest.mark.parametrize(
    ("policy", "chunk"),
    [
        ("salient", 20),
        *(pytest.param(name, 1, marks=SLOW) for name in ("salient", "h2o", "keydiff")),
        *(pytest.param(name, 20, marks=SLOW) for name in ("h2o", "keydiff")),
    ],
)
def test_positions_without_gaps(policy, chunk):
    """Pinned first tokens are seen where sinks are, and later pins stay."""
    layer = TinyLayer()
    outs = []
    for given, spans in zip(policies(policy), ([(0, 5)], []), strict=True):
        rope = Rope(8, 10000.0)
        settings = CacheSettings(max_size=24, policy=given, remainder=False, rope=rope, pins=spans)
        cache = H2OKVCache.of(settings)
        outs.append(layer.feed(cache, 120, chunk))
        assert cache.evicted >= 90
    assert mx.allclose(*outs, rtol=1e-4, atol=1e-5)
    cache = H2OKVCache.of(CacheSettings(max_size=32, remainder=False, rope=rope, pins=PINS))
    layer.feed(cache, 100, 20)
    assert cache.pin([(98, 99)])
    layer.feed(cache, 80, chunk)
    assert holds(cache, (*PINS, (98, 99)))


@pytest.mark.parametrize("name", ["gemma3n", "gemma4_text"])
def test_layers_that_attend_to_anothers_keys(name, tmp_path):
    model = coverage_model(name)
    cache = make_prompt_cache(model, max_size=40, policy="h2o:recent=8", pins=PINS)
    assert any(isinstance(entry, SharedKVCache) for entry in cache)
    prefill(model, cache, prompt_tokens(100), 25)
    answer = mlx_h2o.pin(cache, [(98, 100)])
    assert answer
    mlx_h2o.save_prompt_cache(tmp_path / "shared", cache)
    for one in (cache, mlx_h2o.load_prompt_cache(tmp_path / "shared")):
        prefill(model, one, prompt_tokens(60, seed=2), 1)
        bounded = [entry for entry in one if isinstance(entry, BoundedKVCache)]
        assert all(entry.evicted > 100 for entry in bounded)
        assert all(holds(entry, (*PINS, (98, 100))) for entry in bounded)


@pytest.mark.parametrize("policy", ["salient", "h2o", "keydiff"])
@pytest.mark.parametrize("bits", [16, pytest.param(8, marks=SLOW)])
def test_compressed_prompts(policy, bits):
    """What no query would look at again is kept where it is pinned, now and later."""
    model, tokens = tiny_model("llama", head_dim=32), mx.array([prompt_tokens(90)])
    settings: dict[str, Any] = {"policy": f"{policy}:recent=4", "bits": bits, "group_size": 32}
    if bits == 16:
        del settings["group_size"]
    spans = [(10, 16), (40, 43), (95, 97)]

    def compressed(size: str, **more: Any) -> list[Any]:
        return mlx_h2o.compress_prompt(model, Characters(), tokens, size, **settings, **more)

    cache = compressed("60%", room=8, pins=spans)
    plain = compressed("60%", room=8)
    assert all(entry.pins == tuple(spans) for entry in cache)
    assert all(holds(entry, spans[:2]) for entry in cache)
    assert not all(holds(entry, spans[:2]) for entry in plain)
    assert sum(entry.nbytes for entry in cache) <= sum(entry.nbytes for entry in plain) * 1.05
    for entry, other in zip(cache, plain, strict=True):
        if "slots.scores" in entry.arrays():  # a pin changes what is kept, not what it received
            _same_scores(entry, other)
    prefill(model, cache, prompt_tokens(80, seed=3), 1)
    assert all(holds(entry, spans) for entry in cache)
    with pytest.raises(ValueError, match="56 pinned tokens are too many"):
        compressed("30%", pins=[(0, 60)])


def _scores(cache: Any) -> list[dict[int, float]]:
    return [
        dict(zip(np.array(slots.positions[0, h]).tolist(), scores, strict=True))
        for run in cache.store.runs
        for slots in [cache.slots(run)]
        for h, scores in enumerate(np.array(slots.scores[0]).tolist())
    ]


def _same_scores(cache: Any, other: Any) -> None:
    for ours, theirs in zip(_scores(cache), _scores(other), strict=True):
        both = ours.keys() & theirs.keys()
        assert both
        assert all(np.isclose(ours[p], theirs[p], rtol=1e-4, atol=1e-6) for p in both)


@pytest.mark.parametrize("store", [{}, {"bits": 4, "group_size": 32, "recent_bits": 8}])
def test_a_batch_whose_sequences_pin_different_tokens(store):
    """Each as alone, when one of them meets a pin that was still to come too."""
    layers = [TinyLayer(key_width=32, value_width=32, seed=seed) for seed in range(3)]
    spans = [PINS, ((3, 9),), ()]
    alone = []
    for layer, own in zip(layers, spans, strict=True):
        cache = H2OKVCache(40, policy=make_policy("salient", recent=8), **store)
        cache.pin(own) if own else None
        layer.feed(cache, 60, 20)
        alone.append(cache)
    batch = BatchH2OKVCache.merge([copy.deepcopy(cache) for cache in alone])
    for first in range(60, 120):
        parts = [layer.at(first) for layer in layers]
        q, k, v = (mx.concatenate([part[i] for part in parts]) for i in range(3))
        keys, values = batch.update_and_fetch(k, v)
        out = batch.attend(q, keys, values, scale=layers[0].scale, mask=None)
        for i, (layer, cache) in enumerate(zip(layers, alone, strict=True)):
            assert mx.array_equal(out[i : i + 1], layer.feed(cache, 1)), first
    for i, own in enumerate(spans):
        assert holds(batch.extract(i), own)
        assert batch.extract(i).pins == own


@pytest.mark.parametrize("budgets", [[40, [30, 60]], lambda layer, heads: 36 + 10 * layer])
def test_slots_that_the_caller_gives_each_layer(budgets):
    model = coverage_model("qwen3")
    cache = make_prompt_cache(model, budgets=budgets, policy="salient:recent=8", pins=PINS)
    plain = make_prompt_cache(model, budgets=budgets, policy="salient:recent=8")
    prefill(model, cache, prompt_tokens(150), 30)
    assert all(holds(entry) for entry in cache)
    given = [sum(entry.budgets) for entry in plain]
    assert [sum(entry.budgets) for entry in cache] == given
    with pytest.raises(ValueError, match="pinned tokens are too many"):
        make_prompt_cache(model, budgets=[20, 80], policy="salient:recent=8", pins=[(0, 30)])


def test_a_profile_leaves_every_layer_room_for_its_pins():
    """A layer that deserves few slots gets those that its pins need; the mean stays."""
    model, _ = mlx_h2o.load("builtin:recall-4m")
    spans, size = [(0, 2), (20, 28)], {"max_size": 40, "bits": 5}

    def final(**pins: Any) -> list[tuple[int, ...]]:
        cache = make_prompt_cache(model, **size, **pins)
        return [entry.settings.filling[-1].budgets for entry in cache]

    needed = 4 + 8 + 4 + 1  # sinks, pins, recent and one to evict
    assert max(final()[0]) < needed
    assert min(map(min, final(pins=spans))) >= needed
    assert sum(map(sum, final(pins=spans))) == sum(map(sum, final()))
    with pytest.raises(ValueError, match="38 pinned tokens are too many"):
        make_prompt_cache(model, **size, pins=[(4, 42)])


def test_a_layer_takes_slots_of_others_for_pins_that_come_later():
    """In a running conversation, before and after its slots are shared out anew."""
    model, _ = mlx_h2o.load("builtin:recall-4m")
    cache = make_prompt_cache(model, max_size=40, bits=5)
    prefill(model, cache, prompt_tokens(30), 30)

    def slots() -> list[list[tuple[int, ...]]]:
        return [
            [entry.settings.budgets, *(stage.budgets for stage in entry.settings.filling)]
            for entry in cache
        ]

    before = slots()
    assert min(min(of_layer[-1]) for of_layer in before) < 4 + 8 + 4 + 1
    with pytest.raises(ValueError, match="40 pinned tokens are too many"):
        mlx_h2o.pin(cache, [(4, 44)])
    assert slots() == before
    assert mlx_h2o.pin(cache, [(20, 28)])
    for stage_before, stage in zip(
        zip(*before, strict=True), zip(*slots(), strict=True), strict=True
    ):
        assert sum(map(sum, stage)) == sum(map(sum, stage_before))
        assert min(map(min, stage)) >= 4 + 8 + 4 + 1
    prefill(model, cache, prompt_tokens(170, seed=2), 1)
    assert all(entry.evicted > 100 for entry in cache)
    assert all(holds(entry, [(20, 28)]) for entry in cache)
