"""What doctor runs on: machine, device, versions, and where the kernels stand."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_h2o._utils.blas import blas
from mlx_h2o._utils.commit import commit
from mlx_h2o.attention.backends import choice, reference
from mlx_h2o.attention.backends.verification.verdicts import mode
from mlx_h2o.evaluate.machine import cpu_model, versions

PACKAGE = Path(__file__).parents[1]


def machine() -> dict[str, Any]:
    """Everything as JSON types, by the names that people read."""
    device = mx.device_info()
    return {
        "processor": cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory": memory(),
        "system": platform.platform(),
        "device": str(mx.default_device()),
        "device information": {name: _plain(value) for name, value in device.items()},
        "kernels": kernels(),
        "BLAS": blas(),
        "versions": versions(),
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def kernels() -> str:
    """Which kernels compute on the default device, in words."""
    if gpu := choice.gpu():
        prelude = "Metal" if mx.metal.is_available() else "CUDA"
        return f"{prelude}, on {gpu.architecture()}; checked {mode()}"
    if choice.backend() is reference:
        return "none: the reference backend computes everything"
    from mlx_h2o import _ext

    return f"CPU, {_ext.isa()}, {_ext.threads()} threads"


def memory() -> int:
    """Bytes of the machine's memory, or 0 where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)
