"""Options for pins (tokens never evicted) of `generate`, `chat` and `compress`."""

from __future__ import annotations

import argparse

from mlx_h2o.chat.pin_rules import DEFINITIONS, PinRules
from mlx_h2o.cli.options import typed
from mlx_h2o.slots.pins import Span, checked_spans


def add_pin_options(parser: argparse.ArgumentParser, document: bool = False) -> None:
    """Add the options for pins.

    Args:
        parser: The parser to add them to.
        document: Whether parts of a document can be pinned by a pattern or by their tokens.
    """
    group = parser.add_argument_group("pins", "What is never evicted, counted against the memory.")
    group.add_argument(
        "--pin", action="append", default=[], metavar="TEXT", help="this text of the prompt"
    )
    group.add_argument(
        "--pin-role", action="append", default=[], metavar="ROLE",
        help="all that this role says, e.g. system",
    )  # fmt: skip
    if document:
        group.add_argument(
            "--pin-pattern", action="append", default=[], metavar="REGEX",
            help=f"whole sentences that match, e.g. {DEFINITIONS!r}".replace("%", "%%"),
        )  # fmt: skip
        group.add_argument(
            "--pin-span", action="append", default=[], metavar="FIRST:END",
            type=typed(span_of, "tokens such as 0:40, the first and one past the last"),
            help="these tokens, e.g. 0:40",
        )  # fmt: skip


def pin_rules(args: argparse.Namespace) -> PinRules:
    """The pin rules that the options describe.

    Raises:
        ValueError: A pattern is no regular expression.
    """
    patterns = getattr(args, "pin_pattern", ())
    spans = getattr(args, "pin_span", ())
    return PinRules(tuple(args.pin_role), tuple(args.pin), tuple(patterns), spans=tuple(spans))


def span_of(text: str) -> Span:
    """Tokens, "0:40": the first and one past the last.

    Raises:
        ValueError: The text is no span.
    """
    first, end = (int(part) for part in text.split(":"))
    (span,) = checked_spans("span", [(first, end)])
    return span
