"""Memory that is free within the process, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable

import mlx.core as mx


def give_back() -> None:
    """Give MLX's free buffers to the C library, and glibc's free pages to the system."""
    mx.clear_cache()
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    """glibc's malloc_trim; elsewhere a function that does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        trim: Callable[[int], object] = ctypes.CDLL("libc.so.6").malloc_trim
        return trim
    return lambda _: None
