"""Slots in reserved ranges: the same numbers as slots that grow by copies, and memory by pages."""

import copy
import pickle
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import H2OKVCache
from mlx_h2o.slots import reserved_range
from mlx_h2o.slots.paged_slots import PagedSlotStore
from mlx_h2o.slots.reserved_range import bytes_held
from mlx_h2o.slots.slot_store import GROWTH_STEP

pytestmark = pytest.mark.skipif(
    not reserved_range.is_available() or mx.default_device() != mx.Device(mx.cpu),
    reason="slots lie in ranges where the CPU's kernels compute",
)
H, WIDTH, BUDGET = 2, 64, 3 * GROWTH_STEP
PAGE = reserved_range.page_size()


@pytest.fixture(scope="module")
def rows():
    mx.random.seed(5)
    drawn = [mx.random.normal((1, heads, 2 * BUDGET, WIDTH)) for heads in (2 * H, H, H)]
    mx.eval(drawn)
    return drawn


def attend(cache, rows, first, count):
    """The output of some tokens: read at once, or one after the other."""
    q, k, v = (x[:, :, first : first + count] for x in rows)
    kept = cache.update_and_fetch(k, v)
    mask = None if count == 1 else "causal"
    out = cache.attend(q, *kept, scale=WIDTH**-0.5, mask=mask)
    mx.eval(out, list(cache.arrays().values()) if count > 1 else [])
    return np.array(out)


def decoded(cache, rows, first, count):
    return [attend(cache, rows, first + i, 1) for i in range(count)]


def begun(rows, tokens=300, budget=BUDGET, **settings):
    cache = H2OKVCache(budget, **settings)
    attend(cache, rows, 0, tokens)
    return cache


def addresses(cache):
    """Where a layer's keys and values lie."""
    fields = cache.layer.store.fields
    return [np.array(fields[n], copy=False).ctypes.data for n in ("keys", "values")]


def a_life(rows, **settings):
    """The outputs of everything that a conversation does to its slots."""
    cache = begun(rows, **settings)
    outs = decoded(cache, rows, 300, 30)
    outs.append(attend(cache, rows, 330, 300))
    outs += decoded(cache, rows, 630, 5)
    cache.resize(BUDGET // 3)
    outs += decoded(cache, rows, 635, 5)
    other = copy.deepcopy(cache)
    cache.resize(BUDGET + 100)
    outs += decoded(cache, rows, 640, 20)
    outs += decoded(other, rows, 640, 5)
    outs.append(attend(other, rows, 645, BUDGET))
    outs += decoded(copy.deepcopy(other), rows, 645 + BUDGET, 3)
    outs += decoded(other, rows, 645 + BUDGET, 3)
    return outs


@pytest.mark.parametrize(
    "settings", [{}, {"policy": "h2o"}, {"policy": "streaming"}, {"bits": 8}], ids=str
)
def test_outputs_are_those_of_slots_that_grow_by_copies(rows, settings, monkeypatch):
    monkeypatch.setattr(reserved_range, "FEWEST_BYTES", 0)
    in_range = a_life(rows, **settings)
    monkeypatch.setattr(reserved_range, "FEWEST_BYTES", 1 << 60)
    by_copies = a_life(rows, **settings)
    for ours, theirs in zip(in_range, by_copies, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_growth_moves_nothing(rows):
    cache = begun(rows, tokens=10)
    before = addresses(cache)
    decoded(cache, rows, 10, GROWTH_STEP)
    attend(cache, rows, 10 + GROWTH_STEP, 2 * GROWTH_STEP)  # evicts
    decoded(cache, rows, 10 + 3 * GROWTH_STEP, 10)
    assert addresses(cache) == before


def test_a_decoder_keeps_the_slots_while_they_grow(rows):
    cache = begun(rows, tokens=GROWTH_STEP - 2)
    decoded(cache, rows, GROWTH_STEP - 2, 1)
    decoder = cache.layer.decoder
    decoded(cache, rows, GROWTH_STEP - 1, 10)
    assert decoder is not None
    assert cache.layer.decoder is decoder


def test_what_is_told_is_what_the_pages_take(rows):
    before = bytes_held()
    cache = begun(rows, tokens=100)
    for count in (1, 60, 300):
        decoded(cache, rows, cache.offset, count)
        held = bytes_held() - before
        slots = cache.layer.layout.nbytes
        assert slots <= held <= slots + 8 * PAGE
    assert cache.nbytes < 1.1 * cache.layer.layout.capacity * 461 / BUDGET


def test_a_smaller_budget_gives_pages_back_at_once(rows):
    before = bytes_held()
    cache = begun(rows, tokens=BUDGET)
    full, where = bytes_held() - before, addresses(cache)
    assert full > 2 * H * BUDGET * WIDTH * 4
    cache.resize(BUDGET // 8)
    mx.eval(list(cache.arrays().values()))
    left = bytes_held() - before
    assert left < full / 8 + 16 * PAGE
    assert left <= cache.layer.store.nbytes + 8 * PAGE
    assert addresses(cache) == where  # no second copy was made


def test_copies_share_pages_until_one_writes(rows):
    before = bytes_held()
    cache = begun(rows, tokens=BUDGET - 100)
    whole = bytes_held() - before
    copies = [copy.deepcopy(cache) for _ in range(8)]
    outs = [decoded(each, rows, BUDGET - 100, 20) for each in copies]
    beyond = bytes_held() - before
    assert beyond < whole  # eight copies would be eight times as much
    expected = decoded(begun(rows, tokens=BUDGET - 100), rows, BUDGET - 100, 20)
    np.testing.assert_array_equal(outs, [expected] * 8)


def test_copies_stay_as_they_were_when_the_first_goes_on(rows):
    at = BUDGET - 50
    cache = begun(rows, tokens=at)
    early = copy.deepcopy(cache)
    first = decoded(early, rows, at, 1)  # now pages are shared, and the first is alone with its own
    where = addresses(cache)
    outs = decoded(cache, rows, at, 100)  # evicts, and overwrites what was shared
    assert addresses(cache) == where
    late = copy.deepcopy(cache)
    np.testing.assert_array_equal(first + decoded(early, rows, at + 1, 99), outs)
    np.testing.assert_array_equal(
        decoded(late, rows, at + 100, 5), decoded(cache, rows, at + 100, 5)
    )


def test_memory_is_given_back_when_a_conversation_ends(rows):
    before = bytes_held()
    cache = begun(rows)
    other = copy.deepcopy(cache)
    decoded(other, rows, 300, 2)
    assert bytes_held() > before
    del cache, other
    assert bytes_held() == before


def test_a_system_without_addresses_is_told_of_once(rows, monkeypatch):
    """Then slots grow by copies."""
    monkeypatch.setattr(reserved_range, "_extension", lambda: Refusing())
    with pytest.warns(RuntimeWarning, match="grow by copies") as told:
        cache = begun(rows)
    assert len(told) == 1
    outs = decoded(cache, rows, 300, 2)
    monkeypatch.undo()
    assert cache.layer.layout.nbytes == cache.layer.layout.capacity
    np.testing.assert_array_equal(outs, decoded(begun(rows), rows, 300, 2))


class Refusing:
    """An extension on a system that refuses every range."""

    def reserved(self, shapes, dtypes):
        raise RuntimeError("no addresses")

    def ranges_fit_mlx(self):
        return True


def test_too_many_addresses_are_refused_by_the_system():
    with pytest.warns(RuntimeWarning, match="refuses to reserve"):
        assert reserved_range.zeros({"keys": ((1, 2**30, 2**20), mx.float32)}) is None


def test_small_stores_take_no_range():
    store = PagedSlotStore([16])
    row = mx.zeros((1, 1, 1, 8))
    store.append({"keys": row, "values": row, "positions": mx.zeros((1, 1, 1), mx.int32)})
    assert store.nbytes == store.capacity == 16 * (2 * 8 * 4 + 2)


def test_positions_become_wider_within_a_range(rows):
    cache = begun(rows)
    store = cache.layer.store
    before = np.array(store.view(store.runs[0], "positions"))
    store.fit_positions(1 << 20)
    assert store.fields["positions"].dtype == mx.int32
    np.testing.assert_array_equal(np.array(store.view(store.runs[0], "positions")), before)
    assert not reserved_range.is_elsewhere(store.fields["positions"])


def test_a_pickled_conversation_and_a_state_go_on_outside_of_a_range(rows):
    cache = begun(rows)
    pickled, restored = pickle.loads(pickle.dumps(cache)), H2OKVCache.from_state(cache.state)
    outs = [decoded(one, rows, 300, 5) for one in (cache, pickled, restored)]
    np.testing.assert_array_equal(outs[1:], outs[:1] * 2)
    assert pickled.nbytes >= cache.nbytes


def shared_bytes():
    """Bytes of the files in memory that copies share."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if "mlx_h2o" in str(link.readlink()):
                total += link.stat().st_blocks * 512
        except OSError:  # the folder's own
            continue
    return total


def test_what_copies_shared_goes_with_what_the_last_one_overwrites(rows):
    before = bytes_held()
    cache = begun(rows, tokens=BUDGET)
    whole = bytes_held() - before
    last = copy.deepcopy(cache)
    decoded(last, rows, BUDGET, 2)
    assert shared_bytes() > 0.9 * whole
    del cache
    decoded(last, rows, BUDGET + 2, BUDGET - 70)
    assert bytes_held() - before + shared_bytes() < 1.15 * whole
    assert bytes_held() - before > 0.5 * whole  # much was overwritten
    del last
    assert bytes_held() == before
    assert shared_bytes() == 0


def test_mlx_itself_never_writes_to_a_range():
    """If it did, `put_rows` could go (docs/how-it-works/index.md, memory by pages)."""
    active = mx.get_active_memory()
    fields = reserved_range.zeros({"keys": ((1, 1024, 64), mx.float32)})
    assert mx.get_active_memory() == active
    rows, at = mx.ones((1, 1, 64)), mx.array([[5]])
    fields = reserved_range.put_rows(fields, at, {"keys": rows})
    mx.eval(fields["keys"])
    assert not reserved_range.is_elsewhere(fields["keys"])
    mx.clear_cache()
    assert fields["keys"].sum().item() == 64
    fields["keys"] = mx.slice_update(fields["keys"], rows, mx.array([6]), [1])
    mx.eval(fields["keys"])
    assert reserved_range.is_elsewhere(fields["keys"])
    assert fields["keys"].sum().item() == 128


@pytest.mark.parametrize(
    "wrong",
    [
        {"index": mx.zeros((3, 1), mx.int32)},
        {"rows": {"keys": mx.zeros((1, 2, 4))}},
        {"unused": [(4, 9)]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_does_not_fit_is_refused(wrong):
    fields = reserved_range.zeros({"keys": ((1, 8, 4), mx.float32)})
    call = {"index": mx.zeros((1, 1), mx.int32), "rows": {"keys": mx.zeros((1, 1, 4))}} | wrong
    with pytest.raises(ValueError, match=r"index must|Rows must|Unused slots"):
        reserved_range.put_rows(fields, **call)
