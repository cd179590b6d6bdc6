"""A summary table: one figure for each cache and size, for each measure that has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_h2o.evaluate.contenders import label
from mlx_h2o.evaluate.measures import Findings, Measure
from mlx_h2o.evaluate.sections import Rows, Section

#: The heading of the column of caches that keep every token.
KEEPS_ALL = "keeps all"
#: The text of a cell without a figure: the cache did not get these bytes, or they are too few.
NOTHING = ""


def grid(title: str, cells: Mapping[tuple[str, Any], str], head: Callable[[Any], str]) -> Rows:
    """Caches down, sizes across: the caches that keep all tokens first, then the largest size.

    Args:
        title: The table's title.
        cells: Figures by a cache's name and its size; None as size means that it keeps all tokens.
        head: Makes a column's heading from a size.
    """
    names = dict.fromkeys(name for name, _ in cells)
    given = {size for _, size in cells}
    columns = [None] * (None in given) + sorted(given - {None}, reverse=True)
    return Rows(
        title,
        ("cache", *(KEEPS_ALL if size is None else head(size) for size in columns)),
        [(name, *(cells.get((name, size), NOTHING) for size in columns)) for name in names],
    )


def grid_of(measure: Measure, findings: Findings) -> Rows:
    """Caches down, parts of the bytes across.

    Args:
        measure: A measure with a `brief` figure.
        findings: The measure's findings, the full cache first.
    """
    (_, full), *others = findings
    cells = {(c.arm.name, c.share): measure.brief(found, full) for c, found in others}
    return grid(f"{measure.briefly}, by part of the bytes", cells, label)


def at_a_glance(found: Sequence[tuple[Measure, Findings]]) -> Section:
    """The grids of all measures that have a `brief` figure.

    Args:
        found: Measures, and the findings of each.
    """
    grids = [grid_of(*of) for of in found if of[0].briefly and len(of[1]) > 1]
    return Section(
        "At a glance",
        "Every cache in each part of a full 16-bit cache's bytes, everything counted, against the "
        "full cache. Needles and facts: found, of those that the full cache finds.",
        grids,
    )
