"""What a measure has to say: tables and charts, however they will be shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rows:
    """A table.

    Attributes:
        title: Above it.
        columns: Headings; the first column is text, the others are figures.
        rows: Cells as text.
        caption: Below it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Curves:
    """Lines over a number.

    Attributes:
        title: Above them.
        x: Where points lie.
        lines: By name, a value for each x; None where there is none.
        bands: By the same names, the lowest and highest values where they are known.
        across: What x is.
        up: What the values are.
        logarithmic: Whether x is drawn on a logarithmic scale of base 2.
    """

    title: str
    x: Sequence[float]
    lines: Mapping[str, Sequence[float | None]]
    across: str
    up: str
    bands: Mapping[str, Sequence[tuple[float, float] | None]] = field(default_factory=dict)
    logarithmic: bool = False


@dataclass(frozen=True)
class Maps:
    """Grids of values from 0 to 1, one beside the other.

    Attributes:
        title: Above them.
        grids: By name, rows of values; None where nothing was measured.
        across: What columns are.
        down: What rows are.
        columns: Labels of the columns, or none.
        rows: Labels of the rows, or none.
        numbers: Whether values are written into their cells.
    """

    title: str
    grids: Mapping[str, Sequence[Sequence[float | None]]]
    across: str
    down: str
    columns: Sequence[str] = ()
    rows: Sequence[str] = ()
    numbers: bool = False


Chart = Curves | Maps


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: Of the measure.
        about: What was done, in a sentence or two.
        tables: In order.
        charts: In order.
    """

    title: str
    about: str
    tables: Sequence[Rows] = ()
    charts: Sequence[Chart] = ()
