"""`mlx_h2o evaluate --table N`: a sweep of the AtomGradient report, in the report's form."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mlx_h2o._utils.files import write_kept
from mlx_h2o.cli.evaluation_output import begun, facts_of, measure_all, rich_table, told
from mlx_h2o.cli.tables import show
from mlx_h2o.evaluate.attention_shape import text_of
from mlx_h2o.evaluate.measures import Findings
from mlx_h2o.evaluate.page import page
from mlx_h2o.evaluate.report_tables import (
    SHAPE_TOKENS,
    SHAPES,
    ReportTable,
    rows_of,
    shape_rows,
)
from mlx_h2o.evaluate.sections import Section
from mlx_h2o.evaluate.stage import Stage
from mlx_h2o.evaluate.suite import Evaluation, Suite


def run_table(table: ReportTable, stage: Stage, args: argparse.Namespace) -> None:
    """Measure a table's parts, print and write the table; Ctrl-C keeps finished parts.

    Args:
        table: The sweep.
        stage: Model and text.
        args: The options of `evaluate`.
    """
    name = f"table-{table.number}"
    evaluations: list[Evaluation] = []
    for i, part in enumerate(table.parts):
        kept = args.out / f"{name}-{i}.json" if args.out else None
        resume = args.resume and kept is not None and kept.exists()
        suite = Suite(stage, part.contenders, [part.measure])
        evaluations.append(begun(suite, kept, resume, args.anew))
    try:
        for i, evaluation in enumerate(evaluations):
            kept = args.out / f"{name}-{i}.json" if args.out else None
            title = f"table {table.number}, {i + 1} of {len(evaluations)}"
            measure_all(evaluation, kept, title)
    finally:
        _report(table, evaluations, name, args)


def _report(
    table: ReportTable, evaluations: list[Evaluation], name: str, args: argparse.Namespace
) -> None:
    """Print and write the results so far."""
    findings: list[Findings] = [e.findings(e.suite.measures[0]) for e in evaluations]
    if not any(findings):
        return
    tables = [rows_of(table, findings, args.model)]
    if table.number == SHAPES:
        stage = evaluations[0].suite.stage
        tables.insert(0, shape_rows(stage.model, text_of(stage, SHAPE_TOKENS)))
    if args.json:
        parts: list[dict[str, Any]] = [evaluation.as_json() for evaluation in evaluations]
        print(json.dumps({"table": table.number, "parts": parts}))
    else:
        for rows in tables:
            show(rich_table(rows, ""), args.markdown)
            print()
        print(told(evaluations[0].machine), file=sys.stderr)
    if args.out:
        title = tables[-1].title
        text = page(title, facts_of(evaluations[0]), [Section(title, "", tables)], [])
        path: Path = args.out / f"{name}.html"
        write_kept(path, lambda at: at.write_text(text, encoding="utf-8"))
        print(f"The table is {path}.", file=sys.stderr)
