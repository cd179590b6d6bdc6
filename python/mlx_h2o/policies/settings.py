"""Policies' settings as text typed by users."""

from __future__ import annotations

from typing import Any


def count_or_share(text: str) -> int | float:
    """The number in a text: "64" is a count, "0.25" a share."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def setting_of(text: str) -> tuple[str, Any]:
    """The pair (FIELD, VALUE) of a text FIELD=VALUE.

    Raises:
        ValueError: The text has no "=".
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"A setting is written FIELD=VALUE; got {text!r}.")
    return name.replace("-", "_"), parsed(value)


def parsed(value: str) -> Any:
    """A number, true or false, or the text itself."""
    if value in ("true", "false"):
        return value == "true"
    try:
        return count_or_share(value)
    except ValueError:
        return value
