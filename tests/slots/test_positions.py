"""Positions of slots: 16 bits while a conversation has no more of them, and bytes that hold."""

from contextlib import nullcontext
from functools import cache
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from mlx_h2o import H2OKVCache
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.budgets import cost, growth
from mlx_h2o.layer.layer import Layer
from mlx_h2o.serve.memory import most_bytes
from mlx_h2o.slots import slot_store
from mlx_h2o.slots.packed import value_lengths
from mlx_h2o.slots.slot_store import FEW, NARROW, WIDE, position_dtype
from tiny_models import TinyLayer

STORES = {
    "dense": {},
    "packed": {"bits": 4, "group_size": 32},
    "recent wider": {"bits": 4, "recent_bits": 8, "group_size": 32},
}
CHUNK = 4096
#: Tokens after which positions get wide in tests of what happens then: 32,768 take seconds to read.
SOON = 2000


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (slot_store, cost, growth):
        monkeypatch.setattr(module, "FEW", SOON)


@cache
def layer() -> TinyLayer:
    """With a few more tokens than 16 bits have positions for."""
    return TinyLayer(heads=2, group=1, key_width=32, value_width=32, length=FEW + 40)


def fed(tokens: int, **settings) -> H2OKVCache:
    held = H2OKVCache(policy="salient", **settings)
    layer().feed(held, tokens, CHUNK)
    return held


def dtype_of(held: H2OKVCache) -> mx.Dtype:
    return held.arrays()["slots.positions"].dtype


def assert_alike(held: H2OKVCache, other: H2OKVCache) -> None:
    arrays, others = held.arrays(), other.arrays()
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        assert mx.array_equal(array.astype(mx.float32), others[name].astype(mx.float32)), name


def test_as_many_tokens_as_16_bits_have_positions_for():
    assert position_dtype(FEW) == NARROW
    assert position_dtype(FEW + 1) == WIDE
    # The newest one's position, and its complement where it is pinned.
    assert mx.iinfo(NARROW).max == FEW - 1
    assert mx.iinfo(NARROW).min == -1 - (FEW - 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(nullcontext, nullcontext, id="kernels"),
        # The reference takes a prompt of 32,000 tokens slowly.
        pytest.param(nullcontext, only_reference, id="reference after kernels"),
        pytest.param(only_reference, only_reference, id="reference", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kept", STORES)
def test_narrow_positions_are_the_same_as_wide_ones(kept, before, after):
    """Token by token up to where 16 bits end, and beyond."""
    settings = {"budgets": [24, 31], **STORES[kept]}
    with before():
        held = fed(FEW - 20, **settings)
        with patch.object(slot_store, "position_dtype", return_value=WIDE):
            twin = fed(FEW - 20, **settings)
    with after():
        with patch.object(slot_store, "position_dtype", return_value=WIDE):
            wide = layer().feed(twin, 40)
        assert (dtype_of(held), dtype_of(twin)) == (NARROW, WIDE)
        narrow = layer().feed(held, 20)
        assert dtype_of(held) == NARROW
        beyond = layer().feed(held, 20)
        assert dtype_of(held) == WIDE
    assert mx.array_equal(mx.concatenate([narrow, beyond], axis=2), wide)
    assert_alike(held, twin)
    stored = np.array(held.arrays()["slots.positions"])
    assert FEW <= stored.max() < FEW + 20


@pytest.mark.usefixtures("soon")
def test_a_chunk_may_bring_both():
    held = fed(SOON - 10, budgets=[24, 31])
    layer().feed(held, 30, 30)
    assert dtype_of(held) == WIDE
    newest = [held.slots(run).positions.max().item() for run in held.store.runs]
    assert newest == [SOON + 19] * 2


@pytest.mark.usefixtures("soon")
def test_steps_taken_back_take_the_width_back():
    held, before = (fed(SOON - 2, budgets=[24, 31], undo=6) for _ in range(2))
    layer().feed(held, 5)
    assert dtype_of(held) == WIDE
    held.trim(5)
    assert dtype_of(held) == NARROW
    for name in ("slots.positions", "slots.scores", "slots.keys"):
        assert mx.array_equal(held.arrays()[name], before.arrays()[name]), name
    assert mx.array_equal(layer().feed(held, 8), layer().feed(before, 8))
    assert_alike(held, before)


@pytest.mark.usefixtures("soon")
def test_pins_stay_pinned():
    held = fed(SOON - 4, budgets=[24, 31])
    kept = {p for run in held.store.runs for p in held.slots(run).positions[0].flatten().tolist()}
    wanted = [*sorted(kept)[len(kept) // 2 :][:3], SOON - 1]
    mlx_h2o.pin([held], [(p, p + 1) for p in wanted])
    layer().feed(held, 4)
    assert dtype_of(held) == NARROW
    narrow = np.array(held.arrays()["slots.positions"])
    layer().feed(held, 30)
    stored = np.array(held.arrays()["slots.positions"])
    assert set(narrow[narrow < 0]) == set(stored[stored < 0])
    assert -1 - (SOON - 1) in stored


@pytest.mark.usefixtures("soon")
def test_files_have_what_serves():
    held = fed(SOON - 4, budgets=[24, 31])
    arrays, config = held.state
    loaded = H2OKVCache.from_state((arrays, config))
    assert dtype_of(loaded) == NARROW
    for each in (held, loaded):
        layer().feed(each, 12)
    assert_alike(held, loaded)
    assert dtype_of(H2OKVCache.from_state(held.state)) == WIDE
    for damaged in (mx.int8, mx.uint16, mx.float32):
        hurt = arrays | {"slots.positions": arrays["slots.positions"].astype(damaged)}
        with pytest.raises(ValueError, match=r"slots\.positions must be"):
            H2OKVCache.from_state((hurt, config))


@pytest.mark.usefixtures("soon")
@pytest.mark.pairwise
@pytest.mark.parametrize("max_bytes", [60_000, 90_001])
@pytest.mark.parametrize("undo", [0, 3])
@pytest.mark.parametrize("kept", STORES)
def test_bytes_hold_before_and_after(kept, undo, max_bytes):
    """More slots while positions take 2 bytes; steps to undo leave no room for another budget."""
    held = H2OKVCache(max_bytes=max_bytes, policy="salient", undo=undo, **STORES[kept])
    layer().feed(held, 1000, 500)
    layer().feed(held, 10)
    before = held.budgets
    assert 0.8 * max_bytes < held.nbytes <= max_bytes
    layer().feed(held, SOON - 1010 - 6, CHUNK)
    layer().feed(held, 3)
    for _ in range(9):
        layer().feed(held, 1)
        assert 0.8 * max_bytes < held.nbytes <= max_bytes
    fewer = [a - b for a, b in zip(before, held.budgets, strict=True)]
    assert (min(fewer) > 0) == (not undo)


@pytest.mark.usefixtures("soon")
def test_a_size_in_slots_keeps_its_meaning():
    held = fed(SOON + 10, max_size=64)
    assert held.settings.filling == ()
    assert held.size() == max(held.budgets) == fed(100, max_size=64).size()


@pytest.mark.parametrize("budgets", ["uniform", None], ids=["uniform", "profile"])
def test_a_model_s_caches_have_fewer_slots_from_there_on(budgets):
    model, _ = mlx_h2o.load("builtin:recall-4m")
    max_bytes = 400_000
    caches = mlx_h2o.make_prompt_cache(model, max_bytes=max_bytes, budgets=budgets)
    for entry in caches:
        *_, last = entry.settings.filling
        assert last.beyond == FEW
    assert 0.9 * max_bytes < most_bytes(caches) <= max_bytes
    mlx_h2o.resize(caches, max_bytes=max_bytes // 2)
    assert 0.45 * max_bytes < most_bytes(caches) <= max_bytes // 2


def test_bookkeeping_of_a_packed_slot_takes_6_bytes():
    held = fed(500, budgets=[64, 64], **STORES["packed"])
    arrays, slots = held.arrays(), 2 * 64
    rows = sum(a.nbytes for name, a in arrays.items() if name.startswith(("slots.keys", "slots.v")))
    beside = sum(a.nbytes for name, a in arrays.items() if name.startswith("slots.")) - rows
    assert beside == 6 * slots
    assert value_lengths(layer().tokens[2][:, :, :4]).dtype == mx.float16


def test_a_kernel_refuses_positions_that_do_not_fit():
    held = fed(FEW - 2, budgets=[24, 31])
    with patch.object(Layer, "fit_positions"):
        layer().feed(held, 2)
        with pytest.raises(ValueError, match="16 bits"):
            layer().feed(held, 1)
