"""Tables on standard output: no figure is ever cut, however narrow the terminal is."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

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
    elif Measurement.get(wide, wide.options, table).maximum <= console.width:
        console.print(table)
    else:
        print(one_below_the_other(table))


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


def one_below_the_other(table: Table) -> str:
    """Each row's cells below each other, for terminals narrower than the table."""
    header, *rows = cells_of(table)
    named = [f"{name}: " if name else "" for name in header]
    blocks = [
        f"\n{GAP}".join(name + cell for name, cell in zip(named, row, strict=True)) for row in rows
    ]
    return framed(table, blocks)


def framed(table: Table, lines: list[str]) -> str:
    """Lines with a table's title above and its caption below."""
    caption = [text_of(table.caption)] if table.caption else []
    return "\n".join([text_of(table.title), *lines, *caption])
