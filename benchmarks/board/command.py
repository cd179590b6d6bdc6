"""The command: `python -m benchmarks.board`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from benchmarks.board import (
    attention_matching,
    in_package,
    kvpress_rivals,
    momentkv,
    packed_packages,
    turboquant,
)
from benchmarks.board.board import Sizes, is_chosen, measure, plans_of, protocol_of
from benchmarks.board.cells import Cell, Outcome, Record
from benchmarks.board.chart import draw
from benchmarks.board.reading import plain
from benchmarks.board.rivals import Rival
from benchmarks.board.tables import LOST_COLUMNS, failures, lost, settings_of, table, tables_of
from benchmarks.board.tasks import MEMORY
from mlx_h2o._blas import use_openblas
from mlx_h2o._files import cache_folder
from mlx_h2o._progress import progress_bar
from mlx_h2o.calibration.first_use import profile_at_load
from mlx_h2o.cli.interrupts import terminating_tidily
from mlx_h2o.evaluate.methods import share_label
from mlx_h2o.evaluate.reader import Reader
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT

MODELS = ("smollm2-135m", EMBEDDED_MODEL)
#: The repository's record: a folder for each length, in it a file for each model.
KEPT = Path("docs/results/board")
SHARES = (1 / 4, 1 / 8, 1 / 16)
#: Tokens of a prompt that are read at once.
CHUNK = 128
QUICK = Sizes(prompt=256, continuation=25, samples=1, facts=4, hard=4, shares=(1 / 8,))
WHOLE = Sizes(
    prompt=1024,
    continuation=129,
    samples=4,
    facts=16,
    hard=16,
    shares=SHARES,
    growing=1024,
    ruler=2,
)
#: A quick run ends after so many minutes, whatever the machine; --resume goes on.
QUICK_MINUTES = 10
#: Between the two: longer prompts than a quick run has, and few of them.
EVENING = Sizes(prompt=512, continuation=33, samples=1, facts=4, hard=0, shares=SHARES, ruler=2)
#: A model that one names has no earlier record to stay comparable with, so it gets more needles.
EVENING_OTHERS = replace(EVENING, facts=16)
#: The embedded model is so small that a quick run affords an evening's prompts, and more rows.
#: It knows next to none of the hard needles and of RULER's answers.
QUICK_EMBEDDED = Sizes(prompt=512, continuation=33, samples=2, facts=12, hard=0, shares=SHARES)


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.board",
        description="Every rival at equal bytes, on texts that nothing was tuned on.",
    )
    made.add_argument("--model", nargs="+", default=list(MODELS), help="as in mlx_h2o.load")
    length = made.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="ten minutes instead of a night")
    length.add_argument("--evening", action="store_true", help="hours instead of a night")
    made.add_argument("--shares", type=float, nargs="+", help="parts of the bytes")
    made.add_argument(
        "--only", nargs="+", default=[], help="rivals whose names contain one of these"
    )
    made.add_argument(
        "--tasks", nargs="+", default=[], help="tasks whose names contain one of these"
    )
    made.add_argument(
        "--resume",
        action="store_true",
        help="keep cells that were measured before, here or in the repository's record",
    )
    made.add_argument(
        "--again",
        action="store_true",
        help="of those, measure the chosen cells of other commits anew",
    )
    made.add_argument(
        "--minutes",
        type=float,
        help=f"begin no cell after so many minutes ({QUICK_MINUTES} if --quick)",
    )
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--record", type=Path, help="folder of the cells, a file for each model (cache folder)"
    )
    made.add_argument(
        "--keep",
        type=Path,
        help=f"write all cells there, too, with the means of their samples: {KEPT}",
    )
    made.add_argument("--svg", type=Path, help="draw the chart there, too")
    return made


def sizes_of(model: str, args: argparse.Namespace) -> Sizes:
    """How much is measured with a model."""
    if args.quick or args.evening:
        evening = EVENING if model in MODELS else EVENING_OTHERS
        chosen = QUICK if args.quick else evening
        chosen = QUICK_EMBEDDED if model == EMBEDDED_MODEL else chosen
    else:
        chosen = WHOLE
    shares = tuple(args.shares) if args.shares else chosen.shares
    return replace(chosen, shares=shares)


def all_rivals(only: Sequence[str]) -> list[Rival]:
    """Every rival, or those whose names contain one of some words."""
    every = [
        *in_package.rivals(),
        momentkv.rival(),
        attention_matching.rival(),
        *turboquant.rivals(),
        *packed_packages.rivals(),
        *kvpress_rivals.rivals(),
    ]
    return [one for one in every if is_chosen(one.name, only)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run.

    Args:
        arguments: The command line; None means the program's own.

    Returns:
        0; 1 if something was wrong with the options; 130 after Ctrl-C.
    """
    args = parser().parse_args(arguments)
    try:
        with terminating_tidily():
            run(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped; --resume goes on from here.", file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace) -> None:
    """Measure all models, print the tables, and write what was asked for."""
    rivals = all_rivals(args.only)
    use_openblas()
    until = time.monotonic() + 60 * minutes_of(args)
    missing: list[str] = []
    outcomes: dict[Cell, Outcome] = {}
    parts: list[str] = []
    behind: list[list[str]] = []
    for i, model in enumerate(args.model):
        sizes = sizes_of(model, args)
        # Each model gets its part of the time that is left.
        now = time.monotonic()
        of_model = now + (until - now) / (len(args.model) - i)
        reader, record, left = measured(model, sizes, rivals, args, of_model)
        missing += [f"{model}: {left} cells were not measured in the time given."] if left else []
        # The record may have more; the texts' tables give the memory, too.
        chosen = {
            cell: one
            for cell, one in record.outcomes.items()
            if cell.task == MEMORY or is_chosen(cell.task, args.tasks)
        }
        outcomes |= chosen
        full, element = plain(reader.model, sizes.prompt), element_of(reader)
        parts += tables_of(chosen, model, rivals, sizes.shares, full, element)
        behind += lost(chosen, model, rivals, sizes.shares)
    print("\n".join([*parts, *missing]))
    print("## Where we lose\n")
    print(
        table("Rivals that are better than mlx-h2o with the same bytes", LOST_COLUMNS, behind)
        if behind
        else "Nowhere in this run.\n"
    )
    ran = {cell.rival for cell in outcomes}
    settings = settings_of([rival for rival in rivals if rival.name in ran])
    print(table("Rivals and their settings", ("rival", "settings", "source"), settings))
    shown = {cell: one for cell, one in outcomes.items() if is_chosen(cell.rival, args.only)}
    if failed := failures(shown, args.model):
        print(table("What did not run", ("rival", "model", "where", "why"), failed))
    if at := commits(outcomes):
        print(f"Cells were measured at {', '.join(at)}.")
    if args.svg:
        draw(outcomes, args.model, rivals, args.svg)


def minutes_of(args: argparse.Namespace) -> float:
    """The minutes after which no cell is begun."""
    minutes: float | None = args.minutes
    return minutes if minutes is not None else QUICK_MINUTES if args.quick else math.inf


def commits(outcomes: dict[Cell, Outcome]) -> list[str]:
    """The commits at which cells were measured, those of most cells first."""
    counts = Counter(one["commit"] for one in outcomes.values() if "commit" in one)
    return sorted(counts, key=lambda at: (-counts[at], at))


def measured(
    model: str, sizes: Sizes, rivals: Sequence[Rival], args: argparse.Namespace, until: float
) -> tuple[Reader, Record, int]:
    """A model's reader, its record, and the number of cells that are missing still."""
    length = "quick" if args.quick else "evening" if args.evening else "whole"
    folder = args.record or cache_folder() / "board" / length
    name = f"{model.replace('/', '--').replace(':', '-')}.jsonl"
    facts = "questions" if model == EMBEDDED_MODEL else "cloze"
    reader = Reader(model, SAMPLE_TEXT.read_text(encoding="utf-8"), facts, CHUNK, args.seed)
    protocol = protocol_of(model, sizes, CHUNK, args.seed)
    record = Record(folder / name, protocol, args.resume, KEPT / length / name)
    profile_at_load(reader.model)
    mx.eval(reader.model.parameters())  # so that no reading's peak memory has them
    plans = plans_of(reader, sizes, args.tasks)
    with progress_bar(f"board, {model}", "cells") as report:

        def tell(cell: Cell, done: int, whole: int) -> None:
            share = share_label(cell.share) if cell.share else "all"
            report.about(f"{cell.task}, {cell.rival}, {share}")
            report(done, whole)

        left = measure(reader, plans, rivals, sizes.shares, record, tell, until, args.again)
    if args.keep:
        record.keep(args.keep / length / name)
    return reader, record, left


def element_of(reader: Reader) -> int:
    """Bytes of a number of the model's own dtype."""
    weight: mx.array = reader.model.parameters()["model"]["layers"][0]["self_attn"]["q_proj"][
        "weight"
    ]
    return 2 if weight.dtype in (mx.float16, mx.bfloat16) else 4
