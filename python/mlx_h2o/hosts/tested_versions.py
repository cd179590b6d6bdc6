"""The versions of MLX and mlx-lm that were tested, and one warning about any other.

pyproject.toml allows those that were tested and no others, so that pip brings no other. One who
installs a newer version all the same is told at the first use of a cache.
"""

from __future__ import annotations

import functools
import re
import warnings
from importlib.metadata import version
from typing import NamedTuple


class Range(NamedTuple):
    """The oldest and the newest version that were tested."""

    oldest: str
    newest: str


#: tests/repo/test_release.py holds pyproject.toml and the Makefile to these.
TESTED = {"mlx": Range("0.31.2", "0.32.4"), "mlx-lm": Range("0.31.3", "0.32.2")}


class UntestedVersion(UserWarning):
    """A newer MLX or mlx-lm than any that was tested."""


@functools.cache
def warn_if_newer() -> None:
    """Warn of what is newer than anything that was tested, once in a process."""
    for name, (oldest, newest) in TESTED.items():
        if numbers(found := version(name)) > numbers(newest):
            warnings.warn(
                f"{name} {found} is newer than those that mlx-h2o was tested with, {oldest} to "
                f"{newest}. `mlx_h2o doctor` checks it here; `pip install '{name}=={newest}'` "
                "brings one that was tested.",
                UntestedVersion,
                stacklevel=3,
            )


def numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (0, 32, 4) of "0.32.4.dev20261125"."""
    begun = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, begun[0].split("."))) if begun else ()
