"""The command line's parser: an error is one line, with the option that was probably meant."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from mlx_h2o import _checks

#: The largest absolute value of whole numbers: positions and indices are 32-bit numbers wherever
#: they are computed with.
MOST_COUNT = 2**31 - 1


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, without the usage, and bounds every number.

    `type=int` takes whole numbers that fit 32 bits, `type=float` finite numbers.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register("type", int, whole_number)
        self.register("type", float, finite_number)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse as argparse does, with a suggestion for an unknown option."""
        parsed, extra = self.parse_known_args(args, namespace)
        if extra:
            self._command(parsed.command).refuse(extra)
        return parsed

    def refuse(self, extra: Sequence[str]) -> NoReturn:
        """Exit with 2 because of unknown arguments."""
        first = extra[0].partition("=")[0]
        if not first.startswith("-"):
            self.error(f"there is no place for {extra[0]!r}; --help lists what there is.")
        options = [name for action in self._seen_actions() for name in action.option_strings]
        meant = _checks.suggestion(first, options) or " --help lists what there is."
        self.error(f"there is no option {first}.{meant}")

    def _seen_actions(self) -> list[argparse.Action]:
        """The actions that the help shows."""
        return [action for action in self._actions if action.help != argparse.SUPPRESS]

    def _command(self, name: str) -> Parser:
        """The parser of a subcommand."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parser = action.choices[name]
                assert isinstance(parser, Parser)
                return parser
        return self

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError, with a suggestion, for a value outside an action's choices."""
        choices = [str(one) for one in action.choices or ()]
        if not choices or (action.choices is not None and value in action.choices):
            return
        what = "command " if isinstance(action, argparse._SubParsersAction) else ""
        meant = _checks.suggestion(str(value), choices) or f" There are {', '.join(choices)}."
        message = f"there is no {what}{value!r}.{meant}"
        raise argparse.ArgumentError(None if what else action, message)


def whole_number(text: str) -> int:
    """A whole number that fits 32 bits.

    Raises:
        argparse.ArgumentTypeError: The text is something else.
    """
    # Checked before int(): for very many digits it takes long, and then raises.
    digits = text.strip().lstrip("+-")
    if not digits.isdecimal() or len(text.strip()) - len(digits) > 1:
        raise argparse.ArgumentTypeError(f"it must be a whole number; got {shortened(text)}")
    if len(digits.lstrip("0")) > len(str(MOST_COUNT)) or abs(int(text)) > MOST_COUNT:
        raise argparse.ArgumentTypeError(
            f"it must be at most {MOST_COUNT:,} (and at least -{MOST_COUNT:,}); "
            f"got {shortened(text)}"
        )
    return int(text)


def finite_number(text: str) -> float:
    """A number that is neither NaN nor infinite.

    Raises:
        argparse.ArgumentTypeError: The text is something else.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"it must be a finite number; got {shortened(text)}")
    return number


def shortened(text: str, most: int = 40) -> str:
    """A text in quotes, cut where it is long."""
    return repr(text if len(text) <= most else f"{text[:most]}...")
