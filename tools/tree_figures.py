#!/usr/bin/env python3
"""Prints the size of the tree, and what README's example and one step of one layer visit.

    tools/tree_figures.py

CONTRIBUTING.md has the figures, before and after each large change.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from step_files import PACKAGE, calls, visits

ROOT = Path(__file__).parents[1]
#: The packages that one step passes through, by their names of now and of before.
CORE = ("attention", "policies", "slots", "layer", "budgets", "caches")
#: Text that tools/embed_metal.py writes.
GENERATED = "c_api/src/gpu/kernel_files.cpp"


def tracked(*patterns: str) -> list[Path]:
    """The files that git tracks, by patterns."""
    command = ["git", "ls-files", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.splitlines() if (path := ROOT / name).is_file()]


def lines(*patterns: str) -> int:
    """The lines of the tracked files."""
    files = (path for path in tracked(*patterns) if path != ROOT / GENERATED)
    return sum(len(path.read_bytes().splitlines()) for path in files)


def words(paths: Iterable[Path]) -> int:
    """The words of some files."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def example_files() -> tuple[int, int]:
    """The package's files that README's example imports, and those of them where nothing runs."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md has no Python block"
    ran: set[str] = set()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # Bodies of modules and classes are no functions: their locals are not optimised.
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and is_function and str(PACKAGE) in code.co_filename:
            ran.add(code.co_filename)

    sys.setprofile(see)
    try:
        exec(compile(block[1], "README.md", "exec"), {})
    finally:
        sys.setprofile(None)
    modules = [module for name, module in sys.modules.items() if name.startswith("mlx_h2o")]
    files = {str(getattr(module, "__file__", None)) for module in modules}
    files = {file for file in files if file.endswith(".py")}
    return len(files), len(files - ran)


def options_of(command: str) -> int:
    """The options of a subcommand, without --help."""
    from mlx_h2o.cli import parser

    actions = parser()._command(command)._actions
    return sum(bool(action.option_strings) for action in actions) - 1


def main() -> None:
    """Measure and print."""
    imported, idle = example_files()
    rows: list[tuple[str, object]] = [
        ("python/mlx_h2o, lines", lines("python/mlx_h2o/*.py")),
        ("its core packages", lines(*(f"python/mlx_h2o/{name}/*.py" for name in CORE))),
        ("its server", lines("python/mlx_h2o/serve/*.py")),
        ("c_api/src without generated text", lines("c_api/src/*")),
        ("swift/Sources", lines("swift/Sources/*.swift")),
        ("tests", lines("tests/*")),
        ("documentation, words", words(tracked("*.md"))),
        *((f"options of {name}", options_of(name)) for name in ("generate", "chat", "serve")),
        ("files that README's example imports", imported),
        ("files of these in which nothing runs", idle),
    ]
    print("| of the tree | |\n|---|---:|")
    for name, number in rows:
        print(f"| {name} | {number:,} |")
    print("\n| one layer | files | crossings | Python calls |\n|---|---:|---:|---:|")
    for name, call in calls().items():
        of_call = visits(call)
        print(f"| {name} | {len(of_call.files)} | {of_call.crossings} | {of_call.calls} |")


if __name__ == "__main__":
    main()
