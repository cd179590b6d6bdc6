"""`mlx_h2o evaluate`: the cost of a share of the cache's bytes, on your model and your text."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_h2o import _checks
from mlx_h2o._blas import advice
from mlx_h2o._files import require_folder, write_kept
from mlx_h2o._progress import progress_bar
from mlx_h2o.cli.options import (
    add_model_option,
    add_profile_option,
    add_table_options,
    named_options,
    profile_choice,
    read_text,
    settle_model,
    typed,
)
from mlx_h2o.cli.tables import machine_line, show
from mlx_h2o.evaluate.evaluation import Evaluation, sizes_of
from mlx_h2o.evaluate.facts import FORMS
from mlx_h2o.evaluate.measures import MEASURES, Measure
from mlx_h2o.evaluate.methods import FULL, Method, default_methods, sized
from mlx_h2o.evaluate.page import page
from mlx_h2o.evaluate.plotting import drawing
from mlx_h2o.evaluate.presets import PRESETS, chosen_measures
from mlx_h2o.evaluate.reader import Reader
from mlx_h2o.evaluate.report import Section
from mlx_h2o.evaluate.summary import answer_of
from mlx_h2o.loading.demo_model import cache_folder
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT
from mlx_h2o.policies import policy_names

FILE_NAME, PAGE_NAME = "evaluation.json", "evaluation.html"
#: Tokens of a prompt that are read at once.
CHUNK = 256


def add_parser(commands: Any) -> None:
    """Add `evaluate` to the command's subparsers."""
    parser = commands.add_parser(
        "evaluate",
        help="find out what a share of the cache costs, on your model and text",
        description="Perplexity with intervals, recall of needles, and facts after many turns: of "
        "mlx-lm's full cache, sliding window and packed caches, of mlx-h2o's, and of any policies, "
        "each in the same bytes. Ctrl-C keeps what is done, and the same command goes on.",
    )
    add_reader_options(parser)
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    parser.add_argument(
        "--preset", choices=PRESETS, default="full", help=f"{presets} (default: %(default)s)"
    )
    parser.add_argument(
        "--quick", dest="preset", action="store_const", const="quick", help="--preset quick"
    )
    parser.add_argument(
        "--measures", nargs="+", choices=MEASURES, default=[], metavar="NAME",
        help=f"only these: {', '.join(MEASURES)}",
    )  # fmt: skip
    parser.add_argument(
        "--size", action="append", default=[], metavar="MEASURE.FIELD=VALUE",
        help="another size of a measure, e.g. needles.lengths=512,1024 or perplexity.samples=20",
    )  # fmt: skip
    _add_methods(parser)
    add_run_options(parser)
    parser.set_defaults(run=run, settings=settings)


def add_reader_options(parser: argparse.ArgumentParser) -> None:
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


def _add_methods(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose caches."""
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--shares", nargs="+", type=typed(share_of, "a part such as 0.25 or 1/4"), metavar="PART",
        help="shares of a full 16-bit cache's bytes (default: 1/2 1/4 1/8 1/16; quick: 1/4)",
    )  # fmt: skip
    sizes.add_argument(
        "--max-kv-size", nargs="+", type=int, metavar="N",
        help="instead: tokens whose bytes, in a 16-bit model, the caches get",
    )  # fmt: skip
    parser.add_argument(
        "--policies", nargs="*", metavar="NAME[:FIELD=VALUE...]",
        help="policies to add, e.g. h2o keydiff:recent=64 salient:bits=6:remainder=false, or "
        "mlx-h2o:bits=8 for the default with other settings; there are "
        f"{', '.join(policy_names())}",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME",
        help="measure only the full cache, and those whose names begin with NAME",
    )  # fmt: skip
    add_profile_option(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for output."""
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="write the figures as they come, and one page that opens offline",
    )  # fmt: skip
    parser.add_argument(
        "--anew", action="store_true", help="measure everything, whatever was measured before"
    )
    add_table_options(parser)


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


def reader_of(args: argparse.Namespace) -> Reader:
    """The model and text that the options name.

    Raises:
        ValueError: A number is invalid, or the text is unreadable.
    """
    _checks.whole("--chunk", args.chunk, 2)
    _checks.whole("--seed", args.seed, 0, 2**63 - 1)
    text = plain_text(args.text)
    model = settle_model(args)
    facts = args.facts or ("questions" if model == EMBEDDED_MODEL else "cloze")
    return Reader(model, text, facts, args.chunk, args.seed)


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


def methods_of(args: argparse.Namespace, by_profile: bool = True) -> list[Method]:
    """The caches, with every size.

    Args:
        args: The command's options.
        by_profile: Whether a profile that they name is read.

    Raises:
        ValueError: An option names no cache.
    """
    preset = PRESETS[args.preset]
    policies = preset.policies if args.policies is None else args.policies
    budgets, measures = profile_choice(args)
    methods = default_methods(policies, budgets if by_profile else None, measures)
    for name in args.only:
        if not any(method.label.startswith(name) for method in methods):
            labels = ", ".join(method.label for method in methods)
            raise ValueError(f"--only {name!r}: no cache's name begins so; there are {labels}.")
    if args.only:
        methods = [method for method in methods if method.label.startswith((FULL, *args.only))]
    tokens = () if args.shares else args.max_kv_size or preset.tokens
    return sized(methods, () if tokens else args.shares or preset.shares, tokens)


def measures_of(args: argparse.Namespace) -> list[Measure]:
    """The measures, with their sizes."""
    return chosen_measures(PRESETS[args.preset], args.measures, args.size)


def settings(args: argparse.Namespace) -> dict[str, str]:
    """The options and defaults on which figures depend, by name; files it names need not exist."""
    methods = {method.label: method.described() for method in methods_of(args, by_profile=False)}
    sizes = {
        measure.name: ", ".join(f"{size}={value}" for size, value in sizes_of(measure).items())
        for measure in measures_of(args)
    }
    return named_options(args) | methods | sizes


def run(args: argparse.Namespace) -> None:
    """Measure, print, draw."""
    methods, measures = methods_of(args), measures_of(args)
    check_run_options(args)
    evaluation = Evaluation(reader_of(args), methods, measures)
    file = args.out / FILE_NAME if args.out else None
    try:
        measure(evaluation, file, args, f"evaluating {len(methods)} caches")
    finally:
        report(evaluation, args)


def check_run_options(args: argparse.Namespace) -> None:
    """Raise ValueError if nothing can be drawn or written to --out."""
    if args.out:
        drawing()
        require_folder("--out", args.out)


def measure(
    evaluation: Evaluation, file: Path | None, args: argparse.Namespace, title: str
) -> None:
    """Do all that is left of an evaluation, with a progress bar; each result is on disk at once.

    Args:
        evaluation: The evaluation.
        file: The file that keeps it; None: one in the user's cache folder, removed at the end.
        args: Say whether earlier results are used.
        title: The bar's title.
    """
    place = file or _place_of(evaluation)
    if not args.anew and evaluation.take_up(place):
        print(
            f"Going on after {evaluation.count} of {evaluation.total} measurements, which {place} "
            "holds (--anew begins anew).",
            file=sys.stderr,
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        with progress_bar(title) as bar:
            evaluation.run(bar, lambda: evaluation.save(place))
    except KeyboardInterrupt:
        if evaluation.count:
            print(
                f"{evaluation.count} of {evaluation.total} measurements are in {place}: the same "
                "command goes on after them.",
                file=sys.stderr,
            )
        raise
    if file is None:
        place.unlink(missing_ok=True)


def _place_of(evaluation: Evaluation) -> Path:
    """The file of this user's unfinished evaluation, if no other place is given."""
    digest = hashlib.sha256(json.dumps(evaluation.settings(), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "evaluations" / f"{digest[:32]}.json"


def report(evaluation: Evaluation, args: argparse.Namespace) -> None:
    """Print and write the results so far."""
    sections = evaluation.sections()
    refusals, answer = evaluation.refusals(), answer_of(evaluation, text_name(args))
    if args.json:
        print(json.dumps({**evaluation.as_json(), "answer": answer}))
    else:
        print_sections(sections, answer, args.markdown)
        print("\n".join(refusals), end="\n" if refusals else "")
        print(machine_line(evaluation.machine), file=sys.stderr)
        if line := advice():
            print(line, file=sys.stderr)
    if args.out and sections:
        title = f"{args.model}: what shares of the KV cache cost"
        write_page(args.out / PAGE_NAME, title, evaluation, sections, refusals, answer)


def print_sections(sections: list[Section], answer: str, markdown: bool) -> None:
    """Print the answer, and all tables.

    Args:
        sections: The sections whose tables are printed.
        answer: The sentence before them; empty if there is none.
        markdown: Whether tables are printed as Markdown.
    """
    if answer:
        print(f"{answer}\n")
    for section in sections:
        for table in section.tables:
            title = ": ".join(filter(None, (section.title, table.title)))
            show(replace(table, title=title), markdown)
            print()


def write_page(
    path: Path,
    title: str,
    evaluation: Evaluation,
    sections: list[Section],
    notes: list[str],
    answer: str,
) -> None:
    """Write the page, and say where; the arguments are those of `page`."""
    machine = evaluation.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    facts = {
        "model": evaluation.reader.model_name,
        "text": f"{len(evaluation.reader.text)} characters",
        "machine": f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}",
        "BLAS": machine["blas"],
        "versions": versions,
        "date": machine["date"],
        "seed": str(evaluation.reader.seed),
        "prompts are read": f"{evaluation.reader.chunk} tokens at once",
    }
    text = page(title, facts, sections, notes, answer)
    write_kept(path, lambda at: at.write_text(text, encoding="utf-8"))
    print(f"The report is {path}.", file=sys.stderr)


def text_name(args: argparse.Namespace) -> str:
    """The text in words."""
    return "the bundled text" if args.text == SAMPLE_TEXT else "your text"
