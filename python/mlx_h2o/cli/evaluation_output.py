"""Output of the measuring commands: kept measurements, a progress bar, tables, a page's head."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from mlx_h2o._utils.progress import Told, progress_bar
from mlx_h2o.evaluate.measurements import Measurements
from mlx_h2o.evaluate.sections import Rows
from mlx_h2o.evaluate.suite import Evaluation, Suite
from mlx_h2o.loading.demo_model import cache_folder


def place_of(measurements: Measurements) -> Path:
    """The file of this user's unfinished measurements, if no other place is given."""
    settings = json.dumps(measurements.settings, sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()
    return cache_folder() / "evaluations" / f"{digest[:32]}.json"


def begun(suite: Suite, kept: Path | None, resume: bool, anew: bool) -> Evaluation:
    """A new evaluation, or the unfinished one with the same settings.

    Args:
        suite: The measures and contenders.
        kept: The folder of --out; None: the user's cache folder, until all is measured.
        resume: Whether it is an error if there is nothing to continue.
        anew: Whether to ignore earlier measurements.

    Raises:
        ValueError: There is nothing to continue, or it is of another suite.
    """
    evaluation = Evaluation.begin(suite, kept, resume)
    if not resume and not anew:
        take_up(evaluation, kept)
    return evaluation


def take_up(measurements: Measurements, kept: Path | None = None) -> None:
    """Continue unfinished measurements with the same settings, and say so.

    Args:
        measurements: New measurements.
        kept: The file that may hold earlier ones; None: the one in the user's cache folder.
    """
    file = kept or place_of(measurements)
    if measurements.take_up(file):
        print(
            f"Going on after {measurements.measured} of {measurements.measurements} measurements, "
            f"which {file} holds (--anew begins anew).",
            file=sys.stderr,
        )


def measure_all(evaluation: Evaluation, kept: Path | None, title: str) -> None:
    """Do all remaining jobs with a progress bar, writing each result to a file.

    Args:
        evaluation: The evaluation to complete.
        kept: The file; None: one in the user's cache folder, removed once all is measured.
        title: The bar's title.
    """
    with measuring(evaluation, title, kept=kept) as (bar, keep):
        evaluation.run(bar, keep)


@contextmanager
def measuring(
    measurements: Measurements, title: str, unit: str = "", kept: Path | None = None
) -> Iterator[tuple[Told, Callable[[], None]]]:
    """Show progress, and if it is interrupted, where the measurements are.

    Args:
        measurements: The measurements in progress.
        title: The bar's title.
        unit: The bar's unit.
        kept: The file; None: one in the user's cache folder, removed once all is measured.

    Yields:
        The bar, and a function that saves the measurements so far.
    """
    file = kept or place_of(measurements)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with progress_bar(title, unit) as bar:
            yield bar, lambda: measurements.save(file)
    except KeyboardInterrupt:
        if measurements.measured:
            print(
                f"{measurements.measured} of {measurements.measurements} measurements are in "
                f"{file}: the same command goes on after them.",
                file=sys.stderr,
            )
        raise
    if kept is None:
        file.unlink(missing_ok=True)


def told(machine: dict[str, Any]) -> str:
    """The machine in a line."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; "
        f"BLAS: {machine['blas']}; mlx {machine['versions']['mlx']}"
    )


def facts_of(evaluation: Evaluation) -> dict[str, str]:
    """The circumstances of an evaluation, for the page's head."""
    suite, machine = evaluation.suite, evaluation.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return {
        "model": suite.stage.model_name,
        "text": suite.settings()["text"],
        "machine": f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}",
        "BLAS": machine["blas"],
        "versions": versions,
        "date": machine["date"],
        "seed": str(suite.stage.seed),
        "prompts are read": f"{suite.stage.chunk} tokens at once",
    }


def rich_table(rows: Rows, title: str) -> Table:
    """A section's table for a terminal."""
    made = Table(title=": ".join(filter(None, (title, rows.title))), caption=rows.caption or None)
    for i, column in enumerate(rows.columns):
        made.add_column(column, justify="right" if i else "left")
    for row in rows.rows:
        made.add_row(*row)
    return made
