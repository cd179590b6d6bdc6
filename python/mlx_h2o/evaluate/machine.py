"""The measuring machine: its processor, its software, and how busy it is."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_h2o._blas import blas


def machine() -> dict[str, Any]:
    """The measuring machine: processor, system, versions and BLAS, as JSON types."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 1,
        "blas": blas(),
        "load": load_average(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        "date": date.today().isoformat(),
    }


def versions() -> dict[str, str]:
    """The versions of Python, MLX, mlx-lm and this package, by name."""
    packages = {name: version(name) for name in ("mlx", "mlx-lm", "mlx-h2o")}
    return {"python": platform.python_version(), **packages}


def cpu_model() -> str:
    """The processor's name."""
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """The output of a program, or an empty string if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def load_average() -> float:
    """The mean number of runnable threads in the last minute."""
    return round(os.getloadavg()[0], 2)
