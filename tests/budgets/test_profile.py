"""Profiles: what they say for each size and length, and what their files may hold."""

import json
from dataclasses import replace

import numpy as np
import pytest

import mlx_h2o
from mlx_h2o.budgets.allocation import capped, scaled
from mlx_h2o.budgets.json_arrays import as_text, of_text
from mlx_h2o.budgets.profile import ECHO_PART, RETURNING_PART, Measured, Profile, frames_for
from mlx_h2o.loading.identity import ModelIdentity

HEADS, GRID, SPANS = (2, 1), (12, 24, 48, 96), (24, 48, 96)


def measured(seed=0):
    rng = np.random.default_rng(seed)
    errors = np.sort(rng.exponential(size=(3, 2, 3, 4)), axis=-1)[..., ::-1].astype(np.float32)
    errors[:, :, :, 3] = 0
    errors[:, :, 0, 1:] = errors[:, :, 1, 2:] = 0
    frames = {
        context: tuple(context + rng.random((2, h, 8), np.float32) for h in HEADS)
        for context in (512, 1024)
    }
    packing = {bits: rng.random(3, np.float32) / 2**bits for bits in (4, 6)}
    return Measured((0.0, 4.0), SPANS, errors, packing, 64, frames, {"name": "salient"})


def profile(**changes):
    model = ModelIdentity("made-up", HEADS, (8, 8), 0, ())
    return Profile.of(model, GRID, measured(**changes), "by hand", {"length": 96})


def test_everything_measured_survives_saving(tmp_path):
    made = profile()
    made.save(tmp_path / "p.json")
    read = Profile.load(tmp_path / "p.json")
    assert read == made
    assert read != profile(seed=1)
    ours, theirs = (frames_for(one.measured.frames, 600) for one in (made, read))
    assert all(np.allclose(x, y, rtol=1e-3) for x, y in zip(ours, theirs, strict=True))


def test_the_better_order_counts_and_is_named():
    made = profile()
    errors = made.measured.errors_upto(96)
    for head, curve in enumerate([*made.losses[0], *made.losses[1]]):
        assert curve[0] == pytest.approx(errors[head, :, 0].min(), rel=1e-3)
    at_24 = made.saturation([[24, 20], [13]])
    wanted = [made.measured.orders[i] for i in errors[:, :, 1].argmin(axis=1)]
    assert [t for layer in at_24 for t in layer] == wanted


def test_errors_upto_a_span_are_those_of_its_positions():
    made = measured()
    assert np.allclose(made.errors_upto(24), made.errors[:, :, 0])
    assert np.allclose(made.errors_upto(48), made.errors[:, :, :2].mean(axis=2))
    whole = made.errors * np.array([24, 24, 48])[:, None]
    assert np.allclose(made.errors_upto(96), whole.sum(axis=2) / 96)


@pytest.mark.parametrize("mean", [14, 30, 40, 47, 70, 96, 500])
@pytest.mark.parametrize("length", [48, 96, 200, None])
def test_slots_are_shared_exactly_and_none_beyond_the_length(mean, length):
    """As many slots as there are, and no head has more than the conversation fills."""
    slots = [s for layer in profile().budgets(mean, length=length) for s in layer]
    assert sum(slots) == 3 * mean
    assert min(slots) >= 12
    if length is not None:
        assert max(slots) <= max(length, mean)


def with_echoes(*echoes):
    made = profile()
    heads = np.array(echoes, np.float32)
    return replace(made, measured=replace(made.measured, echoes=heads))


def test_what_echoes_lose_is_weighed_where_slots_are_shared_out(tmp_path):
    """A head that copies holds everything; what prose alone loses is told as before."""
    plain, made = profile(), with_echoes(0, 1e4, 0)
    (a, b), (c,) = made.budgets(47, length=96)
    assert b == 96
    assert (a, c) != (plain.budgets(47, length=96)[0][0], plain.budgets(47, length=96)[1][0])
    assert a + c == 3 * 47 - 96
    for length in (48, 96, 200):
        (grid, curves), (same, wanted) = made.curves_upto(length), made.wanted_upto(length)
        assert grid == same
        assert curves == plain.curves_upto(length)[1]
        assert [wanted[0], wanted[2]] == [curves[0], curves[2]]
        lost = [ECHO_PART * 1e4 * (1 - slots / grid[-1]) for slots in grid]
        assert np.allclose(np.subtract(wanted[1], curves[1]), lost)
    assert plain.wanted_upto(96) == plain.curves_upto(96)
    # With room for one head, what the others lose.
    added = with_echoes(1e4, 1e4, 1e4).loss_of(47, 12, None, 96)
    assert added > made.loss_of(47, 12, None, 96) > plain.loss_of(47, 12, None, 96)
    made.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == made != plain
    with pytest.raises(ValueError, match="echoes must be losses"):
        with_echoes(1, 2)


def test_frames_are_of_the_next_context_up_or_the_longest():
    frames = profile().measured.frames
    for context, serves in ((1, 512), (512, 512), (513, 1024), (9999, 1024)):
        assert frames_for(frames, context) is frames[serves]


def test_packing_adds_its_loss():
    made = profile()
    dense = made.loss_of(96, 12, None, 96)
    assert made.loss_of(96, 12, 4, 96) == pytest.approx(dense + made.measured.packing[4].sum())
    with pytest.raises(ValueError, match="3 bits"):
        made.loss_of(96, 12, 3, 96)


def test_version_1_has_no_frames_and_the_usual_saturation(tmp_path):
    made = profile()
    old = Profile(made.model, made.grid, made.losses, made.method)
    old.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["version"] == 1
    read = Profile.load(tmp_path / "p.json")
    assert read == old
    assert read.measured is None
    assert read.saturation([[12, 12], [12]]) == [[4.0, 4.0], [4.0]]
    assert read.budgets(30) == made.budgets(30)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(spans=[96, 48, 24]),
        lambda m: m.update(spans=[24, 96]),
        lambda m: m.update(orders=[0.0]),
        lambda m: m.update(orders=[0.0, -4.0]),
        lambda m: m.update(errors=as_text(-measured().errors)),
        lambda m: m["errors"].update(shape=[3, 2, 3, 2**40]),
        lambda m: m["errors"].update(dtype="complex64"),
        lambda m: m["errors"].update(data="AAAA"),
        lambda m: m["errors"].update(data=7),
        lambda m: m["packing"].update({"6": as_text(np.zeros(2))}),
        lambda m: m["frames"].update({"512": []}),
        lambda m: m["frames"].update({"512": [as_text(np.zeros((2, h, 8))) for h in HEADS]}),
        lambda m: m["frames"].update({"-1": m["frames"]["512"]}),
        lambda m: m.update(frames=None),
        lambda m: m.clear(),
    ],
)
def test_damaged_files_are_refused(change, tmp_path):
    profile().save(tmp_path / "p.json")
    data = json.loads((tmp_path / "p.json").read_text())
    change(data["measured"])
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"damaged|profile|spans|orders|context"):
        Profile.load(tmp_path / "p.json")


def test_numbers_are_the_same_in_text():
    numbers = np.array([[1.5, -2e4], [1e-6, 0]], np.float32)
    assert (of_text(as_text(numbers)) == numbers).all()
    assert np.allclose(of_text(as_text(numbers, "float16")), numbers, rtol=1e-3, atol=1e-7)
    assert (of_text(as_text(1e6 * numbers, "float16")) == 1e6 * numbers).all()


@pytest.mark.parametrize("seed", range(5))
def test_capping_and_scaling_keep_the_sum(seed):
    rng = np.random.default_rng(seed)
    slots = rng.integers(12, 400, size=7).tolist()
    most = int(sum(slots) / 7) + 5
    out = capped(slots, most)
    assert sum(out) == sum(slots)
    assert max(out) <= most
    assert all(a >= b for a, b in zip(out, slots, strict=True) if b <= most)
    total = int(rng.integers(7 * 12, 9000))
    grown = scaled(slots, total, 12)
    assert sum(grown) == total
    assert min(grown) >= 12


def test_the_shipped_profile_shares_out_what_swift_expects():
    """The same numbers stand in swift/Tests/MLXH2OTests/ModelTests.swift."""
    model, _ = mlx_h2o.load("builtin:recall-4m")
    cache = mlx_h2o.make_prompt_cache(model, max_size=96)
    slots = [entry.settings.filling[-1].budgets for entry in cache]
    assert slots == [(10, 10), (32, 32), (48, 32), (32, 556)]
    for size, bits, slots in (
        ("100%", 8, [(6880, 3440), (430, 860), (860, 1290), (6880, 6880)]),
        # More slots in 6 bits are not worth what those lose more.
        ("50%", 8, [(3433, 1716), (214, 429), (429, 643), (3432, 3432)]),
        ("25%", 6, [(2163, 1081), (135, 270), (270, 405), (2162, 2162)]),
        ("10%", 6, [(176, 768), (64, 96), (96, 64), (96, 2048)]),
    ):
        caches = mlx_h2o.make_prompt_cache(model, max_bytes=size, context=2048)
        assert {cache.packing.k_bits for cache in caches} == {bits}
        # In a long conversation; before that positions take less.
        assert [cache.settings.filling[-1].budgets for cache in caches] == slots
        means = [[sum(stage.budgets) for stage in cache.settings.filling] for cache in caches]
        assert sum(of_layer[-2] for of_layer in means) > sum(of_layer[-1] for of_layer in means)


def test_where_rows_return_the_retrieval_loss_counts_less():
    made = with_echoes(0, 20.0, 1.0)
    back = made.where_rows_return()
    assert back.retrieval_heads() == made.retrieval_heads()
    assert back.curves_upto(96) == made.curves_upto(96)
    (_, plain), (_, less), (_, all_of_it) = (
        made.curves_upto(96),
        back.wanted_upto(96),
        made.wanted_upto(96),
    )
    added, whole = np.subtract(less, plain), np.subtract(all_of_it, plain)
    assert np.allclose(added, RETURNING_PART * whole)
    assert added[1, 0] > 0
    assert profile().where_rows_return() == profile()
