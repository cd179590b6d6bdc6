"""Sizes in bytes as people write them: 64000000, "64MB", "1.5GiB", or "25%" of a 16-bit cache."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from mlx_h2o import checks

UNITS = {"": 1, "B": 1} | {
    f"{letter}{i}B": (1024 if i else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for i in ("", "i")
}
FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)")
#: Context that shares are of where neither caller nor model says one.
USUAL_CONTEXT = 4096


def size_text(nbytes: float) -> str:
    """Bytes as people read them: "7.7 MB", "812 kB", "45 bytes"."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    unit = 0
    while nbytes >= 999.5 and unit < len(units) - 1:
        nbytes /= 1000
        unit += 1
    return f"{nbytes:.{1 if unit and nbytes < 99.95 else 0}f} {units[unit]}"


class Share(NamedTuple):
    """A part of the bytes that a 16-bit cache takes at the context that is asked for."""

    part: float


def memory_size(name: str, size: Any) -> int | Share:
    """Bytes as a whole number, or a share of the bytes that a 16-bit cache takes.

    Args:
        name: The setting that gave it.
        size: A whole number of bytes, or a text.

    Raises:
        ValueError: It is neither, or not above 0.
    """
    if isinstance(size, Share):
        return size
    if not isinstance(size, str):
        return checks.whole(name, size, 1)
    found = FORM.fullmatch(size.strip())
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if found is None or (found[2] != "%" and found[2].lower() not in units):
        raise ValueError(
            f'{name} must be bytes, as 64000000, "64MB" or "1.5GiB", or a share of a 16-bit cache, '
            f'as "25%"; got {size!r}.'
        )
    number = float(found[1])
    if number <= 0:
        raise ValueError(f"{name} must be above 0; got {size!r}.")
    if found[2] == "%":
        return Share(number / 100)
    return checks.whole(name, int(number * units[found[2].lower()]), 1)
