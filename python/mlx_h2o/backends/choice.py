"""Which backend computes: that of the device which is the default at the call."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import mlx.core as mx

from mlx_h2o.backends import reference


def backend() -> ModuleType:
    """The module whose functions compute on the default device."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return cpu() or reference
    return reference


@functools.cache
def cpu() -> ModuleType | None:
    """The compiled CPU kernels, or None; why not is said once."""
    try:
        from mlx_h2o.backends import cpu as module
    except ImportError as error:
        warnings.warn(
            f"mlx-h2o runs on its reference backend, which is right and slow: {error}. To build "
            "the CPU kernels, install a C++20 compiler and reinstall with "
            "`pip install --force-reinstall --no-deps mlx-h2o`.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return module
