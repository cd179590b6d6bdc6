"""The contents of a report: tables and charts, independent of the way they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: The text above the table.
        columns: Headings.
        rows: Cells as text.
        caption: The text below the table.
        texts: The places of the columns of text; the others are figures.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    texts: Sequence[int] = (0,)


@dataclass(frozen=True)
class Curves:
    """Curves over a number.

    Attributes:
        title: The text above the curves.
        x: The points' values of x.
        lines: By name, a value for each x; None where there is no value.
        bands: By the same names, the lowest and highest values where they are known.
        across: The meaning of x.
        up: The meaning of the values.
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
class Section:
    """A part of a report.

    Attributes:
        title: The measure's title.
        about: The measurement, in a sentence or two.
        tables: The tables, in order.
        charts: The charts, in order.
    """

    title: str
    about: str
    tables: Sequence[Table] = ()
    charts: Sequence[Curves] = ()
