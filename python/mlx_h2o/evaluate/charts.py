"""Charts as SVG in the page's own ink, so that one drawing serves light and dark."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from mlx_h2o.evaluate.methods import OURS, PACKED, WINDOW
from mlx_h2o.evaluate.plotting import drawing
from mlx_h2o.evaluate.report import Curves

# Stands for the page's own ink until the drawing is text.
INK = "#010203"
OTHERS = ("#4c78a8", "#8e6bbd", "#d17a22", "#5fa2ce", "#b3589a", "#7f7f3f", "#3f9d8f", "#a05a5a")
STROKES = ("-", "--", "-.", ":")
WIDTH = 8.5


def looks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a stroke for each line: each cache has a colour, each of its sizes a stroke."""
    own = {OURS: "#2a9d6f", WINDOW: "#c44e52"}
    own |= dict(zip(PACKED, ("#c9a227", "#a9812f"), strict=False))
    free = iter(OTHERS * (1 + len(names) // len(OTHERS)))
    drawn, chosen = dict[str, int](), dict[str, tuple[str, str]]()
    for name in names:
        arm = name if name in own else name.rpartition(", ")[0] or name
        if arm not in own:
            own[arm] = next(free)
        drawn[arm] = drawn.get(arm, -1) + 1
        chosen[name] = own[arm], STROKES[drawn[arm] % len(STROKES)]
    return chosen


def svg(chart: Curves) -> str:
    """A chart as one `<svg>` element.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = drawing()
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style = {**dict.fromkeys(inked, INK), "svg.fonttype": "none", "font.size": 9}
    style |= {"svg.hashsalt": chart.title, "font.family": "sans-serif"}
    with pyplot.rc_context(style):
        figure = _curves(pyplot, chart)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    text = written.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def _curves(pyplot: Any, chart: Curves) -> Any:
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.6), layout="constrained")
    for name, (colour, stroke) in looks(list(chart.lines)).items():
        points = [
            (x, y, band)
            for x, y, band in zip(
                chart.x,
                chart.lines[name],
                chart.bands.get(name) or [None] * len(chart.x),
                strict=True,
            )
            if y is not None
        ]
        if not points:
            continue
        x, y = [p[0] for p in points], [p[1] for p in points]
        axes.plot(x, y, stroke, marker="o", color=colour, label=name, markersize=4, linewidth=1.6)
        if all(band for *_, band in points):
            low, high = zip(*(band for *_, band in points), strict=True)
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    if chart.logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"1/{1 / x:.0f}" if x < 1 else f"{x:g}")
    elif len(chart.x) <= 12:
        axes.set_xticks(chart.x, [f"{x:g}" for x in chart.x])
    axes.set_xlabel(chart.across)
    axes.set_ylabel(chart.up)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=INK, alpha=0.12, linewidth=0.6)
    if chart.lines:
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure
