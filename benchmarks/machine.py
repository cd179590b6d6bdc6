"""The benchmark's machine: its caches, the kernels' threads, and how busy it is."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from mlx_h2o.attention.backends import choice
from mlx_h2o.evaluate.machine import load_average, machine

# The size of the last-level cache where the system does not report it.
USUAL_CACHE = 64 << 20
# A machine on which others keep this part of a core busy gives useless times (ratios less so).
BUSY = 0.5


class Probe(Protocol):
    """The speed at which this machine reads memory (benchmarks/native)."""

    def read_bandwidth(self, bytes: int, *, threads: int) -> float:
        """Bytes per second of plain reads of `bytes` bytes on `threads` threads."""


def probe() -> Probe:
    """The compiled probe, which only an editable installation has (python/CMakeLists.txt).

    Raises:
        ValueError: The probe is not installed here.
    """
    try:
        return cast(Probe, import_module("mlx_h2o._machine"))
    except ImportError as error:
        raise ValueError("It takes an editable installation, as `make` makes it.") from error


def require_kernels() -> None:
    """Raise ValueError unless the CPU kernels are installed."""
    if choice.cpu() is None:
        raise ValueError(
            "The benchmark measures the CPU kernels, and the extension is not installed here."
        )


def describe() -> dict[str, Any]:
    """The machine and the kernels' settings, as JSON types."""
    from mlx_h2o import _ext

    kernels = {"threads": _ext.threads(), "isa": _ext.isa(), "cache_bytes": cache_bytes()}
    return {**machine(), **kernels}


def cache_bytes() -> int:
    """Size of the last-level cache."""
    sizes = [
        int(file.read_text().strip().removesuffix("K")) << 10
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=USUAL_CACHE)


def is_busy() -> bool:
    """Whether others use this machine now."""
    return load_average() > BUSY * (os.cpu_count() or 1)
