"""The versions of other packages that were tested, and one warning about any that is newer.

pyproject.toml sets no upper limits. Beyond the versions here patches whose target has changed are
left out (`hosts/own_attention.py`), GPU kernels are checked as ever, and the CPU kernels serve no
other MLX than the one they were built with (`attention/backends/cpu.py`): steps go op by op.
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
TESTED = {
    "mlx": Range("0.31.2", "0.32.4"),
    "mlx-lm": Range("0.31.3", "0.32.2"),
    "gguf": Range("0.17", "0.19.0"),
}


class UntestedVersion(UserWarning):
    """A newer version of a package than any that was tested."""


def is_newer(name: str) -> bool:
    """Whether a package is newer than anything that was tested."""
    return numbers(version(name)) > numbers(TESTED[name].newest)


@functools.cache
def warn_if_newer(name: str) -> None:
    """Warn of a package that is newer than anything that was tested, once in a process."""
    if not is_newer(name):
        return
    oldest, newest = TESTED[name]
    slow = "; its CPU kernels were built for another MLX and are not used, which is slow"
    warnings.warn(
        f"{name} {version(name)} is newer than those that mlx-h2o was tested with, {oldest} to "
        f"{newest}{slow if name == 'mlx' else ''}. `mlx_h2o doctor` checks it here; "
        f"`pip install '{name}=={newest}'` brings one that was tested.",
        UntestedVersion,
        stacklevel=3,
    )


def numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (0, 32, 4) of "0.32.4.dev20261125"."""
    begun = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, begun[0].split("."))) if begun else ()
