"""Choosing slots: the lowest priority goes, ties to the oldest position, the protected never."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mlx_h2o.policies.selection import evictable_slots, select_kept, select_victims

SLOTS = st.integers(2, 12)
few = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def choices(draw: st.DrawFn, unit: str = "head") -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """priority, positions, evictable `[1, H, N]`, and how many may be chosen.

    Priorities come from a handful of values, NaN and infinities among them, so that ties abound;
    positions lie in any slot order, for a layer in the same one in all heads.
    """
    heads, N = draw(st.integers(1, 3)), draw(SLOTS)
    values = [-2.5, 0.0, 0.25, 1e30, float("inf"), float("-inf"), float("nan")]
    if unit == "layer":
        values = values[:3]  # the mean of infinities says nothing
    priority = draw(hnp.arrays(np.float32, (1, heads, N), elements=st.sampled_from(values)))
    orders = [draw(st.permutations(range(N))) for _ in range(heads)]
    free = [draw(st.lists(st.booleans(), min_size=N, max_size=N)) for _ in range(heads)]
    if unit == "layer":
        orders, free = [orders[0]] * heads, [free[0]] * heads
    for of_head in free:
        of_head[draw(st.integers(0, N - 1)) if unit == "head" else 0] = True
    # Positions with gaps, as after evictions.
    positions = 3 * np.array([orders], dtype=np.int32) + 2
    evictable = np.array([free])
    return priority, positions, evictable, draw(st.integers(1, int(evictable.sum(-1).min())))


def worst_first(
    priority: np.ndarray, positions: np.ndarray, evictable: np.ndarray
) -> list[tuple[float, int, int]]:
    """One head's evictable slots as (priority, position, slot), sorted; NaN is below everything."""
    return sorted(
        (-np.inf if np.isnan(p) else min(float(p), float(np.finfo(np.float32).max)), position, slot)
        for slot, (p, position, may_go) in enumerate(
            zip(priority.tolist(), positions.tolist(), evictable.tolist(), strict=True)
        )
        if may_go
    )


def of_plain_arrays(select: Callable[..., mx.array]) -> Callable[..., np.ndarray]:
    """A choice of slots `[B, H, count]` from priority, positions and evictable in numpy."""

    def chosen(*case: Any) -> np.ndarray:
        *arrays, count, unit = case
        return np.array(select(*map(mx.array, arrays), count, unit))

    return chosen


victims, kept = of_plain_arrays(select_victims), of_plain_arrays(select_kept)


@few
@given(choices())
def test_the_lowest_priorities_go(case):
    """Victims are the first of the evictable by priority, then position; NaN before all else."""
    priority, positions, evictable, count = case
    chosen = victims(*case, "head")
    assert chosen.shape == (1, priority.shape[1], count)
    for h in range(priority.shape[1]):
        expected = worst_first(priority[0, h], positions[0, h], evictable[0, h])[:count]
        assert chosen[0, h].tolist() == [slot for _, _, slot in expected]


@few
@given(choices())
def test_the_protected_and_the_highest_are_kept(case):
    """What is kept is all but the worst, protected slots included, in order of position."""
    priority, positions, evictable, dropped = case
    _, H, N = priority.shape
    chosen = kept(priority, positions, evictable, N - dropped, "head")
    for h in range(H):
        worst = worst_first(priority[0, h], positions[0, h], evictable[0, h])[:dropped]
        expected = set(range(N)) - {slot for _, _, slot in worst}
        assert set(chosen[0, h].tolist()) == expected
        assert np.all(np.diff(positions[0, h, chosen[0, h]]) > 0)


@few
@given(choices())
def test_keeping_and_evicting_complement_each_other(case):
    """The slots to free and the slots to keep are one partition, by either function."""
    priority, positions, evictable, count = case
    gone = victims(*case, "head")
    stay = kept(priority, positions, evictable, priority.shape[2] - count, "head")
    for h in range(priority.shape[1]):
        assert sorted([*gone[0, h], *stay[0, h]]) == list(range(priority.shape[2]))


@few
@given(choices(), st.booleans())
def test_several_at_once_are_the_same_one_by_one(case, layer):
    """`count` victims are what `count` single choices would be, in that order."""
    priority, positions, evictable, count = case
    if layer:
        priority = np.nan_to_num(priority, nan=-1, posinf=2, neginf=-2)
        positions, evictable = (np.repeat(x[:, :1], x.shape[1], 1) for x in (positions, evictable))
        count = min(count, int(evictable[0, 0].sum()))
    unit = "layer" if layer else "head"
    together = victims(priority, positions, evictable, count, unit)
    left = evictable.copy()
    for i in range(count):
        one = victims(priority, positions, left, 1, unit)
        assert one.tolist() == together[..., i : i + 1].tolist()
        np.put_along_axis(left, one, False, axis=-1)


@few
@given(choices(), st.randoms(use_true_random=False), st.sampled_from([1, 2]))
def test_the_order_of_slots_means_nothing(case, random, least):
    """The same positions are chosen and kept however the slots are permuted."""
    priority, positions, evictable, count = case
    count = min(max(count, least), int(evictable.sum(-1).min()))
    order = list(range(priority.shape[2]))
    random.shuffle(order)
    moved = tuple(x[..., order] for x in (priority, positions, evictable))
    N = priority.shape[2]
    for select, size in ((victims, count), (kept, N - count)):
        before = select(priority, positions, evictable, size, "head")
        after = select(*moved, size, "head")
        np.testing.assert_array_equal(
            np.take_along_axis(positions, before, -1), np.take_along_axis(moved[1], after, -1)
        )


@few
@given(choices("layer"))
def test_a_layer_drops_the_same_tokens_in_all_heads(case):
    """With unit "layer" the heads' mean priority decides for all of them."""
    priority, positions, evictable, count = case
    mean = priority.astype(np.float64).mean(axis=1)[0]
    expected = [s for _, _, s in worst_first(mean, positions[0, 0], evictable[0, 0])[:count]]
    N = priority.shape[2]
    for of_head in victims(*case, "layer")[0]:
        assert of_head.tolist() == expected
    for of_head in kept(priority, positions, evictable, N - count, "layer")[0]:
        assert set(of_head.tolist()) == set(range(N)) - set(expected)


def test_a_layer_differs_from_its_heads():
    """Heads that disagree choose for themselves, or by their mean."""
    priority = np.array([[[0.0, 3.0, 2.0], [5.0, 0.0, 2.0]]], dtype=np.float32)
    positions = np.array([[[0, 1, 2], [0, 1, 2]]], dtype=np.int32)
    free = np.ones((1, 2, 3), dtype=bool)
    assert victims(priority, positions, free, 1, "head").tolist() == [[[0], [1]]]
    assert victims(priority, positions, free, 1, "layer").tolist() == [[[1], [1]]]


def test_sequences_of_a_batch_choose_for_themselves():
    """Nothing leaks from one sequence's priorities into another's choice, in layers neither."""
    priority = np.array([[[0, 1, 2, 3]], [[3, 2, 1, 0]]], dtype=np.float32)
    positions = np.broadcast_to(np.arange(4, dtype=np.int32), (2, 1, 4))
    free = np.ones((2, 1, 4), dtype=bool)
    for unit in ("head", "layer"):
        assert victims(priority, positions, free, 2, unit).tolist() == [[[0, 1]], [[3, 2]]]
        assert kept(priority, positions, free, 2, unit).tolist() == [[[2, 3]], [[0, 1]]]


@pytest.mark.parametrize("count", [1, 2])
def test_ties_go_to_the_oldest(count):
    """Among equals the lowest position goes, wherever its slot lies."""
    positions = np.array([[[7, 3, 9, 4]]], dtype=np.int32)
    same = np.zeros((1, 1, 4), dtype=np.float32)
    chosen = victims(same, positions, np.ones((1, 1, 4), dtype=bool), count, "head")
    assert positions[0, 0, chosen[0, 0]].tolist() == [3, 4][:count]


@pytest.mark.parametrize("count", [1, 2])
def test_a_protected_slot_never_ties_with_an_infinite_priority(count):
    """An unprotected slot goes even if nothing could be worth more, and older protected stay."""
    priority = np.full((1, 1, 4), np.inf, dtype=np.float32)
    positions = np.array([[[0, 1, 2, 3]]], dtype=np.int32)
    free = np.array([[[False, False, True, True]]])
    assert victims(priority, positions, free, count, "head")[0, 0].tolist() == [2, 3][:count]
    assert (
        kept(priority, positions, free, 4 - count, "head")[0, 0].tolist() == [0, 1, 3][: 4 - count]
    )


@pytest.mark.parametrize("count", [1, 2])
def test_a_nan_goes_first(count):
    """A slot whose priority is no number goes before the lowest number."""
    priority = np.array([[[-1e30, 0.0, float("nan"), 5.0]]], dtype=np.float32)
    positions = np.array([[[0, 1, 2, 3]]], dtype=np.int32)
    free = np.ones((1, 1, 4), dtype=bool)
    assert victims(priority, positions, free, count, "head")[0, 0].tolist() == [2, 0][:count]
    assert kept(priority, positions, free, 3, "head")[0, 0].tolist() == [0, 1, 3]


def test_a_nan_goes_first_from_a_layer():
    """One head's NaN outweighs whatever the others say, an infinity too."""
    priority = np.array([[[np.nan, 1, 2], [np.inf, 1, 2]]], dtype=np.float32)
    positions = np.broadcast_to(np.arange(3, dtype=np.int32), (1, 2, 3))
    free = np.ones((1, 2, 3), dtype=bool)
    for count in (1, 2):
        chosen = victims(priority, positions, free, count, "layer")
        assert chosen.tolist() == [[[0, 1][:count]] * 2]


@pytest.mark.parametrize("sink", [0, 1, 4])
@pytest.mark.parametrize("recent", [0, 1, 5])
def test_sinks_and_recent_tokens_may_not_go(sink, recent):
    """Exactly the first `sink` and the last `recent` logical positions are protected."""
    positions = np.array([[[19, 2, 14, 0, 3, 18, 4, 15]]], dtype=np.int32)
    offset = 20  # the newest token is at 19
    free = np.array(evictable_slots(mx.array(positions), offset, sink, recent))
    newest = list(range(offset))[offset - recent :]
    protected = {*range(sink), *newest}
    assert free[0, 0].tolist() == [p not in protected for p in positions[0, 0].tolist()]
