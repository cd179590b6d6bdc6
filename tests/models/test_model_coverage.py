"""Every model of the installed mlx-lm does what docs/reference/models.md says of it."""

from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from model_configs import OLD_NAMES
from model_coverage import BOUNDED, NOT_RUN, PARTLY, REFUSED, coverage_model, model_names
from model_matrix import COLUMNS, NOT_STOCK, YES, is_filled
from model_rows import cells_of, rows_of

TEXT = (Path(__file__).parents[2] / "docs/reference/models.md").read_text(encoding="utf-8")
# One of each kind, in every run.
SAMPLE = {
    "deepseek_v32": "an index of all tokens",
    "gemma2": "attention of its own, capped",
    "phi3small": "blocks of places",
    "gemma3n": "layers share keys",
    "iquestloopcoder": "a second pass over shared keys",
    "longcat_flash": "MLA, two caches a layer",
    "llama4": "chunks",
    "deepseek_v3": "MLA",
    "kimi_linear": "MLA and states",
    "gemma3": "sliding windows",
    "qwen2": "a list of blocks made anew at every look",
    "qwen3_vl": "a wrapper",
    "mamba": "of fixed size",
}
# The models that are served or calibrated in every run: one of each kind that the server or the
# calibration treats differently.
QUICK_ROWS = {
    "server": {"deepseek_v3", "gemma3", "llama4", "mamba"},
    "profile": {"gemma3n", "llama4", "qwen2"},
}


#: The page's cells by model.
ROWS = {name: cells_of(row)[1:] for name, row in rows_of(TEXT).items()}


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_calibration_needs_no_list_that_stays(family):
    """The page's `profile` column, for a list of blocks that is made anew at every look."""
    model = coverage_model(family)
    assert model.layers is not model.layers
    assert ROWS[family][-1] == YES


def cases(names: Sequence[str]) -> list[Any]:
    """All of them, those that are no sample slow."""
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in names]


def require_as_documented(name: str, column: str, documented: str, now: str) -> None:
    assert now == documented, (
        f"with mlx-lm {version('mlx-lm')} the row of {name} is another ({column}):\n"
        f"  docs/reference/models.md: {documented}\n  this run:       {now}\n"
        f"If that is as it should be, write the row anew: python tools/model_table.py {name}"
    )


def fill(column: str, name: str) -> str:
    """A cell as it is now, where this mlx-lm has the model."""
    if name not in model_names():
        pytest.skip(f"mlx-lm {version('mlx-lm')} has no {name}")
    return COLUMNS[column](name)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", cases(sorted(ROWS)))
def test_a_model_does_what_the_page_says(name):
    if ROWS[name][0] == NOT_RUN and mx.metal.is_available():
        pytest.skip(f"docs/reference/models.md was written where {name} does not run")
    column = "memory | layers"
    require_as_documented(name, column, " | ".join(ROWS[name][:2]), fill(column, name))


def cells() -> list[Any]:
    """Each filled cell behind the first column, those of no sample slow."""
    return [
        pytest.param(
            name, column, marks=() if name in QUICK_ROWS.get(column, SAMPLE) else pytest.mark.slow
        )
        for name in sorted(ROWS)
        for column in list(COLUMNS)[1:]
        if is_filled(column, ROWS[name][0])
    ]


@pytest.mark.parametrize(("name", "column"), cells())
def test_a_bounded_model_does_the_rest_that_the_page_says(name, column):
    place = " | ".join(COLUMNS).split(" | ").index(column)
    now = fill(column, name)
    here = version("mlx-lm")
    if now == NOT_STOCK != ROWS[name][place] and f"Written with mlx-lm {here};" not in TEXT:
        pytest.skip(f"batches of {name} with mlx-lm {here}'s own caches are wrong, too")
    require_as_documented(name, column, ROWS[name][place], now)


def test_the_page_has_every_model():
    missing = {OLD_NAMES.get(name, name) for name in model_names()} - set(ROWS)
    assert not missing, (
        f"mlx-lm {version('mlx-lm')} has models that docs/reference/models.md does not: "
        f"{sorted(missing)}. Give each what differs in tests/model_configs.py; "
        "then: python tools/model_table.py"
    )


def test_nine_of_ten_models_whose_memory_grows_are_bounded():
    counts = Counter(cells[0] for cells in ROWS.values())
    grows = counts[BOUNDED] + counts[PARTLY] + counts[REFUSED]
    assert counts[BOUNDED] >= 0.9 * grows
    assert grows > 0.9 * len(ROWS)
