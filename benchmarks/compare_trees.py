"""Decode speed of two checkouts, each with its own .venv, in runs that take turns.

    python -m benchmarks.compare_trees OLD [NEW] [--rounds 9]

Prints the median time of a step of the embedded model in each, and the median of the rounds'
ratios: a machine's moods affect both runs of a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "distinct, 512 tokens": {"policy": "distinct", "max_size": 512},
    "h2o, 512 tokens": {"policy": "h2o", "max_size": 512},
    "h2o, 512 tokens, no remainder": {"policy": "h2o", "max_size": 512, "remainder": False},
    "distinct, 200 tokens": {"policy": "distinct", "max_size": 200},
}
# This runs in either checkout, so it uses only names that both have.
STEPS = """
import json, statistics, sys, time
import mlx.core as mx
from mlx_h2o import load, make_prompt_cache
model, tokenizer = load("builtin:recall-4m")
token, prompt = mx.array([[3]]), mx.array([[i % 500 for i in range(700)]])
medians = []
for settings in json.loads(sys.argv[1]):
    cache = make_prompt_cache(model, budgets="uniform", **settings)
    mx.eval(model(prompt, cache=cache))
    times = []
    for _ in range(330):
        start = time.perf_counter()
        mx.eval(model(token, cache=cache))
        times.append(time.perf_counter() - start)
    medians.append(1e3 * statistics.median(times[30:]))
print(json.dumps(medians))
"""


def milliseconds(tree: Path) -> list[float]:
    """Medians of a step, one for each setting."""
    command = [tree / ".venv/bin/python", "-c", STEPS, json.dumps(list(SETTINGS.values()))]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    medians: list[float] = json.loads(run.stdout.splitlines()[-1])
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    trees = (arguments.old.resolve(), arguments.new.resolve())
    samples: dict[Path, list[list[float]]] = {tree: [] for tree in trees}
    for number in range(arguments.rounds):
        for tree in trees if number % 2 else reversed(trees):
            samples[tree].append(milliseconds(tree))
    for i, name in enumerate(SETTINGS):
        old, new = ([times[i] for times in samples[tree]] for tree in trees)
        ratio = statistics.median(b / a for a, b in zip(old, new, strict=True))
        print(f"{name}: {statistics.median(old):.2f} ms, then {statistics.median(new):.2f} ms")
        print(f"    ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
