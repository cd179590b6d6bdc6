"""Wheels fetched with pip into folders that git ignores."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

FOR_MACOS = ("--platform", "macosx_14_0_arm64")


class NoWheel(Exception):
    """A wheel cannot be downloaded here."""


def fetch(requirement: str, folder: Path, *options: str) -> Path:
    """A wheel, unpacked: its content as installed in site-packages.

    Args:
        requirement: The requirement in pip's syntax.
        folder: The folder to unpack it into.
        options: Options of `pip download`.

    Raises:
        NoWheel: The download failed; the message is pip's.
    """
    target = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(target)]
    command += ["--only-binary=:all:", "--no-deps", "--quiet", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoWheel(f"{requirement} could not be downloaded:\n{done.stderr.strip()}")
    (wheel,) = target.glob("*.whl")
    unpacked = target / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        # Apple's compiled kernels are most of MLX's wheel, and they are not needed here.
        names = [name for name in archive.namelist() if not name.endswith(".metallib")]
        archive.extractall(unpacked, names)
    return unpacked


def fetch_macos_mlx(folder: Path) -> Path:
    """The folder `mlx` of the installed version's wheel for Apple GPUs.

    Raises:
        NoWheel: The download failed; the message is pip's.
    """
    return fetch(f"mlx-metal=={version('mlx')}", folder, *FOR_MACOS) / "mlx"
