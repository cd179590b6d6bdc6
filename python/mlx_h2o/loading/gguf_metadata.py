"""A GGUF file's metadata, each entry of the type and in the range that its reader wants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Metadata = Mapping[str, Any]


def missing(key: str) -> ValueError:
    """The error that says which entry is not there."""
    return ValueError(f"The GGUF file lacks {key}.")


def whole(metadata: Metadata, key: str, least: int, most: int, default: int | None = None) -> int:
    """A whole number.

    Args:
        metadata: The file's.
        key: Its entry.
        least: The smallest that it may be.
        most: The largest.
        default: What it is where the file does not say; None: it must.

    Raises:
        ValueError: It is missing, or no such number.
    """
    value = metadata.get(key, default)
    if value is None:
        raise missing(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(
            f"The GGUF file's {key} must be a whole number from {least} to {most}; it is "
            f"{str(value)[:40]}."
        )
    return value


def positive(metadata: Metadata, key: str, default: float | None = None) -> float:
    """A finite number above 0.

    Args:
        metadata: Of the file.
        key: Of the entry.
        default: Where there is none; None: it must be there.

    Raises:
        ValueError: It is missing, or no such number.
    """
    value = metadata.get(key, default)
    if value is None:
        raise missing(key)
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not (value > 0 and math.isfinite(value)):
        raise ValueError(
            f"The GGUF file's {key} must be a number above 0; it is {str(value)[:40]}."
        )
    return float(value)


def text(metadata: Metadata, key: str, default: str | None = None) -> str:
    """A text.

    Args:
        metadata: Of the file.
        key: Of the entry.
        default: Where there is none; None: it must be there.

    Raises:
        ValueError: It is missing, or none.
    """
    value = metadata.get(key, default)
    if value is None:
        raise missing(key)
    if not isinstance(value, str):
        raise ValueError(f"The GGUF file's {key} must be a text; it is {str(value)[:40]}.")
    return value


def items(metadata: Metadata, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    """An array of texts (`str`) or whole numbers (`int`).

    Args:
        metadata: Of the file.
        key: Of the entry.
        kind: Of the elements.
        default: Where there is none; None: it must be there.

    Raises:
        ValueError: It is missing, or something else.
    """
    value = metadata.get(key, default)
    if value is None:
        raise missing(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        wanted = "texts" if kind is str else "whole numbers"
        raise ValueError(f"The GGUF file's {key} must be an array of {wanted}.")
    return value
