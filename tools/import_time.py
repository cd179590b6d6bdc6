#!/usr/bin/env python3
"""Prints the time that `import mlx_h2o` takes beyond mlx, and that of imports at first use.

    tools/import_time.py [--runs 5]

Each row is the shortest time of several new interpreters, all of which have imported mlx before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

ROWS = (
    ("import mlx_h2o", "", "import mlx_h2o"),
    ("import mlx_lm", "", "import mlx_lm"),
    ("mlx_h2o.make_prompt_cache, after mlx_lm", "mlx_lm", "mlx_h2o.make_prompt_cache"),
)
PROGRAM = """
import mlx.core, mlx.nn, time
{before}
start = time.perf_counter()
import {module}
{after}
print(time.perf_counter() - start)
"""


def seconds(before: str, statement: str) -> float:
    """The time of a statement in a new interpreter.

    Args:
        before: A module to import first, or "".
        statement: "import MODULE", or "mlx_h2o.NAME", whose use imports NAME's module.
    """
    imports = statement.startswith("import ")
    program = PROGRAM.format(
        before=f"import {before}" if before else "",
        module=statement.removeprefix("import ") if imports else "mlx_h2o",
        after="" if imports else statement,
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return float(ran.stdout)


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print("| beyond mlx | seconds |\n|---|---:|")
    for name, before, statement in ROWS:
        print(f"| {name} | {min(seconds(before, statement) for _ in range(runs)):.2f} |")


if __name__ == "__main__":
    main()
