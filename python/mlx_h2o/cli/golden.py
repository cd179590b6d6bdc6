"""`mlx_h2o golden verify`: replay golden vectors with this machine's backends."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from mlx_h2o._utils.progress import progress_bar
from mlx_h2o.cli.tables import show
from mlx_h2o.golden.manifest import GoldenError
from mlx_h2o.golden.verify import Verdict, verify


def add_parser(commands: Any) -> None:
    """Add `golden` to the command's subparsers."""
    parser = commands.add_parser(
        "golden",
        help="replay golden vectors",
        description="Golden vectors record what the library computes, so that Python, C and Swift "
        "can be held to one behaviour (docs/reference/golden.md).",
    )
    parser.add_argument(
        "action", choices=("verify",), help="replay them here and compare",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("golden"), metavar="DIR",
        help="the folder of the vectors (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", choices=("reference", "kernels"), action="append",
        help="only this one (may be given again)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Replay, and print the outcome."""
    with progress_bar(args.action, transient=True) as bar:
        verdicts = verify(args.out, args.backend, bar.about)
    differences = [difference for verdict in verdicts for difference in verdict.differences]
    if args.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts]))
    else:
        show(table(verdicts))
    for difference in differences:
        print(difference, file=sys.stderr)
    if differences:
        raise GoldenError(f"{len(differences)} results differ from the golden ones.")


def table(verdicts: list[Verdict]) -> Table:
    """The verdicts for a terminal."""
    rows = Table(title="golden vectors")
    for column in ("backend", "group"):
        rows.add_column(column)
    for column in ("cases", "worst error / tolerated", "differences"):
        rows.add_column(column, justify="right")
    for verdict in verdicts:
        rows.add_row(
            verdict.backend,
            verdict.group,
            str(verdict.cases),
            f"{verdict.worst:.2f}",
            str(len(verdict.differences)),
        )
    return rows
