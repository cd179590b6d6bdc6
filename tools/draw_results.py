"""Draw docs/results/smollm2.svg from the results' tables, those of the page and those of data/.

python tools/draw_results.py [OUT]
"""

from __future__ import annotations

import argparse
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

from mlx_h2o.evaluate.plotting import drawing

RESULTS = Path(__file__).parents[1] / "docs" / "results"
OUT = RESULTS / "smollm2.svg"
#: Tokens of a sample; each cache gets a part of their bytes.
TOKENS = 1024
COMMAND = "mlx_h2o evaluate --preset compare --model smollm2-135m --text alice.txt"
FILES = ("index.json", "data/smollm2.json")
NAMES = {"sliding window": "sliding window", "h2o": "H2O", "mlx-h2o": "mlx-h2o"}
COLOURS = {"sliding window": "#8c8c8c", "H2O": "#4c72b0", "mlx-h2o": "#2a7f62"}
PACKED, PACKED_COLOUR = "mlx-lm, 4 bits", "#ccb974"


def rows_of(command: str) -> list[dict[str, str]]:
    """The rows of the tables of the commands that begin with `command`, by column."""
    records = [json.loads((RESULTS / file).read_text()).items() for file in FILES]
    return [
        dict(zip(table["columns"], row, strict=True)) | {"command": name}
        for name, record in chain.from_iterable(records)
        if name.startswith(command)
        for table in record["tables"]
        for row in table["rows"]
    ]


def size_of(row: dict[str, str]) -> int:
    """The tokens whose bytes a row's cache holds."""
    match = re.search(r", (\d+) tokens$", row["cache"])
    only = re.search(r"--max-kv-size (\d+)", row["command"])
    if match or only:
        return int((match or only)[1])  # type: ignore[index]
    raise ValueError(f"The size of {row['cache']!r} is not known.")


def name_of(row: dict[str, str]) -> str | None:
    """The chart's name of a row's cache; None for caches that are left out."""
    return NAMES.get(re.split("[,:]", row["cache"])[0])


def losses() -> dict[str, list[tuple[int, float, float]]]:
    """By cache: size in tokens, loss in percent and its standard error, the largest size first."""
    command = f"{COMMAND} --measures perplexity --size perplexity.samples=8"
    series: dict[str, list[tuple[int, float, float]]] = {name: [] for name in COLOURS}
    for row in rows_of(command):
        number = re.match(r"([+-][\d.]+) ± ([\d.]+) %", row["loss"])
        if (name := name_of(row)) and number:
            series[name].append((size_of(row), float(number[1]), float(number[2])))
    return {name: sorted(points, reverse=True) for name, points in series.items()}


def facts() -> dict[str, dict[int, int]]:
    """By cache: facts known at each size in tokens; at 0 those of mlx-lm's packed cache."""
    command = f"{COMMAND} --measures needles"
    counts: dict[str, dict[int, int]] = {}
    for row in rows_of(command):
        right = int((row.get("facts") or row["unseen: all"]).split("/")[0])
        if row["cache"] == PACKED:
            counts[PACKED] = {0: right}
        elif name := name_of(row):
            counts.setdefault(name, {})[size_of(row)] = right
    return counts


def draw(path: Path) -> None:
    """Draw losses over sizes, and facts."""
    pyplot = drawing()
    pyplot.rcParams |= {"svg.hashsalt": "mlx-h2o", "savefig.facecolor": "white"}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for name, points in losses().items():
        sizes, values, errors = zip(*points, strict=True)
        parts = [size / TOKENS for size in sizes]
        style: dict[str, Any] = {"color": COLOURS[name], "label": name, "marker": "o"}
        left.errorbar(parts, values, errors, markersize=4, capsize=2, **style)
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.invert_xaxis()
    ticks = (2, 4, 8, 16)
    left.set_xticks([1 / n for n in ticks], [f"1/{n}" for n in ticks])
    shown = (0.1, 1, 10)
    left.set_yticks(shown, [f"{x:g} %" for x in shown])
    left.set_xlabel("part of the full cache's bytes")
    left.set_title("Loss of perplexity, 1,024 tokens of a novel", loc="left", fontsize=10)
    left.legend(frameon=False, fontsize=9)
    bars = [
        (f"{name}, 1/{TOKENS // size}" if size else f"{name}, 0.28", count, name)
        for name, known_at in facts().items()
        for size, count in known_at.items()
    ]
    bars.sort(key=lambda bar: ("1/8" in bar[0], -bar[1]))
    for at, (_, count, name) in enumerate(reversed(bars)):
        right.barh(at, count, color=COLOURS.get(name, PACKED_COLOUR))
        right.text(count + 0.3, at, str(count), va="center", fontsize=9)
    right.set_yticks(range(len(bars)), [label for label, _, _ in reversed(bars)], fontsize=9)
    right.axvline(23, color="black", linewidth=0.8, linestyle=":")
    right.set_title("Facts known, of the full cache's 23", loc="left", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Parse and draw."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("out", nargs="?", type=Path, default=OUT)
    draw(options.parse_args().out)


if __name__ == "__main__":
    main()
