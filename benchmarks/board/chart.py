"""The board's chart: divergence over bytes, a line for each rival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.board.cells import Cell, Found
from benchmarks.board.rivals import OURS, Rival
from benchmarks.board.summaries import Summary
from benchmarks.board.tables import summaries
from benchmarks.board.tasks import TEXTS_TASK
from mlx_h2o._utils.plotting import drawing
from mlx_h2o.evaluate.contenders import label

STROKES = ("-", "--", ":", "-.")


def draw(
    found: Mapping[Cell, Found], models: Sequence[str], rivals: Sequence[Rival], path: Path
) -> None:
    """Draw one panel for each model, as SVG or PNG by the path's suffix.

    Args:
        found: All cells.
        models: The models.
        rivals: The rivals; those without figures are left out.
        path: The file to write.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = drawing()
    pyplot.rcParams |= {"svg.hashsalt": "mlx-h2o", "savefig.facecolor": "white"}
    of_texts = {cell.share for cell in found if cell.share and cell.task == TEXTS_TASK}
    shares = sorted(of_texts, reverse=True)
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(5.2 * len(models) + 2.6, 5.4), squeeze=False, layout="constrained"
    )
    palette = pyplot.get_cmap("tab10")
    lines = {}
    for panel, model in zip(panels[0], models, strict=True):
        of_model = summaries(found, model, rivals, shares)
        for i, rival in enumerate(rivals):
            points = sorted(_points(of_model, rival.name))
            if not points:
                continue
            ours = rival.name.startswith(OURS)
            (lines[rival.name],) = panel.plot(
                [x for x, _ in points],
                [max(y, 1e-6) for _, y in points],
                "s" if rival.keeps_all else STROKES[i if ours else i // 10 % 4] + "o",
                color="black" if ours else palette(i % 10),
                linewidth=2.6 if rival.name == OURS else 2.0 if ours else 1.1,
                markersize=6 if ours else 3.5,
                zorder=3 if ours else 2,
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(shares, [label(share) for share in shares])
        panel.set_title(model)
        panel.set_xlabel("part of the prompt's full 16-bit cache (squares: own bytes)")
        panel.set_ylabel("KL from the full cache, nats (less is better)")
        panel.grid(alpha=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside right upper",
        fontsize=6,
        frameon=False,
        labelspacing=0.3,
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _points(of_model: Sequence[Summary], rival: str) -> list[tuple[float, float]]:
    """Part of the bytes and divergence; caches that keep every token stand at their own bytes."""
    full = max((one.counted / one.share for one in of_model if one.share), default=0)
    return [
        (one.share or one.counted / full, one.kl) for one in of_model if one.rival == rival and full
    ]
