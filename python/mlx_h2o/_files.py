"""Writing files whole or not at all, and checks before anything is written or read.

A safetensors header is checked against its file before MLX reads it: MLX allocates what a shape
asks for ([10^12, 10^9] took all memory, and [1, -5, 3] looped without end).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open


def cache_folder() -> Path:
    """The user's folder for files that can be fetched again (XDG base directories)."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mlx-h2o"


@contextmanager
def replacing(path: Path, suffix: str = "", durable: bool = False) -> Iterator[Path]:
    """A temporary name beside `path`, moved over it if all goes well and removed if not.

    Args:
        path: The file to write.
        suffix: The suffix that the temporary name must have.
        durable: Whether the file must be on disk when the block ends, even if the power fails then.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    temporary = path.with_name(f".{path.name}.{os.getpid()}{suffix}")
    try:
        yield temporary
        if durable:
            _sync(temporary)
        os.replace(temporary, path)
        if durable:
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_writable(option: str, path: Path) -> None:
    """Raise ValueError unless a file can be written at `path`, which `option` asked for."""
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        named = folder if path.is_symlink() else path.parent  # as the user gave it
        raise ValueError(f"{option}: there is no folder {named}; make it first.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{option}: {path} is no file that could be replaced.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option}: cannot write {path}: {error.strerror}.") from error


def require_folder(option: str, folder: Path) -> None:
    """Make a folder; raise ValueError unless files can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option}: cannot write into {folder}: {error.strerror}.") from error


def write_kept(path: Path, write: Callable[[Path], object], suffix: str = "") -> None:
    """Write a file that took long to compute; if that fails, write it elsewhere and say where.

    Args:
        path: The file to write.
        write: Writes the file to the path that it is given.
        suffix: The suffix that the path given to `write` must have.

    Raises:
        OSError: It could not be written to `path`; the message says where it is instead.
    """
    try:
        with replacing(path, suffix) as temporary:
            write(temporary)
    except (OSError, RuntimeError) as error:  # MLX's own writer raises RuntimeError
        with tempfile.NamedTemporaryFile(
            prefix=f"{path.stem}-", suffix=suffix or path.suffix, delete=False
        ) as file:
            elsewhere = Path(file.name)
        write(elsewhere)
        raise OSError(f"Cannot write {path} ({error}); it is in {elsewhere} instead.") from error


# MLX counts an axis in 32 bits.
LONGEST_AXIS = 2**31 - 1


def check_header(path: str | Path) -> None:
    """Raise ValueError unless every array lies in the file and fills its shape.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        # Its parser checks that shapes and offsets agree, do not overflow and cover the file.
        with safe_open(str(path), framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                shape = file.get_slice(name).get_shape()
                if max(shape, default=0) > LONGEST_AXIS:
                    raise ValueError(f"{name} has a shape of {shape}")
    except SafetensorError as error:
        raise ValueError(str(error)) from error
