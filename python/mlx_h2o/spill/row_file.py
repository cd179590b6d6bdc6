"""A file of all rows of one conversation, as stored, with a fixed place for each.

`append` takes a layer's new rows; a thread writes a block when every layer has delivered it
(`block_writer`). It returns at once unless more rows wait than there is room for: then they are
evaluated, and enough of them written. `rows` reads single rows by layer, KV head and positions,
from the file or from what is not written yet. The layout is in `layout`.

The file is scratch: it has no name, so that no other process can open it, and the system removes it
when this object goes or its process ends, in whatever way.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_h2o.spill.block_writer import BlockWriter, Job
from mlx_h2o.spill.layout import POSITIONS, Array, LayerForm, Layout
from mlx_h2o.spill.parts import PASSED, Part, evaluate, gathered, part_of, schedule

#: The most positions by which one layer may be before another: more than any chunk that a layer
#: processes token by token. A layer that comes no more would keep all others' rows in memory.
MOST_APART = 2**17
#: Rows of one head that wait for the file as they are stored, at most: a block, and what comes
#: until all of it is evaluated. The file writes before more wait (`RowFile.append`).
WAITING = POSITIONS + PASSED


class RowFile:
    """The file of one conversation.

    Args:
        folder: Where it is; made if there is none (mode 0700).
        forms: The form of each layer's rows, for one sequence.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, folder: Path, forms: Sequence[LayerForm]):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.layout = Layout(forms)
        self._writer = BlockWriter()
        # Guards what the writer's thread changes: `_written` and `_parts`.
        self._lock = threading.Lock()
        self._written = 0
        self._parts: list[list[Part]] = [[] for _ in self.forms]
        self._delivered = [0] * len(self.forms)
        self._handed = 0  # blocks given to the writer
        self._fresh: list[Part] = []  # parts of MLX's arrays that are not scheduled

    # -- what it holds ----------------------------------------------------------------------------

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        """The form of each layer's rows."""
        return self.layout.layers

    @property
    def written(self) -> int:
        """Positions 0 to `written` - 1 are in the file in all layers; they fill whole blocks."""
        return self._written

    @property
    def handed(self) -> int:
        """Positions whose blocks were given to the writer."""
        return self._handed * POSITIONS

    @property
    def complete(self) -> int:
        """Positions that all layers have delivered."""
        return min(self._delivered)

    def delivered(self, layer: int) -> int:
        """Positions that a layer has delivered: `rows` has them."""
        return self._delivered[layer]

    @property
    def failure(self) -> str:
        """Why nothing more is written, or ""."""
        return self._writer.failure

    def waiting(self, layer: int) -> list[mx.array | Array]:
        """The arrays of a layer's rows that are not in the file yet, also those being written.

        Nothing is evaluated, and no writing waited for. The copy of a block from which the writer
        writes it, at once, is left out.

        Args:
            layer: The layer's index.
        """
        with self._lock:
            return [array for part in self._parts[layer] for array in part.fields.values()]

    # -- rows come --------------------------------------------------------------------------------

    def append(self, layer: int, first_position: int, fields: dict[str, mx.array]) -> None:
        """Take new rows of a layer; they are written later.

        The arrays are evaluated (scheduled) when the next step begins, in this thread. Rows of a
        chunk are evaluated at once when all layers have delivered them, and all but the last
        written (`_leave_few`). After a failure this does nothing.

        Args:
            layer: The layer's index.
            first_position: The position of the first row: `delivered(layer)`.
            fields: `[1, H, L, width]` by name. They must not change afterwards.

        Raises:
            ValueError: The rows are not the next ones.
        """
        if self._writer.failure:
            self.forget_waiting()
            return
        if first_position != self._delivered[layer]:
            raise ValueError(
                f"The next row of layer {layer} has position {self._delivered[layer]}; got "
                f"{first_position}."
            )
        if first_position - self.complete > MOST_APART:
            self.fail("some layers got no more rows")
            return
        self.schedule()
        part = part_of(self.forms[layer], first_position, fields)
        end, pieces = part.end, self._pieces_of(part)
        self._fresh += pieces
        with self._lock:
            self._parts[layer] += pieces
        before = self.complete
        self._delivered[layer] = end
        if self.complete > before:
            self._hand_over()
            self._leave_few()

    def schedule(self) -> None:
        """Let MLX evaluate rows of the last step, if all layers have delivered it."""
        fresh = self._fresh
        if fresh and self.complete >= max(part.end for part in fresh):
            schedule(fresh, self.complete)
            self._fresh = []

    def _pieces_of(self, part: Part) -> list[Part]:
        """A part; the blocks of it that may wait have arrays of their own: the others may go."""
        P, waits = POSITIONS, _blocks_before(part.end) * POSITIONS
        if part.first // P == (part.end - 1) // P:
            return [part]
        first = max(part.first, waits)
        bounds = [first, *range(first // P * P + P, part.end, P), part.end]
        pieces = [part.piece(a, b) for a, b in pairwise(bounds)]
        if part.first < first:
            part.cut(first)
            return [part, *pieces]
        return pieces

    def _hand_over(self) -> None:
        """Give the writer every block that is complete and evaluated."""
        complete = self.complete
        while self.handed + POSITIONS <= complete:
            block = self._handed
            pieces = self._pieces(block)
            if not all(
                part.ready_from is not None and part.ready_from <= complete
                for parts in pieces
                for part in parts
            ):
                return
            self._writer.hand(Job(block, partial(self._write_block, block, pieces)))
            self._handed += 1

    def _pieces(self, block: int) -> list[list[Part]]:
        """Of each layer the parts that a block's rows are in."""
        first = block * POSITIONS
        with self._lock:
            return [
                [part for part in parts if part.end > first and part.first < first + POSITIONS]
                for parts in self._parts
            ]

    def _leave_few(self) -> None:
        """Have no more rows wait for the file than a block, and what comes until it is evaluated.

        A size in bytes has room for these (`WAITING`). This waits for the device where a chunk has
        brought more, and for the disk where it is slower than the rows come.
        """
        if self.complete - self.handed > WAITING:
            self._evaluate()
            self._hand_over()
        self._writer.wait_before(_blocks_before(self.complete))

    def _evaluate(self) -> None:
        """Evaluate all rows."""
        with self._lock:
            parts = [part for of_layer in self._parts for part in of_layer]
        evaluate(parts)
        self._fresh = []

    # -- in the writer's thread -------------------------------------------------------------------

    def _write_block(self, block: int, pieces: list[list[Part]]) -> None:
        """Write a block, and forget the parts that are in the file then."""
        start = block * self.layout.block_bytes
        _write(self._file.fileno(), self._block(block, pieces), start)
        end = (block + 1) * POSITIONS
        with self._lock:
            self._written = end
            for parts in self._parts:
                parts[:] = [part for part in parts if part.end > end]

    def _block(self, block: int, pieces: list[list[Part]]) -> bytearray:
        """A block's bytes."""
        whole, first = bytearray(self.layout.block_bytes), block * POSITIONS
        for form, at, parts in zip(self.forms, self.layout.layer_starts, pieces, strict=False):
            for name, places in form.views(whole, at, form.heads).items():
                for part in parts:
                    start, end = max(part.first, first), min(part.end, first + POSITIONS)
                    new = part.rows(name)[:, start - part.first : end - part.first]
                    places[:, start - first : end - first] = new
        return whole

    # -- rows come back ---------------------------------------------------------------------------

    def rows(self, layer: int, head: int, positions: Array) -> dict[str, Array]:
        """Rows of one KV head.

        Called in the thread of the model, since rows that are not written yet may have to be
        evaluated.

        Args:
            layer: The layer's index.
            head: KV head.
            positions: `[M]` whole numbers, below `delivered(layer)`, in any order.

        Returns:
            `[M, width]` by field; bfloat16 as uint16 (`mx.array(...).view(mx.bfloat16)`).

        Raises:
            OSError: The file cannot be read.
            ValueError: There is no such row.
        """
        positions = np.asarray(positions, np.int64).reshape(-1)
        delivered = self._delivered[layer]
        if len(positions) and not 0 <= positions.min() <= positions.max() < delivered:
            raise ValueError(f"Layer {layer} has rows of positions 0 to {delivered - 1} only.")
        with self._lock:
            parts = list(self._parts[layer])
            in_file = parts[0].first if parts else self._written
        rows = gathered(parts, self.forms[layer], head, positions)
        from_file = positions < in_file
        if from_file.any():
            for name, early in self._rows_in_file(layer, head, positions[from_file]).items():
                rows[name][from_file] = early
        return rows

    def _rows_in_file(self, layer: int, head: int, positions: Array) -> dict[str, Array]:
        """Rows that are in the file; arguments as of `rows`, at least one position."""
        form = self.forms[layer]
        blocks, which = np.unique(positions // POSITIONS, return_inverse=True)
        segments = b"".join(
            _read(
                self._file.fileno(),
                form.segment_bytes,
                self.layout.segment_start(block, layer, head),
            )
            for block in blocks.tolist()
        )
        views = form.views(segments, 0, len(blocks))
        return {name: view[which, positions % POSITIONS] for name, view in views.items()}

    # -- taking back, failing ---------------------------------------------------------------------

    def truncate(self, position: int) -> None:
        """Forget the rows from a position on, in all layers.

        A block that then ends early is written again when it is full; so `written` may become
        smaller than `position`.
        """
        position = max(int(position), 0)
        if position >= max(self._delivered):
            return
        block = position // POSITIONS
        if block < self._handed:
            self._writer.take_back(block)
            self._handed = block
        self._delivered = [min(delivered, position) for delivered in self._delivered]
        with self._lock:
            for parts in self._parts:
                parts[:] = [part for part in parts if part.first < position]
                if parts and parts[-1].end > position:
                    parts[-1].cut(position)
        self._fresh = [part for part in self._fresh if part.first < position]
        if position < self._written:
            self._take_out_last(position)

    def _take_out_last(self, position: int) -> None:
        """Hold the rows of a last block that is full no longer in memory, until it is again.

        Args:
            position: One past the last position; it is in the file.
        """
        first = position // POSITIONS * POSITIONS
        parts: list[list[Part]] = [[] for _ in self.forms]
        try:
            if position > first:
                parts = [[self._part_in_file(i, first, position)] for i in range(len(self.forms))]
        except OSError as error:
            self.fail(f"it could not be read: {error}")
        with self._lock:
            self._parts, self._written = parts, first

    def _part_in_file(self, layer: int, first: int, end: int) -> Part:
        """A layer's rows from the position `first` to `end` - 1 as a part."""
        positions = np.arange(first, end)
        heads = [
            self._rows_in_file(layer, head, positions) for head in range(self.forms[layer].heads)
        ]
        fields = {name: np.stack([rows[name] for rows in heads])[None] for name in heads[0]}
        return Part(first, end - first, fields, 0)

    def flush(self) -> bool:
        """Write all whole blocks that all layers have delivered, and wait for it.

        Returns:
            Whether they are written; if not, `failure` tells why.
        """
        self._evaluate()
        self._hand_over()
        return self._writer.wait()

    def fail(self, why: str) -> None:
        """Write nothing more; rows that are in the file can still be read."""
        self._writer.fail(why)

    def forget_waiting(self) -> None:
        """After a failure: hold no rows in memory; those in the file can still be read."""
        with self._lock:
            self._parts = [[] for _ in self.forms]
        self._fresh = []
        self._delivered = [self._written] * len(self.forms)


def _blocks_before(position: int) -> int:
    """How many blocks are written before a position is the last that came, at least."""
    return max(-(-(position - WAITING) // POSITIONS), 0)


def _write(descriptor: int, data: bytes | bytearray, start: int) -> None:
    """Write all of it at a place; OSError if that is impossible."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, start)
        if count == 0:
            raise OSError("nothing could be written")
        rest, start = rest[count:], start + count


def _read(descriptor: int, size: int, start: int) -> bytes:
    """Read all of it from a place; OSError if that is impossible."""
    data = os.pread(descriptor, size, start)
    if len(data) < size:
        raise OSError("the file is shorter than what was written")
    return data
