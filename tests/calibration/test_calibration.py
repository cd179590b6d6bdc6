"""Calibration finds the heads that need slots, and profiles share slots out exactly."""

import json
import re

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from mlx_h2o.budgets import allocation
from mlx_h2o.budgets.profile import FILE_NAME, Profile
from mlx_h2o.calibration import calibrate
from mlx_h2o.cli import main
from mlx_h2o.loading.identity import ModelIdentity
from mlx_h2o.loading.load import CALIBRATION_TEXT, MODELS, SAMPLE_TEXT
from mlx_h2o.slots.remainder import Remainder
from research import exact_kl
from tiny_models import tiny_model

SHIPPED = MODELS / "recall-4m" / FILE_NAME


def made_up(losses, grid=(12, 24, 48, 96)):
    """A profile of one layer per row of heads' loss curves."""
    heads = tuple(len(layer) for layer in losses)
    model = ModelIdentity("made-up", heads, (8,) * len(heads), 0, ())
    return Profile(model, grid, tuple(tuple(map(tuple, layer)) for layer in losses), "by hand")


def test_slots_go_where_they_save_most():
    steep, flat = (8.0, 4.0, 1.0, 0.0), (0.4, 0.3, 0.2, 0.1)
    (budgets,) = made_up([[steep, flat]]).budgets(30)
    assert sum(budgets) == 60
    assert budgets == [48, 12]


@pytest.mark.parametrize("mean", [12, 13, 40, 128, 500, 5000])
def test_no_slot_is_lost_or_made_up(mean):
    """The mean is exact at every size, beyond what the grid covers too."""
    budgets = Profile.load(SHIPPED).budgets(mean)
    slots = [s for layer in budgets for s in layer]
    assert sum(slots) == mean * len(slots)
    assert min(slots) >= 12


def test_a_mean_below_what_a_head_needs_is_refused():
    with pytest.raises(ValueError, match="raise max_size"):
        made_up([[(1.0, 0.5, 0.2, 0.0)]]).budgets(11)


def test_profiles_survive_saving(tmp_path):
    profile = Profile.load(SHIPPED)
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    # A person can read it: each head's losses stand on one line.
    assert re.search(r"^ *\[ [0-9.e-]+(, [0-9.e-]+){14} \],?$", SHIPPED.read_text(), re.MULTILINE)


def test_limited_attention_is_that_of_a_window_and_the_remainder():
    """Against the remainder of real folds, query by query."""
    mx.random.seed(0)
    T, D, scale, budget = 60, 8, 8**-0.5, 12
    q, k, v = (mx.random.normal((n, T, D)) for n in (2, 1, 1))
    rows = exact_kl.PrefixStatistics(k[0], v[0])
    full, limited = exact_kl.limited_attention(q, rows, 0, scale, [budget])
    expected = mx.fast.scaled_dot_product_attention(
        q[None], k[None], v[None], scale=scale, mask="causal"
    )[0]
    assert np.allclose(full, expected, atol=1e-5)
    for i in (5, 11, 12, 13, 30, 59):
        kept = [p for p in range(i + 1) if p < 4 or p > i - (budget - 4)]
        gone = [p for p in range(i + 1) if p not in kept]
        out, _, lse = mlx_h2o.scaled_dot_product_attention_with_scores(
            q[None, :, i : i + 1], k[None][:, :, mx.array(kept)], v[None][:, :, mx.array(kept)],
            scale=scale,
        )  # fmt: skip
        if gone:
            remainder = Remainder.empty(1, 1, D, D).fold(
                k[None][:, :, mx.array(gone)], v[None][:, :, mx.array(gone)]
            )
            out, _ = remainder.join(out, lse, remainder.column(q[None, :, i : i + 1], scale))
        assert np.allclose(limited[:, i], out[0, :, 0], atol=2e-5), i


def test_the_embedded_models_profile_is_what_calibration_measures(embedded):
    """Most slots go to the one head that copies and recalls; the shipped file says the same."""
    model, tokenizer = embedded
    tokens = tokenizer.encode(CALIBRATION_TEXT.read_text())[:256]
    profile = calibrate.calibrate(model, tokens, length=256)
    shipped = Profile.load(SHIPPED)
    assert shipped.model.difference(profile.model) is None
    for found in (profile, shipped):
        budgets = np.array(found.budgets(64))
        assert budgets[3, 1] >= 2 * 64
        assert (np.sort(budgets.flatten())[:4] <= 64).all()
    # Losses never rise with more slots.
    assert (np.diff(np.array(profile.losses), axis=-1) <= 0).all()


@pytest.mark.slow
def test_one_pass_orders_heads_as_the_exact_measure_does(embedded):
    """At a size where it matters, the heads that cost most by KL cost most in one pass."""
    model, tokenizer = embedded
    tokens = tokenizer.encode(CALIBRATION_TEXT.read_text())[:96]
    one_pass = calibrate.calibrate(model, tokens, length=96, policy="distinct")
    exact = exact_kl.calibrate_exactly(model, tokens, length=96)
    orders = [
        np.argsort(
            np.argsort(
                [curve[profile.grid.index(48)] for layer in profile.losses for curve in layer]
            )
        )
        for profile in (one_pass, exact)
    ]
    assert np.corrcoef(*orders)[0, 1] > 0.6


@pytest.mark.slow
def test_quantized_projections_can_be_weighed():
    """4-bit models have no plain matrix W_o; the measure hardly moves."""
    from mlx import nn

    tokens = [(7 * i) % 1000 for i in range(96)]
    model, _ = mlx_h2o.load("builtin:recall-4m")
    plain = np.array(calibrate.calibrate(model, tokens).losses)
    nn.quantize(
        model, group_size=32, bits=8, class_predicate=lambda path, _: path.endswith("o_proj")
    )
    quantized = np.array(calibrate.calibrate(model, tokens).losses)
    used = plain > plain.max() / 100
    assert np.allclose(quantized[used], plain[used], rtol=0.2)


def test_a_page_of_text_is_asked_for():
    with pytest.raises(ValueError, match="too few"):
        calibrate.calibrate(tiny_model("llama"), list(range(20)))


def test_models_that_need_one_budget_are_not_calibrated():
    with pytest.raises(ValueError, match="one budget"):
        calibrate.calibrate(tiny_model("gemma2_by_itself"), [i % 100 for i in range(96)])


def test_the_command_writes_a_profile_that_is_found_again(tmp_path, capsys):
    """Calibrate a local copy of the model; make_prompt_cache then uses what lies beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (MODELS / "recall-4m").iterdir():
        if file.name != FILE_NAME:
            (folder / file.name).symlink_to(file)
    text = tmp_path / "short.txt"
    text.write_text(CALIBRATION_TEXT.read_text()[:500])
    command = ["calibrate", "--model", str(folder), "--text", str(text)]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["profile"] == str(folder / FILE_NAME)
    model, _ = mlx_h2o.load(str(folder), mx.float32)
    cache = mlx_h2o.make_prompt_cache(model, max_size=100)
    expected = Profile.load(folder / FILE_NAME).budgets(98, least=14)
    # Nothing goes before all is full; then heads have their shares.
    assert [list(entry.settings.filling[-1].budgets) for entry in cache] == expected
    assert main(command) == 0
    assert "head 1" in capsys.readouterr().out


def test_a_text_that_cannot_be_read_is_reported(tmp_path, capsys):
    assert main(["calibrate", "--text", str(tmp_path / "none.txt")]) == 2
    assert "Cannot read the text" in capsys.readouterr().err


def test_the_two_bundled_texts_are_independent():
    """No figure may be measured on what the profile was calibrated on."""

    def phrases(path):
        words = path.read_text().split()
        return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}

    assert not phrases(SAMPLE_TEXT) & phrases(CALIBRATION_TEXT)


def test_sharing_out_costs_a_look_per_purchase(monkeypatch):
    """A 4B model has hundreds of heads: after a purchase only the buyer's offer is made anew."""
    rng = np.random.default_rng(0)
    losses = np.sort(rng.exponential(size=(36, 8, len(calibrate.GRID))), axis=-1)[..., ::-1]
    profile = made_up(losses.tolist(), grid=calibrate.GRID)
    looks = []
    best_step = allocation.best_step
    monkeypatch.setattr(
        allocation, "best_step", lambda *args: looks.append(args) or best_step(*args)
    )
    budgets = profile.budgets(1024)
    assert sum(map(sum, budgets)) == 1024 * 36 * 8
    assert len(looks) <= 36 * 8 * (1 + len(calibrate.GRID))


def test_no_pass_is_longer_than_the_trained_context():
    """Heads behave otherwise there, and a profile of that would do harm."""
    model = tiny_model("llama")
    model.args.max_position_embeddings = 64
    profile = calibrate.calibrate(model, [i % 100 for i in range(100)])
    assert profile.details["tokens"] == 64
