"""The setting `spill=`: whether conversations have a file of all their rows, and where."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_h2o._utils.checks import shown
from mlx_h2o._utils.files import cache_folder
from mlx_h2o.spill.layout import read_layout
from mlx_h2o.spill.sealing import LEAST_KEY, MOST_KEY
from mlx_h2o.spill.state_record import paths_of

AUTO = "auto"
SUFFIX = ".rows"
#: Seconds for which a file without an owner may have just been made.
NEW = 60.0
#: The most bytes of a header that is read to see whether a file may be removed.
_MOST_HEADER = 2**23


@dataclass(frozen=True)
class Spill:
    """Where a conversation's file of rows lies, and what becomes of it.

    Attributes:
        folder: The folder, made if there is none (mode 0700).
        keep: Whether files stay when their conversation ends; else they are removed with it.
        key: Seals the files (`spill/sealing.py`): 16 to 1024 bytes, hard to guess.

    Raises:
        ValueError: The key is too short or too long.
    """

    folder: Path
    keep: bool = False
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).expanduser())
        key = self.key
        if key is not None and not (isinstance(key, bytes) and LEAST_KEY <= len(key) <= MOST_KEY):
            raise ValueError(f"The key of spill must be {LEAST_KEY} to {MOST_KEY} bytes.")


def spill_setting(spill: Any) -> Spill | None:
    """The value of `spill=`: "auto", a folder, a `Spill`, or None.

    Raises:
        ValueError: It is something else.
    """
    if spill is None or isinstance(spill, Spill):
        return spill
    if isinstance(spill, Path) or (isinstance(spill, str) and spill):
        return Spill(cache_folder() / "rows" if spill == AUTO else Path(spill))
    raise ValueError(f'spill must be "auto", a folder, a Spill or None; got {shown(spill)}.')


_looked_through: set[Path] = set()


def remove_ownerless_once(folder: Path) -> None:
    """The same as `remove_ownerless`, but once for each folder in the life of this process."""
    if folder not in _looked_through:
        _looked_through.add(folder)
        remove_ownerless(folder)


def remove_ownerless(folder: Path) -> None:
    """Remove files whose process was killed, if they were not to be kept.

    Args:
        folder: A folder of such files; others in it stay.
    """
    try:
        found = [path for path in folder.glob(f"*{SUFFIX}") if not path.is_symlink()]
    except OSError:
        return
    for path in found:
        try:
            if time.time() - path.stat().st_mtime > NEW:
                _remove_if_ownerless(path)
        except OSError:
            continue


def _remove_if_ownerless(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        notes = read_layout(os.pread(descriptor, _MOST_HEADER, 0)).notes_read()
        if notes.get("kept") is False:
            for one in (path, *paths_of(path)):
                one.unlink(missing_ok=True)
    except ValueError:
        return
    finally:
        os.close(descriptor)
