"""The comparison as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlx_h2o._utils.plotting import drawing
from mlx_h2o.evaluate.arms import FULL, PACKED, WINDOW
from mlx_h2o.evaluate.comparison import Result

_COLOURS = {FULL: "#8c8c8c", WINDOW: "#c44e52", **dict.fromkeys(PACKED, "#c9a227")}
_OURS, _OURS_WITHOUT = "#2a7f62", "#9fcbb9"


def draw(results: Sequence[Result], title: str, path: str | Path) -> None:
    """Perplexity loss and facts recalled, side by side, as a PNG.

    Args:
        results: The arms' results.
        title: The chart's title.
        path: The file to write.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = drawing()
    names = [result.arm for result in results]
    colours = [
        _COLOURS.get(name, _OURS_WITHOUT if "no remainder" in name else _OURS) for name in names
    ]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 1.2 + 0.42 * len(names)), sharey=True, layout="constrained"
    )
    rows = range(len(names))
    losses = [100 * result.loss for result in results]
    left.barh(rows, losses, color=colours)
    left.set_yticks(rows, names)
    left.invert_yaxis()
    left.set_xlabel("perplexity above the full cache's, % (less is better)")
    shares = [result.recalled for result in results]
    right.barh(rows, shares, color=colours)
    right.set_xlabel(f"facts recalled, of {results[0].asked} (more is better)")
    for row, (loss, share) in enumerate(zip(losses, shares, strict=True)):
        left.annotate(f" {loss:+.1f}", (max(loss, 0), row), va="center", fontsize=9)
        right.annotate(f" {share}", (share, row), va="center", fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
