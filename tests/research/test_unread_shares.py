"""The area under the curve, and the experiment's commands on the embedded model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlx_h2o.loading.load import SAMPLE_TEXT
from research.unread import area, area_error, bounds, main

RNG = np.random.default_rng(3)


def test_the_area_is_the_chance_that_a_wrong_one_has_the_larger_figure():
    figure, wrong = RNG.integers(0, 6, 60).astype(float), RNG.random(60) < 0.3
    pairs = figure[wrong][:, None], figure[~wrong][None]
    expected = ((pairs[0] > pairs[1]) + 0.5 * (pairs[0] == pairs[1])).mean()
    assert area(figure, wrong) == pytest.approx(expected)
    assert 0.03 < area_error(expected, wrong) < 0.12
    assert area(wrong.astype(float), wrong) == 1
    assert math.isnan(area(figure, np.zeros(60, bool)))


def test_bounds_are_above_the_true_share():
    for _ in range(20):
        keys, q = RNG.normal(size=(50, 16)), RNG.normal(size=16)
        kept = np.arange(50) % 3 == 0
        found = bounds(q, keys, kept, 0.25, 4.0)
        logits = np.exp(0.25 * keys @ q)
        assert found.true == pytest.approx(logits[~kept].sum() / logits.sum())
        assert found.column == pytest.approx(found.true, abs=0.1)
        assert min(found.ball, found.box) > found.true


@pytest.mark.parametrize("what", ["facts", "prose", "bound"])
def test_the_commands_print_tables(what, capsys, monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(SAMPLE_TEXT.read_text())
    options = ["--model", "builtin:recall-4m", "--tokens", "128", "--samples", "1"]
    options += ["--parts", "8", "--prompts", "4"]
    monkeypatch.setattr("sys.argv", ["unread", what, str(text), *options])
    main()
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == {"facts": 6, "prose": 6, "bound": 4}[what]
    assert {row.count("|") for row in (head, rule, *rows)} == {7}
