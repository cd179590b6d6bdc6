"""`mlx_h2o demo`: facts planted in a story, buried, and asked for, by several caches."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from mlx_h2o._files import require_folder, write_kept
from mlx_h2o._progress import progress_bar
from mlx_h2o.budgets.settings import DEFAULT_POLICY
from mlx_h2o.cli.options import named_options, settle_model
from mlx_h2o.cli.tables import show
from mlx_h2o.evaluate.facts import CLOZE, QUESTIONS, Form, recall_task
from mlx_h2o.evaluate.methods import OURS, Method
from mlx_h2o.evaluate.planting import ANSWER_TOKENS, Answers, demo_methods, draw, plant_and_ask
from mlx_h2o.evaluate.plotting import drawing
from mlx_h2o.evaluate.report import Table
from mlx_h2o.loading import demo_model
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT, load

#: These sizes take minutes on two cores: read token by token, the same prompts take at least twice
#: as long. mlx-lm's full cache grows by 256 tokens: prompt and answer fill it.
PROMPTS, TOKENS, PREFILL, CHUNK = 6, 512 - ANSWER_TOKENS, 96, 16
#: The tokens whose bytes a bounded cache gets: a quarter of the full cache's.
MAX_SIZE = 128

# Bits and slots are chosen by the model's own profile.
DEFAULT = Method(OURS, DEFAULT_POLICY)
FORM: dict[str, Form] = {demo_model.NAME: CLOZE, EMBEDDED_MODEL: QUESTIONS}


def add_parser(commands: Any) -> None:
    """Add `demo` to the command's subparsers."""
    parser = commands.add_parser(
        "demo",
        help="facts planted in a story, buried, and asked for, by several caches",
        description=f"Shows what {demo_model.NAME} still knows through the full cache, a sliding "
        "window, a 4-bit cache, H2O and mlx-h2o, the bounded ones in a quarter of the memory. "
        f"Without a network it falls back to {EMBEDDED_MODEL}, and says so.",
    )
    parser.add_argument(
        "--model", choices=FORM, help=f"default: {demo_model.NAME} if it can be had"
    )
    parser.add_argument("--prompts", type=int, default=PROMPTS, metavar="N", help="facts asked for")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write demo.png")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.set_defaults(run=run, settings=settings)


def settings(args: argparse.Namespace) -> dict[str, str]:
    """The options and defaults on which figures depend, by name, if the real model is available."""
    sizes = {"tokens": TOKENS, "prefill": PREFILL, "chunk": CHUNK, "max_size": MAX_SIZE}
    methods = {method.label: method.described() for method in demo_methods(DEFAULT)}
    described = {name: str(value) for name, value in sizes.items()} | methods
    return named_options(args) | described


def run(args: argparse.Namespace) -> None:
    """Plant facts, ask for them, print and draw the answers."""
    if args.prompts < 1:
        raise ValueError("--prompts must be at least 1.")
    if args.out:
        drawing()
        require_folder("--out", args.out)
    name = settle_model(args)
    model, tokenizer = load(name)
    task = recall_task(
        tokenizer,
        SAMPLE_TEXT.read_text(),
        prompts=args.prompts,
        tokens=TOKENS,
        form=FORM[name],
    )
    with progress_bar("planting, burying, asking", "tokens") as bar:
        results = plant_and_ask(
            model,
            tokenizer,
            [replace(method, tokens=MAX_SIZE) for method in demo_methods(DEFAULT)],
            task,
            prefill=PREFILL,
            chunk=CHUNK,
            progress=bar,
        )
    first = cast(list[int], task.prompts[0].tolist())
    question = tokenizer.decode(first[task.questions[0] :])
    expected = tokenizer.decode(list(task.answers[0])).strip()
    title = f"{name}: facts asked for after {TOKENS} tokens, in the bytes of {MAX_SIZE}"
    show(table(results, title, expected), args.markdown)
    print(f'The first one was asked for with "{question.strip()}"; {expected} was planted.')
    if args.out:
        write_kept(args.out / "demo.png", lambda path: draw(results, title, path), ".png")
        print(f"The chart is {args.out / 'demo.png'}.", file=sys.stderr)


def table(results: list[Answers], title: str, expected: str) -> Table:
    """The answers for a terminal.

    Args:
        results: The answers with each cache.
        title: The table's title.
        expected: The correct first answer.
    """
    columns = ("cache", "KV bytes", "of full", "facts", f"its first answer ({expected})")
    rows = [
        (
            result.method,
            f"{result.nbytes:,}",
            f"{result.nbytes / results[0].nbytes:.0%}",
            f"{sum(result.right)}/{len(result.right)}",
            result.texts[0],
        )
        for result in results
    ]
    return Table(title, columns, rows, texts=(0, len(columns) - 1))
