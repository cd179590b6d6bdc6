"""Golden vectors through the default device (docs/reference/golden.md), if they are at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_h2o.attention.backends import choice
from mlx_h2o.doctor.machine import PACKAGE
from mlx_h2o.doctor.report import Begun, Over, Section
from mlx_h2o.golden.manifest import GoldenError
from mlx_h2o.golden.verify import backends, verify

#: Where a checkout has them.
FOLDER = PACKAGE.parents[1] / "golden"
# The files tolerate what CPUs differ by. A GPU's exponentials are rougher.
MOST_ON_GPU = 10.0


def section(
    begun: Begun,
    every: int,
    progress: Callable[[str], None],
    over: Over = lambda: False,
    folder: Path = FOLDER,
) -> None:
    """Replay them.

    Args:
        begun: Takes the section.
        every: N, to replay every Nth case.
        progress: Told each case's name.
        over: Whether there is time for no more.
        folder: Where they lie.
    """
    which = "all" if every == 1 else f"one of {every}"
    found = begun(
        Section(
            "golden",
            f"golden vectors, {which}",
            ("group", "cases", "worst error / tolerated", "differences"),
            data=[],
        )
    )
    most = 1.0 if choice.gpu() is None else MOST_ON_GPU
    try:
        verdicts = verify(folder, backends()[-1:], progress, every, over)
    except GoldenError as error:
        found.notes.append(f"Not replayed: {error}")
        return
    for verdict in verdicts:
        bad = [difference for difference in verdict.differences if difference.size > most]
        found.rows.append(
            (verdict.group, str(verdict.cases), f"{verdict.worst:.2f}", str(len(bad)))
        )
        found.data.append({"group": verdict.group, "cases": verdict.cases, "worst": verdict.worst})
        found.failures += map(str, bad)
    if over():
        found.notes.append("Time was over before all of them: the counts are those replayed.")
    if most > 1:
        found.notes.append(
            f"On a GPU {most:g} times the tolerance of the files is tolerated; the worst is told."
        )
