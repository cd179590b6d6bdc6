"""Tables on standard output: no figure is ever cut; a narrow terminal gets fewer columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rich.table
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from mlx_h2o.evaluate.report import Table

# Wider than any table, so that no cell is folded or cut.
UNLIMITED = 10_000
GAP = "  "


def show(table: Table, markdown: bool = False) -> None:
    """Print a table: with lines on a terminal that it fits, as plain text otherwise.

    Args:
        table: The table to print.
        markdown: Whether to print it as Markdown, wherever it goes.
    """
    console, wide = Console(), Console(width=UNLIMITED)
    if markdown:
        print(f"{table.title}\n")
        wide.print(_drawn(table.columns, table, box=box.MARKDOWN))
        if table.caption:
            print(f"\n{table.caption}")
        return
    if not console.is_terminal:
        print(aligned(table, table.columns))
        return

    def width_of(drawn: rich.table.Table) -> int:
        return Measurement.get(wide, wide.options, drawn).maximum

    columns, left_out = list(table.columns), list[str]()
    words = {"title": table.title, "caption": table.caption or None}
    while len(columns) > 2 and width_of(_drawn(columns, table, **words)) > console.width:
        left_out.insert(0, columns.pop())
    drawn = _drawn(columns, table, **words)
    if width_of(drawn) <= console.width:
        console.print(drawn)
    else:  # the terminal folds its lines
        print(aligned(table, columns))
    if left_out:
        names = ", ".join(filter(None, left_out))
        print(f"Left out for want of width: {names}. A file or a pipe gets every column.")


def _drawn(columns: Sequence[str], table: Table, **options: Any) -> rich.table.Table:
    """The first columns of a table as rich draws them."""
    made = rich.table.Table(**options)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i in table.texts else "right")
    for row in table.rows:
        made.add_row(*map(Text, row[: len(columns)]))
    return made


def aligned(table: Table, columns: Sequence[str]) -> str:
    """One line for each row of the first columns, as wide as needed, between title and caption."""
    rows = [columns, *(row[: len(columns)] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        GAP.join(
            cell.ljust(width) if i in table.texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([table.title, *lines, *([table.caption] if table.caption else [])])


def machine_line(machine: dict[str, Any]) -> str:
    """The machine of some figures, in a line."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; "
        f"BLAS: {machine['blas']}; mlx {machine['versions']['mlx']}"
    )
