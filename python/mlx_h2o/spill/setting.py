"""The setting `spill=`: whether conversations have a file of all their rows, and where."""

from __future__ import annotations

import fcntl
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mlx_h2o._utils import checks
from mlx_h2o._utils.checks import shown
from mlx_h2o._utils.files import cache_folder
from mlx_h2o.spill.layout import POSITIONS, read_layout
from mlx_h2o.spill.parts import PASSED
from mlx_h2o.spill.sealing import LEAST_KEY, MOST_KEY
from mlx_h2o.spill.state_record import paths_of

AUTO = "auto"
SUFFIX = ".rows"
#: Rows that are packed together. The fewer, the fewer are held in 16 bits: SmolLM2's packing takes
#: 2.9 ms of processor time a token one by one, 0.8 by fours, 0.4 by eights.
TOGETHER = 4
#: Rows of one head that wait for the file as they are stored, at most: a block, and what comes
#: until all of it is evaluated. The file writes before more wait (`RowFile.append`).
WAITING = POSITIONS + PASSED
#: Bytes of an element of a query that is kept.
QUERY_SIZE = 2
#: The greatest number in `Returns`.
MOST_RETURNS = 2**16
#: Seconds for which a file without an owner may have just been made.
NEW = 60.0
#: The most bytes of a header that is read to see whether a file may be removed.
_MOST_HEADER = 2**23


class Widths(Protocol):
    """The widths of a row, and the bytes of its elements (`budgets.cost.RowWidths`)."""

    @property
    def key(self) -> int: ...
    @property
    def value(self) -> int: ...
    @property
    def key_size(self) -> int: ...
    @property
    def value_size(self) -> int: ...


@dataclass(frozen=True)
class Returns:
    """How evicted rows come back from the file (`engine/returning.py`).

    Attributes:
        every: Tokens from one return to the next while decoding.
        window: How many of the last queries say what is wanted.
        pages: Pages whose rows are read for a KV head at each return, and as many behind them.
        rows: Rows that come back to a KV head at each return, at most.
        room: The part of a head's evictable slots that these may take, from 0 to 1.
        ahead: How many of the following rows a wanted row makes wanted, too.

    Raises:
        ValueError: A number is out of range.
    """

    every: int = 32
    window: int = 8
    pages: int = 12
    rows: int = 64
    room: float = 0.5
    ahead: int = 16

    def __post_init__(self) -> None:
        for name in ("every", "window", "pages", "rows"):
            object.__setattr__(self, name, checks.whole(name, getattr(self, name), 1, MOST_RETURNS))
        object.__setattr__(self, "ahead", checks.whole("ahead", self.ahead, 0, MOST_RETURNS))
        room = checks.finite("room", self.room)
        if not 0 < room <= 1:
            raise ValueError(f"room must be above 0 and at most 1; got {room}.")


@dataclass(frozen=True)
class Spill:
    """Where a conversation's file of rows lies, and what becomes of it.

    Attributes:
        folder: The folder, made if there is none (mode 0700).
        keep: Whether files stay when their conversation ends; else they are removed with it.
        key: Seals the files (`spill/sealing.py`): 16 to 1024 bytes, hard to guess.
        returns: How evicted rows come back, or None: they stay in the file.

    Raises:
        ValueError: The key is too short or too long.
    """

    folder: Path
    keep: bool = False
    key: bytes | None = field(default=None, repr=False)
    returns: Returns | None = Returns()

    def takes(self, heads: frozenset[int] | None) -> bool:
        """Whether a layer's rows are written.

        A conversation goes on from a file that is kept, so that has the rows of all layers. Another
        is read only for rows that come back, so it has those of layers to which some do.

        Args:
            heads: The layer's KV heads to which evicted rows come back; None means all.
        """
        return self.keep or self.returns is None or heads != frozenset()

    def head_bytes(self, widths: Widths, queries: float) -> int:
        """Bytes of memory for one KV head's rows before they are packed, and for its last queries.

        Further rows wait as they are stored: `WAITING`.

        Args:
            widths: The widths of its rows.
            queries: Query heads whose queries are kept, for each of the layer's KV heads.
        """
        key = widths.key * widths.key_size
        before = (TOGETHER - 1) * (key + widths.value * widths.value_size)
        kept = self.returns.window * queries * widths.key * QUERY_SIZE if self.returns else 0
        return before + math.ceil(kept)

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
