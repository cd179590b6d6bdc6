"""Checks of settings: each returns the value as Python's own type, or raises and names the error.

Every number that comes from outside (an argument, a request, a file, an option) passes through here
before anything is computed with it, and has a largest value.
"""

from __future__ import annotations

import difflib
import math
import operator
import reprlib
from collections.abc import Iterable
from typing import Any

import numpy as np

#: Tokens, slots and steps: positions are int32, and a cache goes on after it was loaded.
MOST_TOKENS = 2**30
#: A pebibyte, above any memory; products with a model's widths stay within 64 bits.
MOST_BYTES = 2**50
#: Victims of one choice: each head keeps their slots, and more would stall a step.
MOST_VICTIMS = 2**16
#: Neighbours that smooth a window's mass: more would make all masses alike.
WIDEST_POOL = 2**12
#: The largest size as a share of a 16-bit cache: 16 such caches, as in Swift.
LARGEST_SHARE = 16.0
#: Weights and other real numbers: kernels count in float32, where squares of these are finite.
MOST_NUMBER = 2.0**60
#: Integers of more bits are described in messages: Python prints none of thousands of digits.
_PRINTED_BITS = 128


class _Shortened(reprlib.Repr):
    """Values as messages show them: long texts and lists are cut, and so are huge integers."""

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() <= _PRINTED_BITS:
            return repr(x)
        digits = int(x.bit_length() * math.log10(2)) + 1
        return f"{'-' * (x < 0)}(an integer of about {digits} digits)"


_shortened = _Shortened()
_shortened.maxlist = _shortened.maxtuple = _shortened.maxdict = 16
_shortened.maxstring = _shortened.maxother = 160


def shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    return _shortened.repr(value)


def whole(name: str, value: Any, least: int | None = None, most: int = MOST_TOKENS) -> int:
    """A whole number: Python's or numpy's, but no truth value and no 3.0.

    Args:
        name: The setting's name, for the message.
        value: The value to check.
        least: The smallest value allowed; None means `-most`.
        most: The largest value allowed.

    Raises:
        ValueError: It is something else, or out of range.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a whole number; got {shown(value)}.") from None
    least = -most if least is None else least
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {shown(number)}.")
    if number > most:
        raise ValueError(f"{name} must be at most {most}; got {shown(number)}.")
    return number


def is_list(value: Any) -> bool:
    """Whether a value is a list, a tuple or an array of at least one dimension."""
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def wholes(name: str, values: Any, least: int | None = None) -> tuple[int, ...]:
    """A list of whole numbers; one-dimensional arrays are lists.

    Args:
        name: The setting's name, for the message.
        values: The value to check.
        least: The smallest number allowed.

    Raises:
        ValueError: It is something else, empty, or a number is less than `least`.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if not is_list(values) or not values:
        raise ValueError(f"{name} must be a list of whole numbers; got {shown(values)}.")
    return tuple(whole(f"{name}[{i}]", value, least) for i, value in enumerate(values))


def finite(name: str, value: Any, most: float = MOST_NUMBER) -> float:
    """A number that is neither NaN nor infinite.

    Args:
        name: The setting's name, for the message.
        value: The value to check.
        most: The largest absolute value allowed.

    Raises:
        ValueError: It is something else, or out of range.
    """
    real = isinstance(value, int | float | np.integer | np.floating)
    if not real or isinstance(value, bool) or value != value or value in (math.inf, -math.inf):
        raise ValueError(f"{name} must be a finite number; got {shown(value)}.")
    if not -most <= value <= most:
        raise ValueError(f"{name} must be from {-most:g} to {most:g}; got {shown(value)}.")
    return float(value)


def switch(name: str, value: Any) -> bool:
    """True or False, and nothing that merely converts to one of them ("no" would become True).

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False; got {shown(value)}.")
    return bool(value)


def choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """One of some values.

    Args:
        name: The setting's name, for the message.
        value: The value to check.
        choices: The values allowed.

    Raises:
        ValueError: It is something else.
    """
    # True == 1, and 8.0 == 8: the types must agree too.
    if not any(type(value) is type(one) and value == one for one in choices):
        *most, last = (f'"{one}"' if isinstance(one, str) else str(one) for one in choices)
        raise ValueError(f"{name} must be {', '.join(most)} or {last}; got {shown(value)}.")
    return value


def suggestion(name: str, choices: Iterable[str]) -> str:
    """ " Did you mean ...?" where an unknown name resembles a known one; else an empty text."""
    names = list(choices)
    begun = [one for one in names if len(name) > 1 and one.startswith(name)]
    near = begun or difflib.get_close_matches(name, names, 1)
    return f" Did you mean {near[0]}?" if near else ""
