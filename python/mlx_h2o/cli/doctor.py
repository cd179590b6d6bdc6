"""`mlx_h2o doctor`: what a report of a problem needs."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from mlx_h2o._progress import progress_bar
from mlx_h2o.cli.tables import show
from mlx_h2o.doctor.examination import QUICK, Section, examine, machine_and_device
from mlx_h2o.evaluate.report import Table

#: The exit code where something is wrong.
FAILED = 1


def add_parser(commands: Any) -> None:
    """Add `doctor` to the command's subparsers."""
    parser = commands.add_parser(
        "doctor",
        help="check the kernels on this machine: attach what it prints to a report of a problem",
        description="Prints versions and the device, compares kernel variants and a short "
        "conversation with the definition, and a cache's bytes with those in memory: some minutes. "
        "The exit code is 1 if something is wrong.",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"check one of {QUICK} kernel variants"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine and print; the exit code."""
    start = time.monotonic()
    report: dict[str, Any] = {"machine": machine_and_device()}
    failures: list[str] = []
    if not args.json:
        for name, value in report["machine"].items():
            print(f"{name}: {value}")
    with progress_bar("examining", transient=True) as bar:
        for name, section in examine(args.quick, bar.about):
            failures += [f"{section.title}: {failure}" for failure in section.failures]
            report[name] = section.rows
            if not args.json:
                show_section(section)
    report |= {"failures": failures, "seconds": round(time.monotonic() - start, 1)}
    if args.json:
        print(json.dumps(report))
        return FAILED if failures else 0
    for failure in failures:
        print(f"FAILED: {failure}")
    summary = f"{len(failures)} checks failed" if failures else "no fault was found"
    print(f"\n{summary} ({report['seconds']:.0f} s)")
    return FAILED if failures else 0


def show_section(section: Section) -> None:
    """A section as a table."""
    rows = [list(map(text_of, row.values())) for row in section.rows]
    print()
    show(Table(section.title, list(section.rows[0]), rows))


def text_of(value: str | float) -> str:
    """A cell: whole numbers with separators, others with three digits."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value
