"""A GGUF file's metadata, with the type and range of each entry checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Metadata = Mapping[str, Any]


def missing(key: str) -> ValueError:
    """The error for a missing entry."""
    return ValueError(f"The GGUF file lacks {key}.")


def whole(metadata: Metadata, key: str, least: int, most: int, default: int | None = None) -> int:
    """A whole number.

    Args:
        metadata: The file's metadata.
        key: The entry's key.
        least: The smallest value allowed.
        most: The largest value allowed.
        default: The value if the entry is missing; None means that the entry is required.

    Raises:
        ValueError: The entry is missing, or is no such number.
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
        metadata: The file's metadata.
        key: The entry's key.
        default: The value if the entry is missing; None means that the entry is required.

    Raises:
        ValueError: The entry is missing, or is no such number.
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
        metadata: The file's metadata.
        key: The entry's key.
        default: The value if the entry is missing; None means that the entry is required.

    Raises:
        ValueError: The entry is missing, or is no text.
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
        metadata: The file's metadata.
        key: The entry's key.
        kind: The type of the elements.
        default: The value if the entry is missing; None means that the entry is required.

    Raises:
        ValueError: The entry is missing, or is no such array.
    """
    value = metadata.get(key, default)
    if value is None:
        raise missing(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        wanted = "texts" if kind is str else "whole numbers"
        raise ValueError(f"The GGUF file's {key} must be an array of {wanted}.")
    return value
