"""Sizes in bytes as people write them: 64000000, "64MB", "1.5GiB", or "25%" of a 16-bit cache."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from mlx_h2o import _checks

UNITS = {"": 1, "B": 1} | {
    f"{letter}{i}B": (1024 if i else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for i in ("", "i")
}
FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)", re.ASCII)
#: The most digits of a number in a text: more than any size has.
LONGEST = 40
#: Up to this a number without a unit is probably a percentage: no cache fits into so few bytes.
RATHER_A_SHARE = 100
#: The context that shares refer to where neither the caller nor the model names one.
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
    """A share of the bytes that a 16-bit cache takes at the requested context."""

    part: float


def memory_size(name: str, size: Any) -> int | Share:
    """Bytes as a whole number, or a share of the bytes that a 16-bit cache takes.

    Args:
        name: The name of the setting, for messages.
        size: A whole number of bytes, or a text.

    Raises:
        ValueError: It is neither, it is not above 0, or it is too large.
    """
    if isinstance(size, Share):
        return _share(name, size.part, size.part)
    if not isinstance(size, str):
        return _checks.whole(name, size, 1, _checks.MOST_BYTES)
    match = FORM.fullmatch(size.strip())
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if match is None or (match[2] != "%" and match[2].lower() not in units):
        raise ValueError(
            f'{name} must be bytes, as 64000000, "64MB" or "1.5GiB", or a share of a 16-bit cache, '
            f'as "25%"; got {_checks.shown(size)}.'
        )
    if len(match[1]) > LONGEST:
        raise ValueError(
            f"{name} has a number of {len(match[1])} characters; got {_checks.shown(size)}."
        )
    number = float(match[1])
    if number <= 0:
        raise ValueError(f"{name} must be above 0; got {size!r}.")
    if match[2] == "%":
        return _share(name, number / 100, size)
    if not match[2] and number <= RATHER_A_SHARE:
        raise ValueError(
            f"{name} is {size!r} bytes, which is too little for a cache: did you mean "
            f'"{match[1]}%"?'
        )
    return _checks.whole(name, int(number * units[match[2].lower()]), 1, _checks.MOST_BYTES)


def _share(name: str, part: Any, text: Any) -> Share:
    """A share in range; `text` is the caller's text."""
    if not 0 < _checks.finite(name, part) <= _checks.LARGEST_SHARE:
        raise ValueError(
            f"{name} must be above 0% and at most {_checks.LARGEST_SHARE:.0%} of a 16-bit cache; "
            f"got {_checks.shown(text)}."
        )
    return Share(float(part))
