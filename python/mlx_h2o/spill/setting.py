"""The setting `spill=`: whether conversations have a file of all their rows, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlx_h2o import _checks
from mlx_h2o._checks import shown
from mlx_h2o._files import cache_folder

AUTO = "auto"
#: What a step brings: keys and values before key scaling; after it; after it, and of tokens that
#: are pushed through the recent window by newer ones of their chunk, so that they are packed once;
#: or fields as slots store them.
PLAIN, ENTERED, PASSING, STORED = "plain", "entered", "passing", "stored"
#: Rows that are packed together. The fewer, the fewer are held in 16 bits: SmolLM2's packing takes
#: 2.9 ms of processor time a token one by one, 0.8 by fours, 0.4 by eights.
TOGETHER = 4
#: Bytes of an element of a query that is kept.
QUERY_SIZE = 2
#: The greatest number in `Returns`.
MOST_RETURNS = 2**16


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
    """How evicted rows come back from the file (`layer/returning.py`).

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
            object.__setattr__(
                self, name, _checks.whole(name, getattr(self, name), 1, MOST_RETURNS)
            )
        object.__setattr__(self, "ahead", _checks.whole("ahead", self.ahead, 0, MOST_RETURNS))
        room = _checks.finite("room", self.room)
        if not 0 < room <= 1:
            raise ValueError(f"room must be above 0 and at most 1; got {room}.")


@dataclass(frozen=True)
class Spill:
    """A file of all rows for each conversation, from which evicted rows come back.

    The file is scratch: it has no name, and goes with its conversation or its process.

    Attributes:
        folder: Where the files are; made if there is none (mode 0700).
        returns: How evicted rows come back.
    """

    folder: Path
    returns: Returns = Returns()

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).expanduser())

    @property
    def waiting_rows(self) -> int:
        """Rows of one head that wait for the file as they are stored, at most."""
        from mlx_h2o.spill.row_file import WAITING  # of the few caches that have a file

        return WAITING

    def head_bytes(self, widths: Widths, queries: float) -> int:
        """Bytes of memory for one KV head's rows before they are packed, and for its last queries.

        Further rows wait as they are stored: `waiting_rows`.

        Args:
            widths: The widths of its rows.
            queries: Query heads whose queries are kept, for each of the layer's KV heads.
        """
        key = widths.key * widths.key_size
        before = (TOGETHER - 1) * (key + widths.value * widths.value_size)
        return before + math.ceil(self.returns.window * queries * widths.key * QUERY_SIZE)


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
