"""MLX's wheel for Apple GPUs, fetched with pip into a folder that nobody commits."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

PLATFORM = "macosx_14_0_arm64"


class NoWheel(Exception):
    """The wheel cannot be downloaded here."""


def fetch(folder: Path) -> Path:
    """The unpacked wheel of the installed MLX's version: what an import of mlx finds on a Mac.

    Raises:
        NoWheel: With what pip said.
    """
    package = f"mlx-metal=={version('mlx')}"
    command = [sys.executable, "-m", "pip", "download", package, "--dest", str(folder)]
    command += ["--platform", PLATFORM, "--only-binary=:all:", "--no-deps", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoWheel(f"{package} for {PLATFORM} could not be downloaded:\n{done.stderr.strip()}")
    unpacked = folder / "unpacked"
    (wheel,) = folder.glob("mlx_metal-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        # The compiled kernels are most of it, and nobody asks for them here.
        names = [name for name in archive.namelist() if not name.endswith(".metallib")]
        archive.extractall(unpacked, names)
    return unpacked / "mlx"
