"""A request's body: JSON, of which only moderate sizes become objects."""

from __future__ import annotations

import json
from typing import Any

#: The deepest nesting of objects and lists; Python's own reader ends at about a thousand.
MOST_DEPTH = 100
#: The most digits of a number: any shorter number is a finite float.
MOST_DIGITS = 300


def parsed(body: bytes) -> Any:
    """The object that a body holds.

    Raises:
        ValueError: It is no JSON, too deeply nested, or has numbers or texts that no field can
            take.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"The body is no JSON in UTF-8: {error}") from error
    if not text.strip():
        raise ValueError("The body is empty; it must be a JSON object.")
    try:
        told = json.loads(text, parse_int=_whole, parse_float=_real, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError(_too_deep()) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"The body is no JSON: {error}") from error
    _check(told)
    return told


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(
            f"The body has a number of {len(digits)} digits; {MOST_DIGITS} are taken at most."
        )
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("The body has a number that is too large for a double.")
    return value


def _no_number(name: str) -> float:
    raise ValueError(f"The body is no JSON: it has {name}, which is no number there.")


def _too_deep() -> str:
    return f"The body's objects and lists are nested more than {MOST_DEPTH} deep."


def _check(told: Any) -> None:
    """Raise ValueError for objects nested too deeply, and for texts that UTF-8 cannot encode."""
    level, depth = [told], 0
    while level:
        below = list[Any]()
        for value in level:
            if isinstance(value, str) and not value.isascii():
                _check_text(value)
            elif isinstance(value, dict | list):
                if depth == MOST_DEPTH:
                    raise ValueError(_too_deep())
                if isinstance(value, dict):
                    below += value.keys()
                below += value.values() if isinstance(value, dict) else value
        level, depth = below, depth + 1


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        why = "The body has half of a surrogate pair, which is no character."
        raise ValueError(why) from error
