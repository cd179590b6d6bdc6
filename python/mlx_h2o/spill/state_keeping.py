"""When a conversation's state is recorded: between steps, every so many blocks, by the same thread.

A record is made where a step begins and all layers have as many positions, a multiple of a block.
Its arrays are scheduled with the next step, and handed to the thread when the block before it was,
so that no step waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from mlx_h2o.spill.block_writer import Job
from mlx_h2o.spill.parts import bits_of
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.state_record import StateRecord, paths_of, write_record

#: Positions from one record to the next.
EVERY = 256


class Keeper(Protocol):
    """A cache whose state is recorded."""

    @property
    def offset(self) -> int:
        """The next logical position."""

    def state_beside_rows(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Arrays by name, without the rows of slots, and the configuration as JSON types."""


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

    def due(self, position: int) -> bool:
        """Whether a record is to be made at this position; hands over one that waits."""
        file = self._file()
        if file is None:
            return False
        waiting = self._waiting
        if waiting is not None and file.handed >= waiting.position:
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
        states = [cache.state_beside_rows() for cache in caches]
        arrays: list[dict[str, tuple[str, mx.array]]] = []
        for own, _ in states:
            of_cache = {}
            for name, array in own.items():
                dtype = str(array.dtype).rpartition(".")[2]
                of_cache[name] = dtype, bits_of(array)
            arrays.append(of_cache)
        mx.async_eval([array for of_cache in arrays for _, array in of_cache.values()])
        configs = [config for _, config in states]
        self._waiting = _Waiting(position, configs, arrays, transcript)
        self._next = position + EVERY

    def forget(self, position: int) -> None:
        """Tokens from a position on were taken back."""
        if self._waiting is not None and self._waiting.position > position:
            self._waiting = None
        self._next = min(self._next, position)

    def forget_all(self) -> None:
        """The state was changed at its position: earlier records are not of it, and go."""
        file = self._file()
        self._waiting, self._next = None, 0
        if file is not None:

            def remove() -> None:
                for path in paths_of(file.path):
                    path.unlink(missing_ok=True)

            file.hand(Job(max(file.handed // file.layout.positions - 1, 0), 0, remove))

    def _hand(self, file: RowFile, waiting: _Waiting) -> None:
        path = paths_of(file.path)[self._turn]
        self._turn = 1 - self._turn
        nbytes = sum(array.nbytes for own in waiting.arrays for _, array in own.values())
        block = waiting.position // file.layout.positions - 1
        transcript = waiting.transcript
        told = None if transcript is None else transcript.until(waiting.position)

        def write() -> None:
            arrays = [
                {name: (dtype, np.asarray(array)) for name, (dtype, array) in own.items()}
                for own in waiting.arrays
            ]
            checksum = file.checksum_of(block)
            record = StateRecord(waiting.position, checksum, waiting.configs, arrays, told)
            write_record(path, record.as_bytes(file.layout.checksum, file.seal))

        file.hand(Job(block, nbytes, write))
