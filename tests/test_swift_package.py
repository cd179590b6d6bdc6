"""What the Swift package carries of this repository is what this repository says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("tool", ["embed_metal.py", "record_launches.py"])
def test_generated_files_are_up_to_date(tool: str) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools" / tool), "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
