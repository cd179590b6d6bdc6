#!/usr/bin/env python3
"""Installs what building a wheel needs into this Python, MLX for a newer libc included.

    python tools/install_mlx_to_build.py pyproject.toml

MLX's wheels ask for glibc 2.35; the newest image for manylinux wheels of x86_64 and aarch64 has
2.34, where pip takes none of them. To compile and link against MLX needs its files alone: nothing
loads them. So pip is told to take those for 2.35 (for which it wants `--target`).
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

#: The libc that MLX's wheels ask for.
MLX_PLATFORM = "manylinux_2_35"


def commands(project: dict[str, object], machine: str, target: str) -> list[list[str]]:
    """Two commands of pip: for MLX, and for the other requirements of the build.

    Args:
        project: pyproject.toml.
        machine: As in "aarch64".
        target: The folder site-packages.
    """
    build = project["build-system"]
    assert isinstance(build, dict)
    required = [requirement.partition(";")[0].strip() for requirement in build["requires"]]
    pip = [sys.executable, "-m", "pip", "install"]
    mlx = [requirement.replace("[cpu]", "-cpu") for requirement in required if "mlx" in requirement]
    return [
        [
            *(*pip, "--target", target, "--platform", f"{MLX_PLATFORM}_{machine}"),
            *("--only-binary=:all:", "--no-deps", "--upgrade", *mlx),
        ],
        [
            *pip,
            *(requirement for requirement in required if "mlx" not in requirement),
            "cmake",
            "ninja",
        ],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", type=Path, help="pyproject.toml")
    project = tomllib.loads(parser.parse_args().project.read_text(encoding="utf-8"))
    target = sysconfig.get_path("purelib")
    for command in commands(project, platform.machine(), target):
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
