"""Every kept experiment runs from its command line, on the embedded model and at its least sizes.

In processes of their own, since some change the library for as long as they run.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT

ROOT = Path(__file__).parents[2]
TEXT = str(SAMPLE_TEXT)
MODEL = ("--model", EMBEDDED_MODEL)
PAIR = ("--tokens", "96", "--samples", "2")

#: Of each experiment its arguments, and what its last line begins with. "OUT" is a file's place.
RUNS = {
    "coding fit": ((TEXT, *MODEL, *PAIR, "--fits", "OUT"), ""),
    "draw_frames": (("OUT", *MODEL), ""),
    "real_model rows": ((TEXT, *MODEL, *PAIR), "| "),
    "returning": ((TEXT, *MODEL, "--tokens", "200", "--parts", "8", "--prompts", "1"), "| "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name, tmp_path):
    given, last = RUNS[name]
    out = tmp_path / "out.png"
    arguments = [str(out) if one == "OUT" else one for one in given]
    module, *what = name.split()
    done = subprocess.run(
        [sys.executable, "-m", f"research.{module}", *what, *arguments],
        cwd=ROOT, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if last:
        assert lines[-1].startswith(last)
        tables = [line for line in lines if line.startswith("|")]
        # A head, its rule, and at least one row of figures; none of them is not a number.
        assert len(tables) > 2
        assert re.search(r"\d", tables[-1])
        assert not any(re.search(r"\bnan\b", line) for line in tables)
    if "OUT" in given:
        assert out.stat().st_size > 0


@pytest.mark.slow
def test_rows_are_coded_by_the_fits_that_were_made(tmp_path):
    common = (TEXT, *MODEL, "--fits", str(tmp_path), "--variants", "joint")
    few = ("--tokens", "200", "--samples", "2", "--parts", "8", "--prompts", "1")
    for what in ("fit", "rows", "evict", "facts"):
        done = subprocess.run(
            [sys.executable, "-m", "research.coding", what, *common, *few],
            cwd=ROOT, text=True, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if what != "fit":
            assert done.stdout.splitlines()[-1].startswith("| ")


def test_no_experiment_is_left_out():
    """All of research/ that has a command line."""
    there = {
        path.stem for path in (ROOT / "research").glob("*.py") if "__main__" in path.read_text()
    }
    assert there == {name.split()[0] for name in RUNS} | {"exact_kl"}
