"""The choice of backend: that of the default device at the time of the call."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_h2o.attention.backends import reference
from mlx_h2o.storage import reserved_range
from mlx_h2o.storage.packed import PackedRows

if TYPE_CHECKING:
    from mlx_h2o.attention.backends.gpu import Gpu

_reference_only = False


@contextmanager
def only_reference() -> Iterator[None]:
    """Within this context the definition computes everything, on the CPU."""
    global _reference_only
    before, device = _reference_only, mx.default_device()
    _reference_only = True
    mx.set_default_device(mx.Device(mx.cpu))
    try:
        yield
    finally:
        _reference_only = before
        mx.set_default_device(device)


def backend() -> ModuleType | Gpu:
    """The backend whose functions compute on the default device."""
    if _reference_only:
        return reference
    if mx.default_device().type == mx.DeviceType.cpu:
        return cpu() or reference
    return gpu() or reference


def pack(rows: mx.array, bits: int, group_size: int) -> PackedRows:
    """See `PackedRows.of`; the result is the same bit for bit on every backend."""
    packed: PackedRows = backend().pack(rows, bits, group_size)
    return packed


def has_ranges() -> bool:
    """Whether slots can lie in reserved ranges: where the CPU's kernels compute."""
    chosen = backend()
    return chosen is not reference and chosen is cpu() and reserved_range.is_available()


def gpu() -> Gpu | None:
    """The kernels of the GPU that is the default device, or None."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return None
    name = "metal" if mx.metal.is_available() else "cuda"
    of_gpu: Gpu = importlib.import_module(f"mlx_h2o.attention.backends.{name}").GPU
    return of_gpu


@functools.cache
def cpu() -> ModuleType | None:
    """The compiled CPU kernels, or None; the reason is printed once."""
    try:
        from mlx_h2o.attention.backends import cpu as module
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
