"""Every module of mlx-vlm with a row does what docs/reference/vision-models.md says of it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed here")

from model_coverage import BOUNDED, PARTLY, REFUSED
from model_rows import rows_of
from vlm_coverage import FAILS, vlm_line

TEXT = (Path(__file__).parents[2] / "docs/reference/vision-models.md").read_text(encoding="utf-8")
ROWS = rows_of(TEXT)
# One of each kind, in every run.
SAMPLE = {
    "qwen2_vl": "M-RoPE",
    "gemma3": "sliding windows",
    "paddleocr_vl": "a mask that is cut to the keys",
    "hy_v4": "refused",
    "afm7": "layers that attend to another's keys",
    "zaya1_vl": "attention that is not told the cache",
}


def cases() -> list[Any]:
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in ROWS]


@pytest.mark.parametrize("name", cases())
def test_a_module_does_what_the_page_says(name):
    assert vlm_line(name) == ROWS[name], f"write it anew: python tools/vlm_table.py {name}"


def test_of_the_modules_whose_memory_grows_95_percent_are_bounded():
    counts = Counter(row.split(" | ")[1] for row in ROWS.values())
    growing = counts[BOUNDED] + counts[PARTLY] + counts[REFUSED] + counts[FAILS]
    assert counts[BOUNDED] >= 0.95 * growing
