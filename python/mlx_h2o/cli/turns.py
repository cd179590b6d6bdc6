"""`mlx_h2o turns`: a fact of the first turn, asked for in the last, by every policy."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from mlx_h2o.builtin import EMBEDDED_MODEL, SAMPLE_TEXT
from mlx_h2o.cli.options import add_model_options, load_model, named_options, read_text, typed
from mlx_h2o.cli.tables import show
from mlx_h2o.evaluate.arms import FULL, OURS, WINDOW, Arm
from mlx_h2o.evaluate.recall import CLOZE, QUESTIONS
from mlx_h2o.evaluate.turns import known_at_last, turns_task, ways
from mlx_h2o.policies import policy_names
from mlx_h2o.progress import progress_bar
from mlx_h2o.settings import DEFAULT_POLICY
from mlx_h2o.turns import RESET, checked_carry

TOKENS, TURNS, MAX_SIZE, PROMPTS = 504, 6, 128, 8
#: Of mlx-lm's own caches, of ours by default, and of every policy with the same uniform slots.
ARMS = (
    Arm(FULL),
    Arm(WINDOW),
    Arm(OURS, DEFAULT_POLICY, by_bytes=True),
    *(
        Arm(f"{name}, uniform", name, budgets="uniform")
        for name in policy_names()
        if "paper" not in name
    ),
)


def add_parser(commands: Any) -> None:
    """Add `turns` to the command's subparsers."""
    parser = commands.add_parser(
        "turns",
        help="a fact of the first turn, asked for in the last",
        description="Tells a fact in the first turn of a conversation, goes on with other things, "
        "and asks for it in the last: what caches of the same bytes still know, with all of the "
        "past counting, with none of it, and with the fact pinned.",
    )
    add_model_options(parser)
    parser.add_argument("--text", metavar="FILE", help="what is said besides (default: bundled)")
    for name, default, words in (
        ("prompts", PROMPTS, "conversations"),
        ("tokens", TOKENS, "tokens of each"),
        ("turns", TURNS, "turns of each"),
        ("max-size", MAX_SIZE, "tokens whose bytes each cache may take"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{words} (%(default)s)"
        )
    parser.add_argument(
        "--carry", nargs="+", type=typed(checked_carry, f"0 to 1, or {RESET}"), default=[1.0, 0.0],
        metavar="PART", help="how much of the past counts in each turn (default: 1 0)",
    )  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.set_defaults(run=run, settings=settings)


def settings(args: argparse.Namespace) -> dict[str, str]:
    """Everything that the figures depend on, by name."""
    return named_options(args) | {arm.name: arm.described() for arm in ARMS}


def run(args: argparse.Namespace) -> None:
    """Tell, go on, ask, print."""
    if args.prompts < 1:
        raise ValueError("--prompts must be at least 1.")
    model, tokenizer = load_model(args)
    text = read_text(args.text) if args.text else SAMPLE_TEXT.read_text(encoding="utf-8")
    form = QUESTIONS if args.model == EMBEDDED_MODEL else CLOZE
    sizes = {"prompts": args.prompts, "tokens": args.tokens, "turns": args.turns}
    task = turns_task(tokenizer, text, **sizes, form=form)
    table = Table(
        title=f"{args.model}: facts of turn 1 known in turn {args.turns}, after {args.tokens} "
        f"tokens, in the bytes of {args.max_size}"
    )
    table.add_column("cache")
    for name, _ in ways(args.carry):
        table.add_column(name, justify="right")
    with progress_bar("telling and asking", "caches") as bar:
        for done, arm in enumerate(ARMS):
            bar(done, len(ARMS))
            bar.about(arm.name)
            cells = []
            for _, way in ways(args.carry)[: None if arm.policy else 1]:
                context = task.tokens.shape[1] + max(map(len, task.answers))

                def make(arm: Arm = arm, context: int = context) -> list[Any]:
                    return arm.make(model, args.max_size, context=context)

                known = known_at_last(model, make, task, **way)
                cells.append(f"{sum(known)}/{len(known)}")
            # mlx-lm's own caches know of neither turns nor pins.
            table.add_row(arm.name, *cells, *["-"] * (len(table.columns) - 1 - len(cells)))
    show(table, args.markdown)
