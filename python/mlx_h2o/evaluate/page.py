"""The report as one page for light and dark: no scripts, no fonts, nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Sequence

from mlx_h2o.evaluate.charts import svg
from mlx_h2o.evaluate.report import Section, Table
from mlx_h2o.loading.load import PACKAGE

#: The page's template, with {{names}} to fill in.
PAGE = PACKAGE / "data" / "evaluation.html"


def page(
    title: str,
    facts: dict[str, str],
    sections: Sequence[Section],
    notes: Sequence[str],
    answer: str = "",
) -> str:
    """The whole page.

    Args:
        title: The page's title.
        facts: The circumstances of the measurement, by name.
        sections: The measures' sections.
        notes: The methods that could not be measured, and why.
        answer: The sentence at the beginning.

    Raises:
        ValueError: matplotlib is not installed.
    """
    listed = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items()
    )
    links = "".join(
        f'<a href="#part{i}">{_text(section.title)}</a>' for i, section in enumerate(sections)
    )
    parts = "".join(_section(i, section) for i, section in enumerate(sections))
    items = "".join(f"<li>{_text(note)}</li>" for note in notes)
    filled = {
        "title": _text(title),
        "answer": f"<p>{_text(answer)}</p>" if answer else "",
        "facts": listed,
        "links": links,
        "sections": parts,
        "notes": f"<h2>Not measured</h2><ul>{items}</ul>" if items else "",
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, value in filled.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def _text(words: str) -> str:
    return html.escape(words)


def _section(number: int, section: Section) -> str:
    tables = "".join(map(_table, section.tables))
    charts = "".join(
        f"<figure><figcaption>{_text(chart.title)}</figcaption>{svg(chart)}</figure>"
        for chart in section.charts
    )
    return (
        f'<section id="part{number}"><h2>{_text(section.title)}</h2>'
        f"<p>{_text(section.about)}</p>{tables}{charts}</section>"
    )


def _table(rows: Table) -> str:
    title = f"<caption>{_text(rows.title)}</caption>" if rows.title else ""
    head = "".join(f"<th>{_text(column)}</th>" for column in rows.columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows.rows
    )
    below = f"<p class=small>{_text(rows.caption)}</p>" if rows.caption else ""
    name = _text(rows.title or "table")
    return (
        f'<div><div class=wide tabindex="0" role="region" aria-label="{name}">'
        f"<table>{title}<thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{below}</div>"
    )
