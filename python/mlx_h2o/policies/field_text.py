"""Policies' fields as text: FIELD=VALUE."""

from __future__ import annotations

from typing import Any


def field_of_text(text: str) -> tuple[str, Any]:
    """The pair (FIELD, VALUE) of a text FIELD=VALUE.

    Raises:
        ValueError: The text has no "=".
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"A policy's field is written FIELD=VALUE; got {text!r}.")
    return name.replace("-", "_"), value_of_text(value)


def value_of_text(text: str) -> Any:
    """A count ("64"), a number ("0.25"), true or false, or the text itself."""
    if text in ("true", "false"):
        return text == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
