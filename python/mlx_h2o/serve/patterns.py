"""Regular expressions from clients, matched in time that grows linearly with the text.

Python's `re` backtracks over a text as often as there are ways to match it, and blocks the whole
process meanwhile, so that "(a+)+b" stops a server. RE2 (https://github.com/google/re2) never
does: one search takes at most its compiled size times its text, which is limited beforehand. RE2
supports no backreferences, lookaheads or lookbehinds, and its \\w, \\d and \\b are those of ASCII.
As finding every match can take as many searches as there are characters, the time is checked after
each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_h2o.storage.pins import Span

#: The most characters of a pattern.
MOST_CHARACTERS = 256
#: Bytes that RE2 may use for a pattern.
MOST_MEMORY = 1 << 18
#: Instructions of all compiled patterns of a request times the bytes of its prompt. At the worst
#: that could be found RE2 took 13 ns for each, so one search of all takes less than half a second.
MOST_WORK = 1 << 25
#: Seconds after which the search for matches stops.
MOST_SECONDS = 0.5
MISSING = "Patterns need google-re2 here (pip install 'mlx-h2o[server]'): pin roles or texts."


def check_pattern(name: str, pattern: Any) -> None:
    """Raise ValueError unless a pattern can be matched.

    Args:
        name: The field's name, for the message.
        pattern: The value to check.
    """
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"{name} must be a regular expression; got {pattern!r}.")
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(
            f"{name} has {len(pattern)} characters; {MOST_CHARACTERS} are taken at most."
        )
    _compiled(name, pattern)


def matches(patterns: Sequence[str], text: str) -> Iterator[Span]:
    """The spans in which checked patterns match in a text, one after another.

    Raises:
        ValueError: The patterns are too large for such a long text, or match too often.
    """
    compiled = [_compiled("A pattern", pattern) for pattern in patterns]
    size, length = sum(one.programsize for one in compiled), len(text.encode())
    if size * length > MOST_WORK:
        raise ValueError(
            f"Patterns of {size:,} instructions are not matched over a prompt of {length:,} bytes: "
            f"both multiplied may be {MOST_WORK:,}. Pin by shorter patterns with fewer "
            "repetitions, by texts, or by spans of tokens."
        )
    end = time.monotonic() + MOST_SECONDS
    for pattern, one in zip(patterns, compiled, strict=True):
        for match in one.finditer(text):
            yield match.span()
            if time.monotonic() > end:
                raise ValueError(
                    f"{pattern!r} matches so often that {MOST_SECONDS} seconds were not enough: "
                    "give a more specific pattern."
                )


def _compiled(name: str, pattern: str) -> Any:
    """A pattern compiled by RE2.

    Raises:
        ValueError: RE2 does not support it, or is not installed.
    """
    try:
        import re2
    except ImportError:
        raise ValueError(MISSING) from None
    options = re2.Options()
    options.max_mem, options.log_errors = MOST_MEMORY, False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0].decode() if isinstance(error.args[0], bytes) else error.args[0]
        raise ValueError(
            f"{name} {pattern!r} is not matched: {why}. References back, and looks ahead or "
            "behind, are not known here."
        ) from error
