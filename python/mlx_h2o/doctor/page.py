"""The report as one page that can be attached: no scripts, nothing from elsewhere."""

from __future__ import annotations

import html
from typing import Any

from mlx_h2o.doctor.report import Report, Section

_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mlx_h2o doctor</title>
<style>
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem 1.5rem 4rem;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.held { color: #2a7d3c; } .failed { color: #c0342b; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884;
  white-space: nowrap; }
th { font-weight: 500; opacity: .7; }
th:first-child, td:first-child { text-align: left; }
.notes { font-size: .85rem; opacity: .8; }
</style>
</head>
<body>
"""


def page(report: Report) -> str:
    """The whole page."""
    state = "failed" if report.failures else "held"
    parts = [
        _HEAD,
        f"<h1>mlx_h2o doctor: <span class={state}>{_text(report.verdict())}</span></h1>",
        _list(report.failures, "failed"),
        _table(("", ""), [(name, _said(value)) for name, value in report.machine.items()]),
        *map(_section, report.sections),
        f"<p class=notes>{report.seconds:.0f} s</p></body></html>\n",
    ]
    return "".join(parts)


def _section(section: Section) -> str:
    table = _table(section.columns, section.rows) if section.rows else ""
    return (
        f"<section><h2>{_text(section.title)}</h2>{table}"
        f"{_list(section.failures, 'failed')}{_list(section.notes, 'notes')}</section>"
    )


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _list(lines: list[str], kind: str) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<ul class={kind}>{items}</ul>" if items else ""


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return str(value)


def _text(words: str) -> str:
    return html.escape(words)
