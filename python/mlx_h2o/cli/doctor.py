"""`mlx_h2o doctor`: what works on this machine, how fast, and a report to attach."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from mlx_h2o._utils import checks
from mlx_h2o._utils.files import require_folder, write_kept
from mlx_h2o._utils.progress import progress_bar
from mlx_h2o.cli.tables import show
from mlx_h2o.doctor import predicted, timings
from mlx_h2o.doctor.chips import CHIPS, chip_named
from mlx_h2o.doctor.examination import PARTS, QUICK, Plan, examine
from mlx_h2o.doctor.page import page
from mlx_h2o.doctor.report import Report, Section

#: The exit code where something did not hold.
FAILED = 1


def add_parser(commands: Any) -> None:
    """Add `doctor` to the command's subparsers."""
    parser = commands.add_parser(
        "doctor",
        help="check the kernels on this machine, time them, and write a report",
        description="Checks every kernel variant and a short conversation on the default "
        "device, times attention and fused steps against MLX's own, and measures memory: "
        "five minutes at most. The exit code is 1 if something did not hold. With --out, a page "
        "and a JSON to attach to a report.",
    )
    parser.add_argument("--quick", action="store_true", help=f"one of {QUICK} variants")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
        help=f"only some of {', '.join(PARTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--slots", type=int, nargs="+", default=list(timings.SLOTS), metavar="N",
        help="slots of the timings (default: 1024 to 32768)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=timings.ROUNDS, metavar="N",
        help="rounds of the timings (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=5.0, metavar="M",
        help="begin nothing new after so long (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--predict", metavar="CHIP",
        help='print only what a chip\'s published figures predict, as for "M2 Pro"; '
        f"known: {', '.join(CHIPS)}",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write doctor.html and doctor.json there"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine or predict, print, write; the exit code."""
    slots = tuple(checks.whole("--slots", count, 1, checks.MOST_TOKENS) for count in args.slots)
    checks.whole("--rounds", args.rounds, 1)
    if args.out:
        require_folder("--out", args.out)
    if args.predict:
        _print([predicted.section(chip_named(args.predict), slots)], args.json)
        return 0
    plan = Plan(tuple(args.parts), args.quick, args.minutes, slots, args.rounds)
    with progress_bar("examining", transient=True) as bar:
        report = examine(plan, bar)
    if args.out:
        _write(report, args.out)
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        _tell(report)
    if report.stopped:
        raise report.stopped
    return FAILED if report.failures else 0


def _tell(report: Report) -> None:
    """The report for a terminal."""
    for name, value in report.machine.items():
        print(f"{name}: {value}")
    _print(report.sections, as_json=False)
    for failure in report.failures:
        print(f"FAILED: {failure}")
    print(f"\n{report.verdict()} ({report.seconds:.0f} s)")
    if report.failures:
        print("Please report it with the files of `mlx_h2o doctor --out FOLDER`.")


def _print(sections: list[Section], as_json: bool) -> None:
    """Sections as tables, or as JSON."""
    if as_json:
        print(json.dumps({section.name: section.data for section in sections}))
        return
    for section in sections:
        print()
        if section.rows:
            show(_table(section))
        else:
            print(section.title)
        for note in section.notes:
            print(note)


def _table(section: Section) -> Table:
    made = Table(title=section.title)
    for i, column in enumerate(section.columns):
        made.add_column(column, justify="right" if i else "left")
    for row in section.rows:
        made.add_row(*row)
    return made


def _write(report: Report, folder: Path) -> None:
    """The page and the JSON."""
    for name, text in (
        ("doctor.html", page(report)),
        ("doctor.json", json.dumps(report.as_json(), indent=1) + "\n"),
    ):
        write_kept(folder / name, partial(Path.write_text, data=text))
    print(f"The report is in {folder}.", file=sys.stderr)
