"""What measuring commands show: a bar, tables, and the facts at a page's head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from mlx_h2o.cli.progress import progress_bar
from mlx_h2o.evaluate.sections import Rows
from mlx_h2o.evaluate.suite import Evaluation


def measure_all(evaluation: Evaluation, kept: Path | None, title: str) -> None:
    """Do what is still to do, with a bar, keeping what was found in a file."""
    with progress_bar(title, "tokens") as bar:
        evaluation.run(bar, lambda: evaluation.save(kept) if kept else None)


def told(machine: dict[str, Any]) -> str:
    """The machine in a line."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; "
        f"BLAS: {machine['blas']}; mlx {machine['versions']['mlx']}"
    )


def facts_of(evaluation: Evaluation) -> dict[str, str]:
    """What was measured on what, for the page's head."""
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
