"""`mlx_h2o evaluate`: the cost of a part of the cache's bytes, on your model and your text."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mlx_h2o._utils import checks
from mlx_h2o._utils.blas import advice
from mlx_h2o._utils.files import require_folder, write_kept
from mlx_h2o._utils.plotting import drawing
from mlx_h2o.cli.evaluation_output import begun, facts_of, measure_all, rich_table, told
from mlx_h2o.cli.options import (
    add_model_option,
    add_profile_option,
    named_options,
    read_text,
    settle_model,
    typed,
)
from mlx_h2o.cli.report_table import run_table
from mlx_h2o.cli.tables import show
from mlx_h2o.evaluate.contenders import SHARES, Contender, contenders
from mlx_h2o.evaluate.grid import at_a_glance
from mlx_h2o.evaluate.measures import MEASURES, Measure
from mlx_h2o.evaluate.page import page
from mlx_h2o.evaluate.presets import QUICK_SHARES, left_out, measures
from mlx_h2o.evaluate.recall import FORMS
from mlx_h2o.evaluate.report_tables import HEADLINE_SAMPLES, tables
from mlx_h2o.evaluate.stage import Stage
from mlx_h2o.evaluate.suite import FILE_NAME, Evaluation, Suite, sizes_of
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT
from mlx_h2o.policies import policy_names

PAGE_NAME = "evaluation.html"
#: Tokens of a prompt that are read at once.
CHUNK = 256
#: Samples of a quick table.
QUICK_SAMPLES = 2


def add_parser(commands: Any) -> None:
    """Add `evaluate` to the command's subparsers."""
    parser = commands.add_parser(
        "evaluate",
        help="find out what a part of the cache costs, on your model and text",
        description="Perplexity with intervals, recall of needles, RULER's tasks, turns, long "
        "answers, speed and memory: of mlx-lm's full cache, sliding window and packed caches, of "
        "mlx-h2o's, and of any policies, each in the same bytes. Ctrl-C keeps what is done.",
    )
    add_stage_options(parser)
    parser.add_argument(
        "--measures", nargs="+", choices=MEASURES, default=[], metavar="NAME",
        help=f"only these: {', '.join(MEASURES)}",
    )  # fmt: skip
    _add_caches(parser)
    parser.add_argument(
        "--table", type=int, choices=sorted(tables()), metavar="N",
        help="instead: a sweep of the AtomGradient report beside its own figures, where they are "
        "known: 0 (its headline), 4 (budget split), 7 (KV size), 8 (sequence length), 9 (stress), "
        "10 to 12 (bits), 14 (entropy by layer, and slots by it)",
    )  # fmt: skip
    parser.add_argument(
        "--size", action="append", default=[], metavar="MEASURE.FIELD=VALUE",
        help="another size of a measure, e.g. needles.lengths=512,1024 or perplexity.samples=20",
    )  # fmt: skip
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer and shorter samples, and only a quarter of the bytes: minutes",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help=f"write {FILE_NAME} (as it goes on) and {PAGE_NAME}, one page that opens offline",
    )  # fmt: skip
    parser.add_argument(
        "--grid", action="store_true",
        help="print a figure for each cache and part of the bytes, instead of all tables",
    )  # fmt: skip
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the same evaluation from --out, or fail",
    )
    parser.add_argument(
        "--anew", action="store_true", help="measure everything, whatever was left unfinished"
    )
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    style.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.set_defaults(run=run, settings=settings)


def _add_caches(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose caches."""
    parser.add_argument(
        "--shares", nargs="+", type=typed(share_of, "a part such as 0.25 or 1/4"), metavar="PART",
        help="parts of a full 16-bit cache's bytes (default: 1/2 1/4 1/8 1/16; quick: 1/4)",
    )  # fmt: skip
    parser.add_argument(
        "--policies", nargs="*", default=[], metavar="NAME[:FIELD=VALUE...]",
        help="policies to add, e.g. h2o keydiff:recent=64 salient:bits=6:remainder=false; there "
        f"are {', '.join(policy_names())}",
    )  # fmt: skip
    parser.add_argument(
        "--budgets", metavar="FILE", help='a profile, or "uniform" (default: the model\'s own)'
    )
    add_profile_option(parser)


def add_stage_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for model, text, form of facts, chunk and seed."""
    add_model_option(parser)
    parser.add_argument(
        "--text", type=Path, default=SAMPLE_TEXT, metavar="FILE",
        help="text, or JSON lines with a text each (default: a bundled story)",
    )  # fmt: skip
    parser.add_argument(
        "--facts", choices=FORMS,
        help="how facts are asked for: questions (as recall-4m was trained) or cloze (words to "
        "complete; default for other models)",
    )  # fmt: skip
    parser.add_argument(
        "--chunk", type=int, default=CHUNK, metavar="N",
        help="tokens of a prompt read at once (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of all random choices (default: 0)"
    )


def share_of(text: str) -> float:
    """0.25, 25% or 1/4 as a number.

    Raises:
        ValueError: The number is not between 0 and 1.
    """
    over, slash, under = text.partition("/")
    number = float(over.removesuffix("%")) / (100 if text.endswith("%") else 1)
    number = number / max(int(under), 1) if slash else number
    if not 0 < number < 1:
        raise ValueError
    return number


def stage_of(args: argparse.Namespace) -> Stage:
    """The model and text that the options name.

    Raises:
        ValueError: A number is invalid, or the text is unreadable.
    """
    checks.whole("--chunk", args.chunk, 2)
    checks.whole("--seed", args.seed, 0, 2**63 - 1)
    text = plain_text(args.text)
    model = settle_model(args)
    facts = args.facts or ("questions" if model == EMBEDDED_MODEL else "cloze")
    return Stage(model, text, facts, args.chunk, args.seed)


def plain_text(path: Path) -> str:
    """The text of a file, or of JSON lines which are strings or have a "text" each.

    Raises:
        ValueError: The file is unreadable or empty, or a line has no text.
    """
    text = read_text(path)
    if path.suffix != ".jsonl":
        return text
    pieces = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}.") from error
        piece = entry.get("text") if isinstance(entry, dict) else entry
        if not isinstance(piece, str):
            raise ValueError(f'{path}, line {number} has no "text".')
        pieces.append(piece)
    return "\n\n".join(pieces)


def suite_of(args: argparse.Namespace) -> Suite:
    """The evaluation that the options describe."""
    return Suite(stage_of(args), contenders_of(args, args.budgets), measures_of(args))


def contenders_of(args: argparse.Namespace, budgets: str | None = None) -> list[Contender]:
    """The caches, with every share."""
    shares = args.shares or (QUICK_SHARES if args.quick else SHARES)
    return contenders(args.policies, shares, budgets, args.profile)


def measures_of(args: argparse.Namespace) -> list[Measure]:
    """The measures, with their sizes."""
    return measures(args.quick, args.measures, args.size)


def settings(args: argparse.Namespace) -> dict[str, str]:
    """The options and defaults on which figures depend, by name; files it names need not exist."""
    arms = {contender.arm.name: contender.arm.described() for contender in contenders_of(args)}
    sizes = {
        measure.name: ", ".join(f"{size}={value}" for size, value in sizes_of(measure).items())
        for measure in measures_of(args)
    }
    return named_options(args) | arms | sizes


def run(args: argparse.Namespace) -> None:
    """Measure, print, draw."""
    if args.resume and not args.out:
        raise ValueError("--resume needs --out DIR, where the evaluation was kept.")
    if args.grid:
        require_grids(args)
    if args.out:
        drawing()
        require_folder("--out", args.out)
    if args.table is not None:
        samples = QUICK_SAMPLES if args.quick else HEADLINE_SAMPLES
        run_table(tables(samples)[args.table], stage_of(args), args)
        return
    suite = suite_of(args)
    kept = args.out / FILE_NAME if args.out else None
    evaluation = begun(suite, kept, args.resume, args.anew)
    try:
        measure_all(evaluation, kept, f"evaluating {len(suite.contenders)} caches")
    finally:
        report(evaluation, args)


def require_grids(args: argparse.Namespace) -> None:
    """Raise ValueError if --grid would be ignored."""
    if args.json or args.table is not None:
        raise ValueError("--grid is another form of the tables: leave out --json and --table.")
    if not any(MEASURES[name].briefly for name in args.measures or MEASURES):
        having = ", ".join(name for name, kind in MEASURES.items() if kind.briefly)
        raise ValueError(f"--grid needs a measure with one figure a cache: {having}.")


def report(evaluation: Evaluation, args: argparse.Namespace) -> None:
    """Print and write the results so far."""
    glance, sections = at_a_glance(evaluation.known()), evaluation.sections()
    refused = [f"{why} ({'; '.join(of)})" for why, of in evaluation.refusals().items()]
    if args.json:
        print(json.dumps(evaluation.as_json()))
    else:
        for section in [glance] if args.grid else sections:
            for rows in section.tables:
                show(rich_table(rows, section.title), args.markdown)
                print()
        print("\n".join(refused), end="\n" if refused else "")
        if args.quick:
            less = "; ".join(left_out(evaluation.suite.measures))
            print(f"--quick measures less than a full run. {less}", file=sys.stderr)
        print(told(evaluation.machine), file=sys.stderr)
        if line := advice():
            print(line, file=sys.stderr)
    if args.out and sections:
        title = f"{args.model}: what parts of the KV cache cost"
        if glance.tables:
            sections = [glance, *sections]
        text = page(title, facts_of(evaluation), sections, refused)
        write_kept(args.out / PAGE_NAME, lambda path: path.write_text(text, encoding="utf-8"))
        print(f"The report is {args.out / PAGE_NAME}.", file=sys.stderr)
