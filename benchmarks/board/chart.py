"""The board's chart: divergence over bytes, a line for each rival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.board.cells import Cell, Outcome
from benchmarks.board.rivals import OURS, Rival
from benchmarks.board.summaries import Summary
from benchmarks.board.tables import summaries
from benchmarks.board.tasks import TEXTS_TASK
from mlx_h2o.evaluate.methods import share_label
from mlx_h2o.evaluate.plotting import drawing

#: The rivals that are named on their lines; the others are grey.
NAMED = {
    OURS: "black",
    "mlx-h2o, read twice": "#1b9e9e",
    "mlx-h2o compress": "#2a7f62",
    "mlx-h2o, rows come back": "#55a868",
    "kvpress KVzip": "#8172b3",
    "kvpress H2O": "#4c72b0",
    "kvpress SnapKV": "#64b5cd",
    "mlx-lm, sliding window": "#c44e52",
    "mlx-lm, 4 bits": "#ccb974",
    "mlx-lm, 8 bits": "#b8860b",
    "turboquant-mlx-full, 4 and 3 bits": "#dd8452",
}
OTHERS = "#d4d4d4"
#: The least factor between the heights of two names, so that both can be read.
APART = 1.3


def draw(
    outcomes: Mapping[Cell, Outcome], models: Sequence[str], rivals: Sequence[Rival], path: Path
) -> None:
    """Draw one panel for each model, as SVG or PNG by the path's suffix.

    Args:
        outcomes: All cells.
        models: The models.
        rivals: The rivals; those without figures are left out.
        path: The file to write.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = drawing()
    pyplot.rcParams |= {"svg.hashsalt": "mlx-h2o", "savefig.facecolor": "white"}
    of_texts = {cell.share for cell in outcomes if cell.share and cell.task == TEXTS_TASK}
    shares = sorted(of_texts, reverse=True)
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(6.4 * len(models), 6), squeeze=False, layout="constrained"
    )
    for panel, model in zip(panels[0], models, strict=True):
        of_model = summaries(outcomes, model, rivals, shares)
        names = []
        for rival in rivals:
            points = sorted(_points(of_model, rival.name))
            if not points:
                continue
            x, y = [x for x, _ in points], [max(y, 1e-6) for _, y in points]
            colour = NAMED.get(rival.name, OTHERS)
            width = 3.0 if rival.name == OURS else 2.0 if rival.name in NAMED else 0.8
            mark = "s" if rival.keeps_all else "-o"
            panel.plot(x, y, mark, color=colour, linewidth=width, markersize=2 * width)
            if rival.name in NAMED and rival.keeps_all:
                panel.annotate(f"  {rival.name}", (x[0], y[0]), color=colour, va="center")
            elif rival.name in NAMED:
                names.append((y[0], x[0], rival.name, colour))
        height = 0.0
        for y0, x0, name, colour in sorted(names):
            height = max(y0, height * APART)
            panel.annotate(
                name, (x0, y0), (min(shares) * 0.9, height), color=colour, fontsize=9,
                ha="right", va="center", arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.4},
            )  # fmt: skip
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlim(min(shares) / 7, 4)
        panel.set_xticks(shares, [share_label(share) for share in shares])
        panel.set_title(model)
        panel.set_xlabel("part of the full 16-bit cache's bytes (squares: own bytes; grey: others)")
        panel.set_ylabel("KL from the full cache, nats (less is better)")
        panel.grid(alpha=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _points(of_model: Sequence[Summary], rival: str) -> list[tuple[float, float]]:
    """Part of the bytes and divergence; caches that keep every token stand at their own bytes."""
    full = max((one.counted / one.share for one in of_model if one.share), default=0)
    return [
        (one.share or one.counted / full, one.kl) for one in of_model if one.rival == rival and full
    ]
