"""Every command of the repository can be started: what it imports is there."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "research", "golden", "tools")
# Another environment's Python runs it, by path.
ELSEWHERE = "benchmarks/board/kvpress_worker.py"
# One process for all, since most of the time goes into importing MLX.
IMPORT_ALL = """
import os, runpy, sys
for path in sys.argv[1:]:
    by_path = "/tools/" in path  # the others are run by `python -m`, at the root
    sys.path[0] = os.path.dirname(path) if by_path else os.getcwd()
    try:
        runpy.run_path(path, run_name="imported")
    except BaseException as error:
        print(f"{path}: {type(error).__name__}: {error}")
"""


def test_commands_find_what_they_import():
    commands = sorted(str(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    commands.remove(str(ROOT / ELSEWHERE))
    assert len(commands) > 40
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *commands], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, ""), run.stdout + run.stderr
