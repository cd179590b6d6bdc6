"""When a conversation's state is recorded: between steps, every so many blocks, by the same thread.

A record is made where a step begins and all layers have as many positions, a multiple of a block.
Its arrays are scheduled with the next step, and handed to the thread when the block before it was
and `PASSED` further tokens have come, so that no step waits for it.

The last record of a conversation that ends is made at any position, and waited for. The rows behind
its last whole block are in the record itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlx_h2o.spill.block_writer import Job
from mlx_h2o.spill.parts import PASSED, Array, bits_of
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.state_record import TAIL, StateRecord, paths_of, write_record

#: Positions from one record to the next.
EVERY = 256


class Keeper(Protocol):
    """A cache whose state is recorded."""

    @property
    def offset(self) -> int:
        """The next logical position."""

    def state_beside_rows(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Arrays by name, without the rows of slots, and the configuration as JSON types."""


class Tail(Protocol):
    """One that has the rows of a layer (`conversation_rows.Reader`)."""

    def since(self, first: int) -> dict[str, Array]:
        """The rows of all heads from a position on, `[1, H, M, width]` by field."""


class Transcript(Protocol):
    """The owner of a conversation, who knows its tokens (the caches do not)."""

    def until(self, position: int) -> dict[str, Any] | None:
        """What a record tells of the tokens before a position, as JSON types; None if unknown."""


class _Waiting(NamedTuple):
    """A record that is not handed to the writer yet: position, configurations, arrays, tokens."""

    position: int
    configs: list[dict[str, Any]]
    arrays: list[dict[str, tuple[str, mx.array]]]
    transcript: Transcript | None


class StateKeeping:
    """Records of one conversation's state.

    Args:
        file: The conversation's file of rows.
        position: The position of the record from which the conversation goes on; 0 if it is new.
        turn: The place that gets the next record, 0 or 1: not the one that holds that record.
    """

    def __init__(self, file: RowFile, position: int = 0, turn: int = 0):
        self._file = weakref.ref(file)
        self._next, self._turn = position + EVERY if position else 0, turn
        self._waiting: _Waiting | None = None
        # The positions of the records in the two places, where they are known.
        self._positions = [0, 0]
        self._positions[1 - turn] = position

    def due(self, position: int) -> bool:
        """Whether a record is to be made at this position; hands over one that waits."""
        file = self._file()
        if file is None:
            return False
        waiting = self._waiting
        passed = waiting is not None and position >= waiting.position + PASSED
        if waiting is not None and passed and file.handed >= waiting.position:
            self._waiting = None
            self._hand(file, waiting)
        whole = position > 0 and position % file.layout.positions == 0
        return self._waiting is None and whole and position >= self._next

    def make(
        self, position: int, caches: Sequence[Keeper], transcript: Transcript | None = None
    ) -> None:
        """Make a record.

        Args:
            position: The next logical position.
            caches: The caches of all layers, which are at this position.
            transcript: The owner of the conversation, if there is one.
        """
        configs, arrays = _states(caches)
        mx.async_eval([array for of_cache in arrays for _, array in of_cache.values()])
        self._waiting = _Waiting(position, configs, arrays, transcript)
        self._next = position + EVERY

    def record(
        self,
        position: int,
        caches: Sequence[Keeper],
        tails: Sequence[Tail],
        transcript: Transcript | None = None,
    ) -> bool:
        """Make a record at any position, and wait until it is written.

        Args:
            position: The next logical position.
            caches: The caches of all layers, which are at this position.
            tails: The rows of the same layers.
            transcript: The owner of the conversation, if there is one.

        Returns:
            Whether it is written.

        Raises:
            OSError: It cannot be written.
            ValueError: The rows cannot be read.
        """
        file = self._file()
        if file is None or position <= 0 or not file.flush():
            return False
        if position in self._positions:
            return True
        whole = position - position % file.layout.positions
        configs, lazy = _states(caches)
        arrays = _in_numpy(lazy)
        for of_cache, tail, form in zip(arrays, tails, file.forms, strict=True):
            rows = tail.since(whole) if position > whole else {}
            of_cache |= {f"{TAIL}{f.name}": (f.dtype, rows[f.name]) for f in form.fields if rows}
        told = None if transcript is None else transcript.until(position)
        block = file.checksum_of(whole // file.layout.positions - 1) if whole else 0
        record = StateRecord(position, block, configs, arrays, told)
        path = paths_of(file.path)[self._turn]
        write_record(path, record.as_bytes(file.layout.checksum, file.seal))
        self._waiting = None
        self._placed(position)
        return True

    def _placed(self, position: int) -> None:
        """A record is in the place of the older of two."""
        self._positions[self._turn] = position
        self._turn, self._next = 1 - self._turn, position + EVERY

    def forget(self, position: int) -> None:
        """Tokens from a position on were taken back.

        A record within a block does not show that by the block's checksum, so it is removed.
        """
        file = self._file()
        for turn, at in enumerate(self._positions):
            if at > position and file is not None:
                self._positions[turn] = 0
                paths_of(file.path)[turn].unlink(missing_ok=True)
        if self._waiting is not None and self._waiting.position > position:
            self._waiting = None
        self._next = min(self._next, position)

    def forget_all(self) -> None:
        """The state was changed at its position: earlier records are not of it, and go."""
        file = self._file()
        self._waiting, self._next, self._positions = None, 0, [0, 0]
        if file is not None:

            def remove() -> None:
                for path in paths_of(file.path):
                    path.unlink(missing_ok=True)

            file.hand(Job(max(file.handed // file.layout.positions - 1, 0), remove))

    def _hand(self, file: RowFile, waiting: _Waiting) -> None:
        path = paths_of(file.path)[self._turn]
        self._positions[self._turn] = waiting.position
        self._turn = 1 - self._turn
        block = waiting.position // file.layout.positions - 1
        transcript = waiting.transcript
        told = None if transcript is None else transcript.until(waiting.position)

        def write() -> None:
            checksum, arrays = file.checksum_of(block), _in_numpy(waiting.arrays)
            record = StateRecord(waiting.position, checksum, waiting.configs, arrays, told)
            write_record(path, record.as_bytes(file.layout.checksum, file.seal))

        file.hand(Job(block, write))


_Lazy = list[dict[str, tuple[str, mx.array]]]


def _states(caches: Sequence[Keeper]) -> tuple[list[dict[str, Any]], _Lazy]:
    """Of each cache its configuration, and its arrays by name with their dtypes."""
    configs, arrays = list[dict[str, Any]](), _Lazy()
    for cache in caches:
        own, config = cache.state_beside_rows()
        configs.append(config)
        arrays.append(
            {name: (str(one.dtype).rpartition(".")[2], bits_of(one)) for name, one in own.items()}
        )
    return configs, arrays


def _in_numpy(arrays: _Lazy) -> list[dict[str, tuple[str, Array]]]:
    return [
        {name: (dtype, np.asarray(array)) for name, (dtype, array) in own.items()} for own in arrays
    ]
