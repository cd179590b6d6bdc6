"""Every model of the installed mlx-lm does what docs/models.md says of it."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_h2o import make_prompt_cache
from model_configs import OLD_NAMES
from model_coverage import (
    BOUNDED,
    NOT_RUN,
    PARTLY,
    REFUSED,
    ROOMY,
    SMALL,
    check_batch,
    check_memory,
    coverage_model,
    framed,
    model_names,
    packs,
    row_of,
)

PAGE = Path(__file__).parents[1] / "docs/models.md"
# One of each kind, in every run.
SAMPLE = {
    "deepseek_v32": "an index of all tokens",
    "gemma2": "attention of its own, capped",
    "phi3small": "attends by itself",
    "gemma3n": "layers share keys",
    "iquestloopcoder": "a second pass over shared keys",
    "longcat_flash": "MLA, two caches a layer",
    "llama4": "chunks",
    "qwen3_vl": "a wrapper",
    "mamba": "of fixed size",
}


def documented() -> dict[str, str]:
    """The page's rows by model."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


ROWS = documented()
CASES = [
    pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in sorted(ROWS)
]


@pytest.mark.parametrize("name", CASES)
def test_a_model_does_what_the_page_says(name):
    if name not in model_names():
        pytest.skip(f"mlx-lm {version('mlx-lm')} has no {name}")
    if f" | {NOT_RUN} | " in ROWS[name] and mx.metal.is_available():
        pytest.skip(f"docs/models.md was written where {name} does not run")
    now = str(row_of(name))
    assert now == ROWS[name], (
        f"with mlx-lm {version('mlx-lm')} the row of {name} is another:\n"
        f"  docs/models.md: {ROWS[name]}\n  this run:       {now}\n"
        "If that is as it should be, write the page anew: python tools/model_table.py"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name in ROWS if " | bounded | " in ROWS[name]))
def test_packed_rows_in_frames_and_batches_hold_too(name):
    if name not in model_names():
        pytest.skip(f"mlx-lm {version('mlx-lm')} has no {name}")
    model = coverage_model(name)
    cache = make_prompt_cache(model, max_size=ROOMY)
    check_batch(model, cache, make_prompt_cache(model, max_size=ROOMY))
    if packs(cache):
        stored = {"bits": 8, "group_size": 32, "frames": framed(cache)}
        check_memory(model, make_prompt_cache(model, max_size=2 * SMALL, **stored), 2 * SMALL)


def test_the_page_has_every_model():
    missing = {OLD_NAMES.get(name, name) for name in model_names()} - set(ROWS)
    assert not missing, (
        f"mlx-lm {version('mlx-lm')} has models that docs/models.md does not: {sorted(missing)}. "
        "Give each what differs in tests/model_configs.py; then: python tools/model_table.py"
    )


def test_nine_of_ten_models_whose_memory_grows_are_bounded():
    memory = Counter(row.split(" | ")[1] for row in ROWS.values())
    grows = memory[BOUNDED] + memory[PARTLY] + memory[REFUSED]
    assert memory[BOUNDED] >= 0.9 * grows
    assert grows > 0.9 * len(ROWS)
