"""The knee: what is recommended, and that the line of code makes what was measured."""

import json
import math
import re

import mlx.core as mx
import pytest

import mlx_h2o
from mlx_h2o.cli import main
from mlx_h2o.cli.tune import allowed
from mlx_h2o.evaluate.charts import svg
from mlx_h2o.evaluate.equal_bytes import bytes_of
from mlx_h2o.evaluate.evaluation import Evaluation
from mlx_h2o.evaluate.measures import PerplexityMeasure
from mlx_h2o.evaluate.methods import FULL, sized
from mlx_h2o.evaluate.reader import Reader
from mlx_h2o.evaluate.tuning import answer_of, choices, recommended, section, tuned_methods
from mlx_h2o.loading.load import SAMPLE_TEXT


def made_of(losses, spread=0.0, shares=(0.5, 0.25, 0.125)):
    """Choices of the given losses, one for each method, larger caches first."""
    methods = tuned_methods(["salient"], [16], shares)
    full = {"nll": [1.0, 2.0, 3.0], "nbytes": 1000}
    results = []
    for method, loss in zip(methods[1:], losses, strict=True):
        shift = math.log(1 + loss)
        nll = [nll + shift + d for nll, d in zip(full["nll"], (-spread, 0, spread), strict=True)]
        results.append((method, {"nll": nll, "nbytes": int(1000 * method.share)}))
    return choices([(methods[0], full), *results])


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
    ours = tuned_methods(["salient", "h2o:recent=0.3"], [bits], [0.5])[1:]
    for method in [*ours, *sized(ours[:1], tokens=[200])]:
        for one, other in zip(made_by(method, model, 512), method.make(model, 512), strict=True):
            assert one.policy == other.policy
            assert str(one.packing) == str(other.packing)
            assert one.budgets == other.budgets


def made_by(method, model, tokens):
    """What a printed line makes."""
    names = {"mlx_h2o": mlx_h2o, "model": model}
    exec(method.code(model, tokens), names)
    return names["cache"]


def test_printed_bytes_are_those_of_the_printed_line():
    """On the same text, for every row of the table."""
    reader = Reader("builtin:recall-4m", SAMPLE_TEXT.read_text(), "questions", 128)
    measure = PerplexityMeasure(samples=2, length=512, prefill=496)
    methods = tuned_methods(["salient"], [16, 6], [0.5, 0.125])
    evaluation = Evaluation(reader, methods, [measure])
    evaluation.run()
    assert evaluation.refusals() == []
    tokens = mx.array([[*reader.first, *reader.tokens[:511]]])
    full = evaluation.results["perplexity"][FULL]["nbytes"]
    for choice in choices(evaluation.results_of(measure)):
        cache = made_by(choice.method, reader.model, 512)
        for first, end in ((0, 496), *((i, i + 1) for i in range(496, 511))):
            mx.eval(reader.model(tokens[:, first:end], cache=cache))
        nbytes = sum(entry.nbytes for entry in cache)
        assert choice.nbytes == pytest.approx(nbytes, rel=0.01), choice.method.name
        assert bytes_of(cache) == nbytes
        assert choice.share == choice.nbytes / full <= choice.method.share
        assert choice.share > 0.7 * choice.method.share, choice.method.name


def test_the_answer_is_a_sentence():
    chosen = made_of([0.001, 0.002, 0.004, 0.02, 0.05, 0.03])[2]
    assert answer_of(chosen, 0.01, "your text").startswith("On your text ")
    assert "+0.40 %" in answer_of(made_of([0.004] * 6)[0], 0.01, "your text")
    assert "allow more bytes" in answer_of(None, 0.01, "your text")


def test_the_charts_axis_is_a_scale():
    """It has no label a point."""
    made = made_of([0.01] * 80, shares=[(50 - i) / 100 for i in range(40)])
    labels = re.findall(r"<text[^>]*>1/\d+</text>", svg(section(made, None, 0.01).charts[0]))
    assert 2 < len(labels) < 9


@pytest.mark.parametrize(("text", "loss"), [("1%", 0.01), ("0.02", 0.02), ("0", 0.0)])
def test_losses_as_people_write_them(text, loss):
    assert allowed(text) == pytest.approx(loss)


@pytest.mark.parametrize("text", ["-1%", "150%", "little"])
def test_no_losses(text):
    with pytest.raises(ValueError):  # noqa: PT011  its words are argparse's
        allowed(text)


def test_the_command_recommends_a_line(tmp_path, capsys):
    sizes = (
        "--model builtin:recall-4m --samples 2 --tokens 64 --prefill 16 --shares 1/2 --bits 16 "
        "--loss 90%"
    ).split()
    assert main(["tune", *sizes, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "cache = mlx_h2o.make_prompt_cache(model, max_bytes=" in printed
    assert "<svg" in (tmp_path / "tuning.html").read_text()
    assert main(["tune", *sizes, "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommended"].startswith("cache = ")
    assert main(["tune", "--prefill", "96", "--tokens", "96"]) == 2
