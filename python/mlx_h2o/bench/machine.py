"""What ran the benchmark: the processor, what is installed, and how busy it was."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_h2o._utils.blas import blas
from mlx_h2o.attention.backends import choice

# Where the system does not tell how large its caches are.
USUAL_CACHE = 64 << 20
# A core that others keep this busy makes times worth little (ratios a little more).
BUSY = 0.5


def require_kernels() -> None:
    """Raise ValueError unless the CPU kernels are there."""
    if choice.cpu() is None:
        raise ValueError(
            "The benchmark measures the CPU kernels, and the extension is not installed here."
        )


def describe() -> dict[str, Any]:
    """The machine and the kernels' part of it, as JSON types."""
    from mlx_h2o import _ext

    kernels = {"threads": _ext.threads(), "isa": _ext.isa(), "cache_bytes": cache_bytes()}
    return {**machine(), **kernels}


def machine() -> dict[str, Any]:
    """What measures: processor, system, versions and BLAS, as JSON types."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 1,
        "blas": blas(),
        "load": load_average(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("mlx", "mlx-lm", "mlx-h2o")},
        },
        "date": date.today().isoformat(),
    }


def cpu_model() -> str:
    """The processor's name."""
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cache_bytes() -> int:
    """Size of the last-level cache."""
    sizes = [
        int(file.read_text().strip().removesuffix("K")) << 10
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=USUAL_CACHE)


def load_average() -> float:
    """Threads that wanted to run in the last minute, on average."""
    return round(os.getloadavg()[0], 2)


def is_busy() -> bool:
    """Whether others use this machine now."""
    return load_average() > BUSY * (os.cpu_count() or 1)
