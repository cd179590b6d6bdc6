"""`mlx_h2o tune`: the smallest cache within a loss that you state, on your model and your text."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mlx_h2o._utils import checks
from mlx_h2o._utils.files import require_folder, write_kept
from mlx_h2o._utils.plotting import drawing
from mlx_h2o.budgets.settings import DEFAULT_POLICY
from mlx_h2o.cli.evaluate import add_stage_options, share_of, stage_of
from mlx_h2o.cli.evaluation_output import begun, facts_of, measure_all, rich_table, told
from mlx_h2o.cli.options import add_profile_option, typed
from mlx_h2o.cli.tables import show
from mlx_h2o.evaluate.measures import PerplexityMeasure
from mlx_h2o.evaluate.page import page
from mlx_h2o.evaluate.suite import Evaluation, Suite
from mlx_h2o.evaluate.tuning import (
    PLAIN,
    Choice,
    choices,
    line_of_code,
    recommended,
    section,
    tuned_contenders,
)
from mlx_h2o.policies import policy_names
from mlx_h2o.storage.packed import BITS

FILE_NAME, PAGE_NAME = "tuning.json", "tuning.html"
SHARES = (0.5, 0.25, 0.125, 0.0625)


def add_parser(commands: Any) -> None:
    """Add `tune` to the command's subparsers."""
    parser = commands.add_parser(
        "tune",
        help="find the smallest cache within a loss that you state",
        description="Measures perplexity on your text over bytes, policies and packings, draws "
        "quality by bytes, and prints the line of code of the smallest cache that loses no more "
        "than you allow.",
    )
    add_stage_options(parser)
    parser.add_argument(
        "--loss", type=typed(allowed, "a loss such as 1%"), default=0.01, metavar="PART",
        help="allowed loss of perplexity, against the full cache (default: 1%%)",
    )  # fmt: skip
    parser.add_argument(
        "--surely", action="store_true",
        help="the 95%% interval's upper end must lie within it, not the measured loss alone",
    )  # fmt: skip
    parser.add_argument(
        "--shares", nargs="+", type=typed(share_of, "a part such as 0.25 or 1/4"), metavar="PART",
        default=SHARES, help="parts of a full 16-bit cache's bytes (default: 1/2 1/4 1/8 1/16)",
    )  # fmt: skip
    parser.add_argument(
        "--policies", nargs="*", default=[DEFAULT_POLICY], metavar="NAME[:FIELD=VALUE...]",
        help=f"policies beside the default by bytes (default: {DEFAULT_POLICY}; there are "
        f"{', '.join(policy_names())})",
    )  # fmt: skip
    parser.add_argument(
        "--bits", nargs="+", type=int, choices=(*BITS, PLAIN), default=[PLAIN, 6], metavar="N",
        help=f"widths of these policies' rows; {PLAIN}: dense rows (default: {PLAIN} 6)",
    )  # fmt: skip
    add_profile_option(parser)
    for name, default, text in (
        ("--samples", 8, "samples of the text"),
        ("--tokens", 1024, "tokens of a sample: as long as your conversations"),
        ("--prefill", 128, "tokens of a sample given at once"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"write {FILE_NAME} and {PAGE_NAME}"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the same tuning from --out, or fail",
    )
    parser.add_argument(
        "--anew", action="store_true", help="measure everything, whatever was left unfinished"
    )
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="print JSON instead of the table")
    style.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.set_defaults(run=run)


def allowed(text: str) -> float:
    """1% or 0.01 as a share.

    Raises:
        ValueError: The share is below 0.
    """
    number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= number < 1:
        raise ValueError
    return number


def run(args: argparse.Namespace) -> None:
    """Measure, choose, print, draw."""
    for name in ("samples", "tokens", "prefill"):
        checks.whole(f"--{name}", getattr(args, name), 1)
    if args.prefill >= args.tokens:
        raise ValueError("--prefill must leave tokens to score: make it less than --tokens.")
    if args.resume and not args.out:
        raise ValueError("--resume needs --out DIR, where the tuning was kept.")
    if args.out:
        drawing()
        require_folder("--out", args.out)
    measure = PerplexityMeasure(args.samples, args.tokens, args.prefill)
    contenders = tuned_contenders(args.policies, args.bits, args.shares, args.profile)
    kept = args.out / FILE_NAME if args.out else None
    suite = Suite(stage_of(args), contenders, [measure])
    evaluation = begun(suite, kept, args.resume, args.anew)
    try:
        measure_all(evaluation, kept, f"measuring {len(contenders)} caches")
    finally:
        report(evaluation, args, choices(evaluation.findings(measure)))


def report(evaluation: Evaluation, args: argparse.Namespace, made: list[Choice]) -> None:
    """Print and write the results so far.

    Args:
        evaluation: The evaluation, complete or not.
        args: The command's options.
        made: The points of the curve.
    """
    chosen = recommended(made, args.loss, args.surely)
    line = line_of_code(chosen, args.tokens) if chosen else None
    if args.json:
        print(json.dumps({**evaluation.as_json(), "recommended": line}))
    elif made:
        shown = section(made, chosen, args.loss)
        show(rich_table(shown.tables[0], shown.title), args.markdown)
        print()
        print(line or f"Nothing measured loses at most {100 * args.loss:g} %: allow more bytes.")
        print(told(evaluation.machine), file=sys.stderr)
    if args.out and made:
        shown = section(made, chosen, args.loss)
        notes = [line] if line else []
        title = f"{args.model}: quality by bytes"
        text = page(title, {**facts_of(evaluation), "use": "; ".join(notes)}, [shown], [])
        write_kept(args.out / PAGE_NAME, lambda path: path.write_text(text, encoding="utf-8"))
        print(f"The report is {args.out / PAGE_NAME}.", file=sys.stderr)
