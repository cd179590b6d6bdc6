"""`mlx_h2o turns`: a fact of the first turn, asked for in the last, by every policy."""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

from rich.table import Table

from mlx_h2o.budgets.settings import DEFAULT_POLICY
from mlx_h2o.cli.evaluation_output import measuring, take_up
from mlx_h2o.cli.options import add_model_options, load_model, named_options, read_text, typed
from mlx_h2o.cli.tables import show
from mlx_h2o.engine.pins_and_turns import RESET, checked_carry
from mlx_h2o.evaluate.arms import FULL, OURS, WINDOW, Arm, profile_digests
from mlx_h2o.evaluate.measurements import Measurements
from mlx_h2o.evaluate.recall import CLOZE, QUESTIONS
from mlx_h2o.evaluate.turns import known_at_last, turns_task, ways
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT
from mlx_h2o.policies import policy_names

TOKENS, TURNS, MAX_SIZE, PROMPTS = 504, 6, 128, 8
#: mlx-lm's own caches, our default, and every policy with the same uniform slots.
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
    parser.add_argument(
        "--text", metavar="FILE", help="the conversation's other text (default: bundled)"
    )
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
    parser.add_argument(
        "--anew", action="store_true", help="ask everything, whatever was left unfinished"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.set_defaults(run=run, settings=settings)


def settings(args: argparse.Namespace) -> dict[str, str]:
    """The options and defaults on which figures depend, by name."""
    return named_options(args) | {arm.name: arm.described() for arm in ARMS}


def run(args: argparse.Namespace) -> None:
    """Run the conversations, ask for the facts, print the table."""
    if args.prompts < 1:
        raise ValueError("--prompts must be at least 1.")
    model, tokenizer = load_model(args)
    text = read_text(args.text) if args.text else SAMPLE_TEXT.read_text(encoding="utf-8")
    form = QUESTIONS if args.model == EMBEDDED_MODEL else CLOZE
    sizes = {"prompts": args.prompts, "tokens": args.tokens, "turns": args.turns}
    task = turns_task(tokenizer, text, **sizes, form=form)
    context = task.tokens.shape[1] + max(map(len, task.answers))
    # mlx-lm's own caches have neither turns nor pins.
    asked = [
        (arm, name, way)
        for arm in ARMS
        for name, way in ways(args.carry)[: None if arm.policy else 1]
    ]
    digest = hashlib.sha256(text.encode()).hexdigest()
    so_far = Measurements({**settings(args), "text": digest}, len(asked))
    if not args.anew:
        take_up(so_far)
    so_far.measured_with(profile_digests(model, ARMS))
    with measuring(so_far, "telling and asking", "measurements") as (bar, keep):
        for arm, name, way in asked:
            bar(so_far.measured, len(asked))
            bar.about(arm.name)
            if so_far.lacks(name, [arm.name]):

                def make(arm: Arm = arm) -> list[Any]:
                    return arm.make(model, args.max_size, context=context)

                known = known_at_last(model, make, task, **way)
                so_far.add(name, {arm.name: known})
                keep()
    show(table(so_far, args), args.markdown)


def table(known: Measurements, args: argparse.Namespace) -> Table:
    """The number of facts that each cache knows, in each way."""
    made = Table(
        title=f"{args.model}: facts of turn 1 known in turn {args.turns}, after {args.tokens} "
        f"tokens, in the bytes of {args.max_size}"
    )
    made.add_column("cache")
    for name, _ in ways(args.carry):
        made.add_column(name, justify="right")
    for arm in ARMS:
        cells = [known.found[name].get(arm.name) for name, _ in ways(args.carry)]
        made.add_row(arm.name, *("-" if of is None else f"{sum(of)}/{len(of)}" for of in cells))
    return made
