"""Regular expressions that clients send, in time that grows with the text and no faster.

Python's `re` goes back over a text as often as there are ways to match it, and holds up the whole
process meanwhile, so that "(a+)+b" stops a server. RE2 (https://github.com/google/re2) never does:
one search takes at most its compiled size times its text, which is limited beforehand. It knows
neither references back nor looks ahead or behind, and its \\w, \\d and \\b are those of ASCII. As
finding every match can take as many searches as there are characters, the time is looked at after
each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_h2o.storage.pins import Span

#: Of a pattern.
MOST_CHARACTERS = 256
#: Bytes that RE2 may use for a pattern.
MOST_MEMORY = 1 << 18
#: Instructions of all compiled patterns of a request times the bytes of its prompt. At the worst
#: that could be found RE2 took 13 ns for each, so one search of all takes less than half a second.
MOST_WORK = 1 << 25
#: Seconds after which no further match is looked for.
MOST_SECONDS = 0.5
MISSING = "Patterns need google-re2 here (pip install 'mlx-h2o[server]'): pin roles or texts."


def check_pattern(name: str, pattern: Any) -> None:
    """Raise ValueError unless a pattern is one that can be matched.

    Args:
        name: What the caller calls it.
        pattern: Anything.
    """
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"{name} must be a regular expression; got {pattern!r}.")
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(
            f"{name} has {len(pattern)} characters; {MOST_CHARACTERS} are taken at most."
        )
    _compiled(name, pattern)


def matches(patterns: Sequence[str], text: str) -> Iterator[Span]:
    """Where checked patterns match in a text, one after another.

    Raises:
        ValueError: They are too large for so long a text, or find too much in it.
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
    """A pattern as RE2 has it.

    Raises:
        ValueError: It is none that RE2 knows, or RE2 is not installed.
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
