"""The record of a run: one JSON line for each cell, so that a later run can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

#: A cell's scores, or {"failed": why}.
Found = dict[str, Any]


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
        path: The file; it is made when the first cell is added.
        protocol: Everything on which scores depend, as JSON types. Cells of another protocol are
            not used.
        resume: Whether cells that the file holds are used; if not, the file begins anew.

    Raises:
        ValueError: The file holds cells of another protocol.
    """

    def __init__(self, path: Path, protocol: dict[str, Any], resume: bool):
        self.path, self.protocol = path, protocol
        self.found: dict[Cell, Found] = dict(self._read()) if resume and path.exists() else {}
        if not self.found:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"protocol": protocol}) + "\n", encoding="utf-8")

    def _read(self) -> Iterator[tuple[Cell, Found]]:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        if not lines or json.loads(lines[0]) != {"protocol": json.loads(json.dumps(self.protocol))}:
            raise ValueError(
                f"{self.path} has cells of other settings: give another --record, or no --resume."
            )
        for line in lines[1:]:
            try:
                one = json.loads(line)
            except json.JSONDecodeError:  # the run was killed while it wrote the last line
                continue
            yield Cell(*one["cell"]), one["found"]

    def has(self, cell: Cell) -> bool:
        """Whether a cell was measured; one that failed is tried again."""
        return "failed" not in self.found.get(cell, {"failed": "not measured yet"})

    def add(self, cell: Cell, found: Found) -> None:
        """Keep a cell, on disk as well."""
        self.found[cell] = found
        line = json.dumps({"cell": cell, "found": found}) + "\n"
        # One write for a line, so that runs of different rivals may share a record.
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())
