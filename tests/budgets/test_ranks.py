"""Models whose heads several processes share: two ranks of mlx.launch on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_h2o

PROGRAM = Path(__file__).parents[1] / "generate_on_ranks.py"
SETTINGS = [
    {"max_size": 64},
    {"max_bytes": "12%", "context": 256},
    {"max_size": 48, "policy": "h2o:unit=layer", "budgets": "uniform"},
]


def launched(ranks, *arguments):
    """What each rank told, by rank."""
    words = [sys.executable, str(PROGRAM), json.dumps(SETTINGS), *map(str, arguments)]
    if ranks > 1:
        launch = Path(sys.executable).with_name("mlx.launch")
        words = [str(launch), "--backend", "ring", "-n", str(ranks), *words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [one["told"] for one in sorted(told, key=lambda one: one["rank"])]


@pytest.mark.slow
def test_two_ranks_say_what_one_says(tmp_path):
    """The same tokens, and each rank has the slots and keeps the positions of its own heads."""
    [alone] = launched(1)
    both = launched(2, tmp_path / "cache")
    assert len(both) == 2
    for i, expected in enumerate(alone):
        ours = [told[i] for told in both]
        assert [one["said"] for one in ours] == [expected["said"]] * 2
        for layer, budgets in enumerate(expected["budgets"]):
            assert [slots for one in ours for slots in one["budgets"][layer]] == budgets
        assert [row for one in ours for row in one["kept"]] == expected["kept"]
    with pytest.raises(ValueError, match="2 processes share"):
        mlx_h2o.load_prompt_cache(str(tmp_path / "cache.0.safetensors"))
