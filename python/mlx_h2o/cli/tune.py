"""`mlx_h2o tune`: the smallest cache within a loss that you state, on your model and your text."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from mlx_h2o.budgets.settings import DEFAULT_POLICY
from mlx_h2o.cli.evaluate import (
    add_reader_options,
    add_run_options,
    check_run_options,
    measure,
    print_sections,
    reader_of,
    share_of,
    text_name,
    write_page,
)
from mlx_h2o.cli.options import add_profile_option, profile_choice, typed
from mlx_h2o.cli.tables import machine_line
from mlx_h2o.evaluate.evaluation import Evaluation
from mlx_h2o.evaluate.measures import PerplexityMeasure
from mlx_h2o.evaluate.methods import SHARES
from mlx_h2o.evaluate.tuning import answer_of, choices, recommended, section, tuned_methods
from mlx_h2o.policies import policy_names
from mlx_h2o.slots.packed import BITS

FILE_NAME, PAGE_NAME = "tuning.json", "tuning.html"
#: The width that means dense rows, in the model's own dtype.
DENSE = 16


def add_parser(commands: Any) -> None:
    """Add `tune` to the command's subparsers."""
    parser = commands.add_parser(
        "tune",
        help="find the smallest cache within a loss that you state",
        description="Measures perplexity on your text over bytes, policies and packings, draws "
        "quality by bytes, and prints the line of code of the smallest cache that loses no more "
        "than you allow.",
    )
    add_reader_options(parser)
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
        default=SHARES, help="shares of a full 16-bit cache's bytes (default: 1/2 1/4 1/8 1/16)",
    )  # fmt: skip
    parser.add_argument(
        "--policies", nargs="*", default=[DEFAULT_POLICY], metavar="NAME[:FIELD=VALUE...]",
        help=f"policies beside the default by bytes (default: {DEFAULT_POLICY}; there are "
        f"{', '.join(policy_names())})",
    )  # fmt: skip
    parser.add_argument(
        "--bits", nargs="+", type=int, choices=(*BITS, DENSE), default=[DENSE, 6], metavar="N",
        help=f"widths of these policies' rows; {DENSE}: dense rows (default: {DENSE} 6)",
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
    add_run_options(parser)
    parser.set_defaults(run=run)


def allowed(text: str) -> float:
    """1% or 0.01 as a ratio.

    Raises:
        ValueError: The ratio is below 0.
    """
    number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= number < 1:
        raise ValueError
    return number


def run(args: argparse.Namespace) -> None:
    """Measure, choose, print, draw."""
    samples = PerplexityMeasure(args.samples, args.tokens, args.prefill)
    methods = tuned_methods(args.policies, args.bits, args.shares, *profile_choice(args))
    check_run_options(args)
    evaluation = Evaluation(reader_of(args), methods, [samples])
    file = args.out / FILE_NAME if args.out else None
    try:
        measure(evaluation, file, args, f"measuring {len(methods)} caches")
    finally:
        report(evaluation, args)


def report(evaluation: Evaluation, args: argparse.Namespace) -> None:
    """Print and write the results so far."""
    made = choices(evaluation.results_of(evaluation.measures[0]))
    chosen = recommended(made, args.loss, args.surely)
    line = chosen.method.code(evaluation.reader.model, args.tokens) if chosen else None
    if args.json:
        print(json.dumps({**evaluation.as_json(), "recommended": line}))
        return
    if not made:
        return
    answer = answer_of(chosen, args.loss, text_name(args))
    shown = section(made, chosen, args.loss)
    print_sections([shown], answer, args.markdown)
    print(line or "", end="\n" if line else "")
    print(machine_line(evaluation.machine), file=sys.stderr)
    if args.out:
        title = f"{args.model}: quality by bytes"
        text = f"{answer} {line}" if line else answer
        write_page(args.out / PAGE_NAME, title, evaluation, [shown], [], text)
