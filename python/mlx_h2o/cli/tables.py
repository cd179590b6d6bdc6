"""Tables on standard output: no figure is ever cut; a narrow terminal gets fewer columns."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mlx_h2o.evaluate.report import Rows

# Wider than any table, so that no cell is folded or cut.
UNLIMITED = 10_000
GAP = "  "


def show(table: Table, markdown: bool = False) -> None:
    """Print a table: with lines on a terminal that it fits, as plain text otherwise.

    Args:
        table: The table to print.
        markdown: Whether to print it as Markdown, wherever it goes.
    """
    console = Console()
    wide = Console(width=UNLIMITED)
    if markdown:
        caption = f"\n{text_of(table.caption)}" if table.caption else None
        wide.print(f"{table.title}\n", highlight=False)
        table.title, table.caption, table.box = None, None, box.MARKDOWN
        wide.print(table)
        if caption:
            wide.print(caption, highlight=False)
    elif not console.is_terminal:
        print(aligned(table))
    else:
        dropped: list[str] = []
        while len(table.columns) > 2 and _width(table) > console.width:
            dropped.insert(0, text_of(table.columns.pop().header))
        if _width(table) <= console.width:
            console.print(table)
        else:  # the terminal folds its lines
            print(aligned(table))
        if dropped:
            names = ", ".join(filter(None, dropped))
            print(f"Left out for want of width: {names}. A file or a pipe gets every column.")


def _width(table: Table) -> int:
    """The columns of a terminal that a table needs."""
    wide = Console(width=UNLIMITED)
    return Measurement.get(wide, wide.options, table).maximum


def cells_of(table: Table) -> list[list[str]]:
    """The header and the rows of a table, as text."""
    columns = [[text_of(column.header), *map(text_of, column.cells)] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def text_of(cell: Any) -> str:
    """A cell without its colours."""
    return (cell.plain if isinstance(cell, Text) else str(cell)).strip()


def aligned(table: Table) -> str:
    """One line for each row, as wide as needed, for files and other programs."""
    rows = cells_of(table)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [column.justify == "right" for column in table.columns]
    lines = [
        GAP.join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
    return framed(table, lines)


def framed(table: Table, lines: list[str]) -> str:
    """Lines with a table's title above and its caption below."""
    caption = [text_of(table.caption)] if table.caption else []
    return "\n".join([text_of(table.title), *lines, *caption])


def rich_table(rows: Rows, title: str = "") -> Table:
    """A report's table for `show`.

    Args:
        rows: The table.
        title: The title of its section.
    """
    made = Table(title=": ".join(filter(None, (title, rows.title))), caption=rows.caption or None)
    for i, column in enumerate(rows.columns):
        made.add_column(column, justify="right" if i else "left")
    for row in rows.rows:
        made.add_row(*row)
    return made


def machine_line(machine: dict[str, Any]) -> str:
    """The machine of some figures, in a line."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; "
        f"BLAS: {machine['blas']}; mlx {machine['versions']['mlx']}"
    )
