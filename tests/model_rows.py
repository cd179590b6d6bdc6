"""Rows of the models' pages: those with equal cells are one, with all of their models' names."""

from collections.abc import Iterable
from itertools import groupby


def cells_of(row: str) -> list[str]:
    """The cells of a row, with the model's name first."""
    return [cell.strip() for cell in row.strip("|\n").split(" | ")]


def rows_of(page: str) -> dict[str, str]:
    """A page's rows by model, each as if it had one of its own."""
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    return {
        name: f"| {name}{line[1 + len(names) + 1 :]}"
        for line in lines
        for names in [cells_of(line)[0]]
        for name in names.split(", ")
    }


def table_of(rows: Iterable[str]) -> str:
    """The lines of a table: models with equal cells in one, most models first."""

    def rest(row: str) -> str:
        return row.partition(" | ")[2]

    ordered = sorted(rows, key=lambda row: (rest(row), cells_of(row)[0]))
    groups = [list(group) for _, group in groupby(ordered, key=rest)]
    groups.sort(key=lambda group: (-len(group), cells_of(group[0])[0]))
    return "".join(
        f"| {', '.join(cells_of(row)[0] for row in group)} | {rest(group[0])}\n" for group in groups
    )
