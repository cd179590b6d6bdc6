"""The report's sweeps: what they vary, and how they are printed."""

import json
import math

import mlx.core as mx
import pytest

import mlx_h2o
from benchmarks.atomgradient import HEADLINE, by_layer, main, reports_method, rows_of, tables
from benchmarks.attention_shape import Shape, budgets_by_entropy, shape_of
from mlx_h2o.evaluate.methods import FULL
from mlx_h2o.policies import make_policy


def test_the_headlines_policy_is_the_papers():
    """Half of 256 slots heavy, 4 sinks, the rest recent: within one group the preset `paper`."""
    method = reports_method(256)
    made, paper = method.policy, make_policy("paper")
    assert (made.name, made.sink, made.unit, made.prompt, made.decay) == (
        *(paper.name, paper.sink, paper.unit, paper.prompt, paper.decay),
    )
    assert made.recent == 256 - 4 - 128
    assert not method.remainder


@pytest.mark.parametrize("number", tables())
def test_a_table_begins_with_the_full_cache_and_varies_something(number):
    table = tables()[number]
    names = [(part.label, c.name) for part in table.parts for c in part.methods]
    assert len(set(names)) == len(names)
    for part in table.parts:
        assert part.methods[0].name == FULL
        for method in part.methods[1:]:
            assert method.slots < part.measure.length


def test_the_reports_figures_stand_beside_its_models_alone():
    table = tables()[0]
    full = {"nll": [math.log(10)], "nbytes": 100}
    results = [(c, full) for c in table.parts[0].methods]
    for model, known in (("mlx-community/Qwen3-8B-4bit", True), ("smollm2-135m", False)):
        rows = rows_of(table, [results], model)
        figures = [row[-1] for row in rows.rows[:3]]
        expected = [f"{x:.2f}" for x in HEADLINE["Qwen3-8B-4bit"]] if known else ["not known"] * 3
        assert figures == expected
        assert bool(rows.caption) is not known
    assert [row[2] for row in rows.rows] == ["", *["+0.0 %"] * 3]
    assert rows_of(table, [[]], "any").rows == []


@pytest.mark.slow
def test_the_command_prints_a_table(tmp_path, capsys):
    command = "0 --model builtin:recall-4m --samples 2 --out".split()
    assert main([*command, str(tmp_path)]) == 0
    assert "the report's H2O, 256 slots" in capsys.readouterr().out
    assert main([*command, str(tmp_path), "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert len(parts[0]["results"]["perplexity"]) == 4


def test_entropy_and_concentration_are_those_of_the_definition():
    """Even attention: entropy 1, the strongest tenth gets a tenth. Sharp attention: 0 and all."""
    keys = mx.random.normal((1, 2, 80, 8), key=mx.random.key(1))
    even = shape_of(mx.zeros((1, 4, 80, 8)), keys, 1.0)
    assert even.entropy == pytest.approx(1, abs=1e-5)
    assert even.concentration == pytest.approx(0.1, abs=0.01)
    sharp = shape_of(1000 * mx.repeat(keys, 2, axis=1), keys, 1.0)
    assert sharp.entropy < 0.01
    assert sharp.concentration > 0.99


def test_slots_by_entropy_are_as_many_and_follow_it():
    shapes = [Shape(0.9, 0.0), Shape(0.3, 0.0), Shape(0.6, 0.0)]
    slots = budgets_by_entropy(shapes, 100, 25)
    assert sum(slots) == 300
    assert slots == [25 + 113, 25 + 37, 25 + 75] or slots == [25 + 112, 25 + 38, 25 + 75]


def test_layers_get_slots_by_their_entropy():
    model, _ = mlx_h2o.load("builtin:recall-4m")
    even, uneven = by_layer(256)
    made = uneven.make(model, 512)
    assert sum(sum(entry.budgets) for entry in made) == 256 * sum(len(e.budgets) for e in made)
    assert len({tuple(entry.budgets) for entry in made}) > 1
    assert uneven.name == f"{even.name}, by entropy"
