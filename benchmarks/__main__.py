"""`python -m benchmarks`: attention, decoding and matrix products timed on this machine's CPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import attention, machine, model, products
from benchmarks.report import Report, meaning
from mlx_h2o._files import require_folder, write_kept
from mlx_h2o._progress import progress_bar
from mlx_h2o.cli import main as run_main
from mlx_h2o.cli.options import add_model_option, add_table_options, settle_model
from mlx_h2o.cli.parsing import Parser
from mlx_h2o.cli.tables import show
from mlx_h2o.evaluate.machine import load_average
from mlx_h2o.loading.load import load

FILE_NAME = "bench.json"
DTYPES = ("float32", "float16", "bfloat16")
PARTS = ("attention", "model", "products")
ROUNDS, QUICK_ROUNDS = 15, 5
QUICK_CASES = ((attention.LARGE, 256), (attention.LARGE, 4096), (attention.SHAPES[2], 1024))
QUICK_SIZES = model.Sizes(decode_from=768, prompt=1024, chunk=512, prompt_rounds=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit codes are those of the command `mlx_h2o`."""
    return run_main(argv, parser)


def parser() -> Parser:
    """The parser of the command line."""
    made = Parser(
        prog="benchmarks",
        description="Measure attention against MLX's own and against the machine's read "
        "bandwidth, decoding of a whole model against mlx-lm's caches, and matrix products with "
        "either BLAS. Everything is visited by turns, so ratios hold on a busy machine; times need "
        "an idle one.",
    )
    made.add_argument(
        "--only", choices=PARTS, action="append", help="measure this part (may be given again)"
    )
    made.add_argument("--quick", action="store_true", help="fewer cases: a minute or two")
    made.add_argument(
        "--rounds", type=int, metavar="N",
        help=f"visits of everything measured (default: {ROUNDS}; quick: {QUICK_ROUNDS})",
    )  # fmt: skip
    made.add_argument(
        "--dtype", choices=DTYPES, action="append",
        help="dtype of the attention's rows (may be given again; default: all)",
    )  # fmt: skip
    add_model_option(made)
    made.add_argument("--out", type=Path, metavar="DIR", help=f"write {FILE_NAME}, after each part")
    add_table_options(made)
    made.set_defaults(run=run)
    return made


def run(args: argparse.Namespace) -> None:
    """Measure, print, draw."""
    parts = args.only or [
        part for part in PARTS if part != "products" or products.can_be_measured()
    ]
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    check(args)
    if "model" in parts:
        settle_model(args)
    report = Report(
        machine.describe(),
        {
            "parts": list(parts),
            "quick": args.quick,
            "rounds": rounds,
            "dtypes": args.dtype or list(DTYPES),
            "model": args.model,
        },
    )
    measuring: dict[str, Callable[[Report], None]] = {
        "attention": measure_attention,
        "model": measure_model,
        "products": measure_products,
    }
    for part in PARTS:
        if part in parts:
            measuring[part](report)
            if args.out:
                write_json(report, args.out)
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        print(f"BLAS: {report.machine['blas']}\n")
        for table in report.tables():
            show(table, args.markdown)
        print("\n".join(meaning(report)))


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for invalid options; warn of conditions that make figures doubtful."""
    if args.rounds is not None and args.rounds < 1:
        raise ValueError("--rounds must be at least 1.")
    machine.require_kernels()
    if args.out:
        require_folder("--out", args.out)
    if machine.is_busy():
        print(
            f"This machine is busy (load {load_average()}): trust ratios, not times.",
            file=sys.stderr,
        )


def cases_of(settings: dict[str, Any]) -> list[attention.Case]:
    """The attention cases of a run."""
    sizes = (
        QUICK_CASES
        if settings["quick"]
        else [(shape, slots) for shape in attention.SHAPES for slots in attention.SLOTS]
    )
    return [
        attention.Case(shape, slots, dtype)
        for shape, slots in sizes
        for dtype in settings["dtypes"]
    ]


def measure_attention(report: Report) -> None:
    """All cases, one after another."""
    cases, rounds = cases_of(report.settings), report.settings["rounds"]
    with progress_bar("attention") as bar:
        for n, case in enumerate(cases):

            def within(done: int, whole: int, before: int = n) -> None:
                bar(before * 1000 + 1000 * done // whole, len(cases) * 1000)

            report.attention.append(attention.measure(case, rounds, within))


def measure_model(report: Report) -> None:
    """Decoding, then a prompt."""
    settings = report.settings
    sizes = QUICK_SIZES if settings["quick"] else model.Sizes()
    network, tokenizer = load(settings["model"])
    with progress_bar("decoding") as bar:
        report.decoding = model.measure_decoding(network, tokenizer, sizes, settings["rounds"], bar)
    with progress_bar("prompt") as bar:
        report.prompt = model.measure_prompt(network, tokenizer, sizes, bar)


def measure_products(report: Report) -> None:
    """Matrix products with either BLAS."""
    with progress_bar("products") as bar:
        report.products = products.measure(report.settings["rounds"], bar)


def write_json(report: Report, folder: Path) -> None:
    """Write everything measured so far."""
    text = json.dumps(report.as_json(), indent=1) + "\n"
    write_kept(folder / FILE_NAME, lambda path: path.write_text(text))


if __name__ == "__main__":
    sys.exit(main())
