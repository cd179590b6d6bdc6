"""What a setting may be: a check gives its value as Python's own type, or names what is wrong."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A whole number: Python's or numpy's, but no truth value and no 3.0.

    Raises:
        ValueError: It is something else, or less than `least`.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a whole number; got {value!r}.") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}.")
    return number


def is_list(value: Any) -> bool:
    """Whether a value is a list, a tuple or an array of at least one dimension."""
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def wholes(name: str, values: Any, least: int | None = None) -> tuple[int, ...]:
    """A list of whole numbers; one-dimensional arrays are lists.

    Raises:
        ValueError: It is something else, empty, or a number is less than `least`.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if not is_list(values) or not values:
        raise ValueError(f"{name} must be a list of whole numbers; got {values!r}.")
    return tuple(whole(f"{name}[{i}]", value, least) for i, value in enumerate(values))


def finite(name: str, value: Any) -> float:
    """A number that is neither NaN nor infinite.

    Raises:
        ValueError: It is something else.
    """
    number = value if isinstance(value, int | float | np.number) else math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number; got {value!r}.")
    return float(number)


def switch(name: str, value: Any) -> bool:
    """True or False, and nothing that merely counts as one of them ("no" would count as True).

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False; got {value!r}.")
    return bool(value)


def choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """One of some values.

    Raises:
        ValueError: It is something else.
    """
    # True == 1, and 8.0 == 8: neither is meant by what is written here.
    if not any(type(value) is type(one) and value == one for one in choices):
        *most, last = (f'"{one}"' if isinstance(one, str) else str(one) for one in choices)
        raise ValueError(f"{name} must be {', '.join(most)} or {last}; got {value!r}.")
    return value
