"""`mlx_h2o compare`: the cost of each cache in quality and speed, at equal bytes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mlx_h2o._utils.blas import advice, blas
from mlx_h2o._utils.files import require_folder, write_kept
from mlx_h2o._utils.plotting import drawing
from mlx_h2o.cli.evaluation_output import measuring, rich_table, take_up
from mlx_h2o.cli.options import (
    add_model_option,
    add_profile_option,
    named_options,
    read_text,
    settle_model,
)
from mlx_h2o.cli.tables import show
from mlx_h2o.evaluate import chart
from mlx_h2o.evaluate.arms import FULL, PACKED, Arm, arms_of_sizes, default_arms
from mlx_h2o.evaluate.comparison import Protocol, Result, as_json, compare, measurements_of
from mlx_h2o.evaluate.grid import grid
from mlx_h2o.evaluate.recall import FORMS
from mlx_h2o.evaluate.sections import Rows
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT
from mlx_h2o.policies import policy_names
from mlx_h2o.storage.packed import BITS


def add_parser(commands: Any) -> None:
    """Add `compare` to the command's subparsers."""
    parser = commands.add_parser(
        "compare",
        help="measure several caches on one text, at equal bytes",
        description="Perplexity (token by token, so that eviction happens), recall of planted "
        "facts, speed and bytes of mlx-lm's full cache, sliding window and packed caches, and of "
        "mlx-h2o's.",
    )

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )

    add_model_option(parser)
    parser.add_argument(
        "--text", type=Path, default=SAMPLE_TEXT, metavar="FILE", help="default: a bundled story"
    )
    parser.add_argument(
        "--max-kv-size", type=int, nargs="+", default=[128], metavar="N",
        help="tokens whose bytes, in a 16-bit model, every bounded cache gets; of several sizes, "
        "one after the other (default: 128)",
    )  # fmt: skip
    parser.add_argument(
        "--equal",
        choices=("bytes", "slots"),
        default="bytes",
        help="give every bounded cache those bytes, or so many slots (default: %(default)s)",
    )
    number("--samples", 4, "samples of the text")
    number("--tokens", 640, "tokens of a sample")
    number("--prefill", 128, "tokens of a sample given at once")
    number("--prompts", 16, "prompts with planted facts; 0 for none")
    number("--prompt-tokens", 400, "tokens of such a prompt")
    number("--chunk", 1, "tokens of such a prompt given at once after the prefill")
    parser.add_argument(
        "--compressed", action="store_true", help="give the facts' prose at once, then the question"
    )
    _add_caches(parser)
    parser.add_argument(
        "--facts",
        choices=FORMS,
        help="how facts are asked for: questions (as recall-4m was trained) or cloze (words to "
        "complete; default for other models). Only facts that the full cache knows count",
    )
    _add_output(parser)
    parser.set_defaults(run=run, settings=settings)


def _add_caches(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose caches."""
    parser.add_argument(
        "--policies", nargs="*", default=["h2o"], metavar="NAME[:FIELD=VALUE...]",
        help="policies to add, each with and without remainder, e.g. h2o distinct:recent=0.25 "
        "h2o:bits=4 "
        f"(default: h2o; there are {', '.join(policy_names())})",
    )  # fmt: skip
    parser.add_argument(
        "--bits", type=int, nargs="+", default=[], choices=BITS, metavar="N",
        help="add mlx-h2o with rows of N bits, beside the width that its profile chooses",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME",
        help="measure only the full cache, and those whose names begin with NAME",
    )  # fmt: skip
    parser.add_argument(
        "--budgets", nargs="+", metavar="FILE",
        help='a profile, or "uniform" (default: the model\'s own); of several, mlx-h2o once for '
        "each",
    )  # fmt: skip
    add_profile_option(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options for output."""
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write compare.json and compare.png"
    )
    parser.add_argument(
        "--anew", action="store_true", help="measure everything, whatever was left unfinished"
    )
    parser.add_argument(
        "--grid",
        action="store_true",
        help="print a figure for each cache and size, instead of all columns, and time nothing",
    )
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="print JSON instead of the table")
    style.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def settings(args: argparse.Namespace) -> dict[str, str]:
    """The options and defaults on which figures depend, by name."""
    arms = arms_of(args)
    return named_options(args) | {arm.name: arm.described() for arm in arms}


def arms_of(args: argparse.Namespace, budgets: Sequence[str] | None = None) -> list[Arm]:
    """The caches that the options name.

    Raises:
        ValueError: An option names no cache.
    """
    arms = default_arms(args.policies, budgets or (), args.bits, args.profile)
    for name in args.only:
        if not any(arm.name.startswith(name) for arm in arms):
            known = ", ".join(arm.name for arm in arms)
            raise ValueError(f"--only {name!r}: no cache's name begins so; there are {known}.")
    if args.only:
        arms = [arm for arm in arms if arm.name.startswith((FULL, *args.only))]
    return arms_of_sizes(arms, args.max_kv_size)


def run(args: argparse.Namespace) -> None:
    """Measure, print, draw."""
    check_options(args)
    text = read_text(args.text)
    arms = arms_of(args, args.budgets)
    if args.out:
        drawing()
        require_folder("--out", args.out)
    model = settle_model(args)
    protocol = Protocol(
        model=model,
        text=text,
        max_size=args.max_kv_size[0],
        samples=args.samples,
        tokens=args.tokens,
        prefill=args.prefill,
        prompts=args.prompts,
        prompt_tokens=args.prompt_tokens,
        compressed=args.compressed,
        equal=args.equal,
        facts=args.facts or ("questions" if model == EMBEDDED_MODEL else "cloze"),
        chunk=args.chunk,
        timed=not args.grid,
    )
    so_far = measurements_of(arms, protocol)
    if not args.anew:
        take_up(so_far)
    with measuring(so_far, f"comparing {len(arms)} caches", "tokens") as (bar, keep):
        results = compare(arms, protocol, bar, so_far, keep)
    report = as_json(results, protocol)
    if args.json:
        print(json.dumps(report))
    else:
        for made in tables(results, arms, protocol, args):
            show(made, args.markdown)
        if line := advice():
            print(line, file=sys.stderr)
    if args.out:
        text = json.dumps(report, indent=1) + "\n"
        write_kept(args.out / "compare.json", lambda path: path.write_text(text))
        title = f"{args.model}, {what_is_equal(protocol, args.max_kv_size)}"
        write_kept(args.out / "compare.png", lambda path: chart.draw(results, title, path), ".png")
        print(f"The chart is {args.out / 'compare.png'}.", file=sys.stderr)


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for numbers that allow no comparison."""
    for name in ("max_kv_size", "samples", "tokens", "prefill", "prompt_tokens", "chunk"):
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1.")
    if args.prompts < 0:
        raise ValueError("--prompts must be at least 0, which leaves recall out.")
    if args.prefill >= args.tokens:
        raise ValueError("--prefill must leave tokens to score: make it less than --tokens.")
    if args.grid and args.json:
        raise ValueError("--grid is another form of the table: leave out --json.")


def what_is_equal(protocol: Protocol, sizes: Sequence[int] = ()) -> str:
    """The size that every bounded cache gets, in words."""
    of = " or ".join(map(str, sizes or [protocol.max_size]))
    return f"{of} slots" if protocol.equal == "slots" else f"the bytes of {of} tokens"


def tables(
    results: Sequence[Result], arms: Sequence[Arm], protocol: Protocol, args: argparse.Namespace
) -> list[Table]:
    """The results for a terminal: one table, or with --grid one for each figure.

    Args:
        results: The arms' results.
        arms: The caches that were compared.
        protocol: How the arms were measured.
        args: The command's options.
    """
    if not args.grid:
        return [table(results, protocol, args.max_kv_size)]
    of = "slots" if protocol.equal == "slots" else "tokens' bytes"
    figures = {"loss of perplexity": loss_of} | ({"facts": facts_of} if protocol.prompts else {})
    return [
        rich_table(grid_of_sizes(name, figure, results, arms, of), what_was_read(protocol))
        for name, figure in figures.items()
    ]


def grid_of_sizes(
    title: str,
    figure: Callable[[Result], str],
    results: Sequence[Result],
    arms: Sequence[Arm],
    of: str,
) -> Rows:
    """Caches down, sizes across; the others are compared with the full cache.

    Args:
        title: The title of the figures.
        figure: The figure of a result.
        results: The results, the full cache's first.
        arms: The caches, in the same order.
        of: The unit of sizes.
    """
    cells = {
        (arm.name, None) if arm.name in PACKED else (arm.base, arm.size): figure(result)
        for arm, result in list(zip(arms, results, strict=True))[1:]
    }
    return grid(title, cells, lambda size: f"{size} {of}")


def what_was_read(protocol: Protocol) -> str:
    """The model and the samples, in words."""
    return f"{protocol.model}, {protocol.samples} x {protocol.tokens} tokens"


def loss_of(result: Result) -> str:
    """The loss, with its standard error if there are several samples."""
    error = "" if not result.loss_error else f" ± {100 * result.loss_error:.2f}"
    return f"{100 * result.loss:+.2f}{error} %"


def facts_of(result: Result) -> str:
    """Facts recalled, among those that the full cache recalls."""
    return f"{result.recalled}/{result.asked}" if result.asked else "-"


def table(results: Sequence[Result], protocol: Protocol, sizes: Sequence[int] = ()) -> Table:
    """The results for a terminal.

    Args:
        results: The arms' results.
        protocol: How the arms were measured.
        sizes: The sizes to show.
    """
    rows = Table(
        title=f"{what_was_read(protocol)}, bounded caches: {what_is_equal(protocol, sizes)}",
        caption="Bytes as a 16-bit model has them; the loss with its standard error over the "
        f"samples. BLAS: {blas()}",
    )
    rows.add_column("cache")
    for column in ("perplexity", "loss", "facts", "tokens/s", "KV bytes", "less"):
        rows.add_column(column, justify="right")
    for result in results:
        speed = result.tokens_per_second
        rows.add_row(
            result.arm,
            f"{result.perplexity:.2f}",
            loss_of(result),
            facts_of(result),
            "-" if speed is None else f"{speed:.0f}",
            f"{result.nbytes:,}",
            f"{result.compression:.1f}x",
        )
    return rows
