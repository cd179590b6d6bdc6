"""The BLAS that multiplies MLX's float32 matrices on the CPU, and a faster one than its wheel's.

MLX's CPU wheel for Linux carries the reference BLAS, with which a prompt's products take tens of
times as long as with OpenBLAS. `use_openblas` puts the OpenBLAS of scipy-openblas32 (a package of
the extra `cpu`) in its place, for the whole process, on the threads of our kernels
(`MLX_H2O_THREADS`). The commands call it, and `load` does for built-in models; importing `mlx_h2o`
changes nothing. A BLAS that MLX was linked or loaded with by choice stays. Float16, bfloat16 and
quantized products are MLX's own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from pathlib import Path
from types import ModuleType

import mlx.core as mx

# "reference" keeps the wheel's own BLAS; "openblas", the default, needs scipy-openblas32.
VARIABLE = "MLX_H2O_BLAS"
OPENBLAS, REFERENCE = "openblas", "reference"
# The prefix of every function's name in scipy-openblas32.
PREFIX = "scipy_"


def use_openblas() -> bool:
    """Multiply MLX's float32 matrices on the CPU with OpenBLAS, in this whole process.

    It changes something only on Linux, where MLX's wheel brings the reference BLAS, and only if
    scipy-openblas32 is installed (the extra `cpu`) and `MLX_H2O_BLAS` is not "reference". Call it,
    and `use_linked`, while no array is being computed; calling it again changes nothing.

    Returns:
        Whether OpenBLAS is in use now.

    Raises:
        ValueError: `MLX_H2O_BLAS` is neither "openblas" nor "reference".
    """
    path = os.environ.get(VARIABLE, OPENBLAS)
    if path not in (OPENBLAS, REFERENCE):
        raise ValueError(f"{VARIABLE} is {path!r}: it must be {OPENBLAS!r} or {REFERENCE!r}.")
    library, extension = openblas_file(), _extension()
    if path == REFERENCE or library is None or extension is None:
        return False
    if is_reference():
        extension.redirect_blas(str(library), PREFIX)
    return blas_file() == library


def use_linked() -> None:
    """Undo `use_openblas`."""
    if extension := _extension():
        extension.restore_blas()


def blas() -> str:
    """The library that multiplies MLX's float32 matrices on the CPU, in words.

    For instance "OpenBLAS 0.3.34 (Zen)", "Accelerate", "reference BLAS", the file name of any
    other library, or "unknown" (without the compiled extension).
    """
    if platform.system() == "Darwin":
        return "Accelerate"
    if (file := blas_file()) is None:
        return "unknown"
    if is_reference():
        return "reference BLAS"
    return _openblas_in_words(file) or file.name


def advice() -> str | None:
    """How to get a faster BLAS, in one line, or None where none is to be had."""
    if not is_reference() or os.environ.get(VARIABLE) == REFERENCE:
        return None
    how = "mlx_h2o.use_openblas()" if openblas_file() else "pip install scipy-openblas32"
    return (
        "MLX multiplies float32 matrices with the reference BLAS, which is slow. "
        f"To use OpenBLAS: {how}"
    )


def in_use() -> bool:
    """Whether MLX's matrix products come from the OpenBLAS that `use_openblas` brings."""
    return openblas_file() is not None and blas_file() == openblas_file()


def blas_file() -> Path | None:
    """The library whose matrix products MLX calls, or None where that is not known."""
    extension = _extension()
    file = extension.blas_file() if extension else ""
    return Path(file) if file else None


def is_reference() -> bool:
    """Whether MLX calls the BLAS of its own wheel, and that one is the reference BLAS."""
    file = blas_file()
    if file is None or not file.name.startswith("libblas"):
        return False
    folder, packages = file.resolve().parent, Path(mx.__file__).resolve().parent.parent
    return folder.parent == packages and folder.name.endswith(".libs")


def openblas_file() -> Path | None:
    """The library of the package scipy-openblas32, or None where it is not installed."""
    # It is not imported: that would make its names visible to every library of the process.
    package = importlib.util.find_spec("scipy_openblas32")
    if package is None or package.origin is None:
        return None
    return next(Path(package.origin).parent.glob("lib/libscipy_openblas*.so"), None)


def _openblas_in_words(file: Path) -> str | None:
    library = ctypes.CDLL(str(file))
    for prefix in (PREFIX, ""):
        if hasattr(library, f"{prefix}openblas_get_config"):
            config, core = (
                getattr(library, f"{prefix}openblas_get_{what}") for what in ("config", "corename")
            )
            config.restype = core.restype = ctypes.c_char_p
            name, number = config().decode().split()[:2]
            return f"{name} {number} ({core().decode()})"
    return None


def _extension() -> ModuleType | None:
    try:
        from mlx_h2o import _ext
    except ImportError:
        return None
    return _ext
