"""The record of a run: one JSON line for each cell, so that a later run can go on.

The repository keeps such records, too, with the means of each sample instead of its tokens
(`docs/results/board/`), so that another machine can go on.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: A cell's scores, or {"failed": why}.
Outcome = dict[str, Any]
#: Scores of a cell that are lists of rows, and their digits in the repository.
BY_TOKEN, DIGITS = ("kl", "changed", "nll"), 7


class Cell(NamedTuple):
    """A place on the board.

    Attributes:
        model: The model's name.
        task: The task's name.
        rival: The rival's name.
        share: The part of the bytes; None for rivals that keep every token.
    """

    model: str
    task: str
    rival: str
    share: float | None


class Record:
    """Cells that were measured, on disk.

    Args:
        path: The file; it is made if it is not there.
        protocol: Everything on which scores depend, as JSON types. Cells of another protocol are
            not used.
        resume: Whether cells that were measured before are used; if not, the file begins anew.
        kept: The repository's record. Its cells are used where the file has none.

    Raises:
        ValueError: The file holds cells of another protocol.
    """

    def __init__(
        self, path: Path, protocol: dict[str, Any], resume: bool, copy: Path | None = None
    ):
        self.path, self.protocol = path, protocol
        self.outcomes: dict[Cell, Outcome] = {}
        if resume and copy is not None and copy.exists() and self._is_of(copy):
            self.outcomes |= _cells(copy)
        if not (resume and path.exists()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._first(), encoding="utf-8")
            return
        if not self._is_of(path):
            raise ValueError(
                f"{path} has cells of other settings: give another --record, or no --resume."
            )
        self.outcomes |= _cells(path)

    def _first(self) -> str:
        return json.dumps({"protocol": self.protocol}) + "\n"

    def _is_of(self, path: Path) -> bool:
        with path.open(encoding="utf-8") as file:
            return file.readline() == self._first()

    def has(self, cell: Cell, at: str | None = None) -> bool:
        """Whether a cell was measured; one that failed is tried again.

        Args:
            cell: The cell.
            at: The commit at which it must have been measured; None: any.
        """
        outcome = self.outcomes.get(cell, {"failed": "not measured yet"})
        return "failed" not in outcome and at in (None, outcome.get("commit"))

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Keep a cell, on disk as well."""
        self.outcomes[cell] = outcome
        # One write for a line, so that runs of different rivals may share a record.
        with self.path.open("ab", buffering=0) as file:
            file.write(_line(cell, outcome).encode())

    def keep(self, path: Path) -> None:
        """Write all cells as the repository keeps them: in order, with the means of each sample."""
        path.parent.mkdir(parents=True, exist_ok=True)
        ordered = sorted(self.outcomes, key=lambda cell: (cell.task, cell.rival, cell.share or 0))
        lines = [_line(cell, by_sample(self.outcomes[cell])) for cell in ordered]
        path.write_text("".join([self._first(), *lines]), encoding="utf-8")


def by_sample(outcome: Outcome) -> Outcome:
    """A cell's scores with one mean for each sample in the place of its tokens' scores."""
    means = {
        name: [[round(statistics.fmean(row), DIGITS)] for row in outcome[name]]
        for name in BY_TOKEN
        if name in outcome
    }
    return {**outcome, **means}


def _line(cell: Cell, outcome: Mapping[str, Any]) -> str:
    return json.dumps({"cell": cell, "found": outcome}) + "\n"


def _cells(path: Path) -> dict[Cell, Outcome]:
    def each() -> Iterator[tuple[Cell, Outcome]]:
        for line in path.read_text(encoding="utf-8").splitlines()[1:]:
            try:
                one = json.loads(line)
            except json.JSONDecodeError:  # the run was killed while it wrote the last line
                continue
            yield Cell(*one["cell"]), one["found"]

    return dict(each())
