"""The knee: what is recommended, and that the line of code makes what was measured."""

import json
import math

import pytest

import mlx_h2o
from mlx_h2o.cli import main
from mlx_h2o.cli.tune import allowed
from mlx_h2o.evaluate.tuning import choices, line_of_code, recommended, tuned_contenders


def made_of(losses, spread=0.0):
    """Choices of the given losses, one for each contender, larger caches first."""
    contenders = tuned_contenders(["salient"], [16], [0.5, 0.25, 0.125])
    full = {"nll": [1.0, 2.0, 3.0], "nbytes": 1000}
    found = []
    for contender, loss in zip(contenders[1:], losses, strict=True):
        shift = math.log(1 + loss)
        nll = [nll + shift + d for nll, d in zip(full["nll"], (-spread, 0, spread), strict=True)]
        found.append((contender, {"nll": nll, "nbytes": int(1000 * contender.share)}))
    return choices([(contenders[0], full), *found])


def test_the_smallest_within_the_loss_is_recommended():
    made = made_of([0.001, 0.002, 0.004, 0.02, 0.05, 0.03])
    assert [choice.nbytes for choice in made] == sorted(choice.nbytes for choice in made)
    assert recommended(made, 0.01, surely=False).nbytes == 250
    assert recommended(made, 0.01, surely=False).loss == pytest.approx(0.004)
    assert recommended(made, 0.03 + 1e-9, surely=False).nbytes == 125
    assert recommended(made, 0.0001, surely=False) is None
    assert choices([]) == []


def test_of_equal_bytes_the_better_is_recommended():
    made = made_of([0.1, 0.1, 0.1, 0.1, 0.009, 0.002])
    assert recommended(made, 0.01, surely=False).loss == pytest.approx(0.002)


def test_surely_asks_the_interval():
    made = made_of([0.001, 0.002, 0.008, 0.008, 0.05, 0.05], spread=0.02)
    assert recommended(made, 0.01, surely=False).nbytes == 250
    assert recommended(made, 0.01, surely=True) is None


@pytest.mark.parametrize("bits", [16, 8])
def test_the_line_of_code_makes_what_was_measured(bits):
    """Evaluated as it is printed, it makes caches of the same settings, policy and widths."""
    model, _ = mlx_h2o.load("builtin:recall-4m")
    for contender in tuned_contenders(["salient", "h2o:recent=0.3"], [bits], [0.5])[1:]:
        choice = next(c for c in made_of([0.0] * 6))
        choice = type(choice)(contender, 0.0, (0.0, 0.0), 1, 0.5)
        line = line_of_code(choice, 512)
        names = {"mlx_h2o": mlx_h2o, "model": model}
        exec(line, names)
        made, measured = names["cache"], contender.make(model, 512)
        for one, other in zip(made, measured, strict=True):
            assert one.policy == other.policy
            assert str(one.packing) == str(other.packing)


@pytest.mark.parametrize(("text", "loss"), [("1%", 0.01), ("0.02", 0.02), ("0", 0.0)])
def test_losses_as_people_write_them(text, loss):
    assert allowed(text) == pytest.approx(loss)


@pytest.mark.parametrize("text", ["-1%", "150%", "little"])
def test_no_losses(text):
    with pytest.raises(ValueError):  # noqa: PT011  its words are argparse's
        allowed(text)


def test_the_command_recommends_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mlx_h2o.evaluate.suite.cores", lambda: 0)
    sizes = (
        "--model builtin:recall-4m --samples 2 --tokens 64 --prefill 16 --shares 1/2 --bits 16 "
        "--loss 90%"
    ).split()
    assert main(["tune", *sizes, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "cache = mlx_h2o.make_prompt_cache(model, max_bytes=" in printed
    assert "<svg" in (tmp_path / "tuning.html").read_text()
    assert main(["tune", *sizes, "--out", str(tmp_path), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"].startswith("cache = ")
    assert main(["tune", "--prefill", "96", "--tokens", "96"]) == 2
