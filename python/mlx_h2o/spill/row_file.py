"""A file of all rows of one conversation, as stored, with a fixed place for each.

`append` takes a layer's new rows; a thread writes a block when every layer has delivered it
(`block_writer`). It returns at once unless more rows wait than there is room for: then they are
evaluated, and enough of them written. `rows` reads single rows by layer, KV head and positions,
from the mapped file or from what is not written yet. The layout is in `layout`, what a crash may
leave is sorted out by `open`: a block counts if its checksums are right, and the last that counts
ends the file.

One writer has a file at a time (`flock`), and none while someone reads it. Only the owner may read
the file (mode 0600). Blocks can be sealed with a key (`sealing`).
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import numpy as np

from mlx_h2o.spill import layout as file_layout
from mlx_h2o.spill.block_writer import BlockWriter, Job
from mlx_h2o.spill.layout import DTYPES, DamagedFile, LayerForm, Layout, layer_forms, read_layout
from mlx_h2o.spill.parts import PASSED, Array, Part, checked_part, evaluate, gathered, schedule
from mlx_h2o.spill.sealing import NONCE, Seal, place_of
from mlx_h2o.spill.state_record import paths_of

#: The most positions by which one layer may be before another: more than any chunk that a layer
#: processes token by token. A layer that comes no more would keep all others' rows in memory.
MOST_APART = 2**17
_SALT = 32


class RowFile:
    """The file of one conversation; `create` and `open` make it.

    Attributes:
        path: Where it is.
        layout: Where everything lies in it.
        writable: Whether rows can be appended.
        keep: Whether `close` leaves it on disk.
        seal: The cipher of a sealed file, or None.
    """

    def __init__(
        self,
        path: Path,
        descriptor: int,
        layout: Layout,
        seal: Seal | None,
        *,
        writable: bool,
        keep: bool,
    ):
        self.path, self.layout, self.writable, self.keep = path, layout, writable, keep
        self._descriptor, self.seal = descriptor, seal
        self._writer = BlockWriter()
        # Guards what the writer's thread changes: `_written` and `_parts`.
        self._lock = threading.Lock()
        self._written = 0
        self._parts: list[list[Part]] = [[] for _ in layout.layers]
        self._delivered = [0] * len(layout.layers)
        self._handed = 0  # blocks given to the writer
        self._fresh: list[Part] = []  # parts of MLX's arrays that are not scheduled
        self._map: mmap.mmap | None = None
        self._mapped = 0  # blocks that the map covers
        self._closed = False
        # Whether what the file has beyond the blocks handed over is to be cut off, and what goes
        # with it, when the next rows come (`go_on`).
        self._cuts = False
        self._given_up: Sequence[Path] = ()

    # -- making and opening -----------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | Path,
        forms: Sequence[LayerForm],
        *,
        key: bytes | None = None,
        keep: bool = False,
        notes: dict[str, Any] | None = None,
    ) -> Self:
        """A new, empty file. Its folder is made if there is none (mode 0700).

        Args:
            path: The file, which must not exist.
            forms: The form of each layer's rows, for one sequence.
            key: Seals every block: 16 to 1024 bytes, hard to guess.
            keep: Whether `close` leaves the file on disk.
            notes: JSON types to keep in the header.

        Raises:
            OSError: It exists, or cannot be written.
            ValueError: The forms or the key are not within their limits.
            ImportError: A key, and the package `cryptography` is not installed.
        """
        path, seal = Path(path), None
        header = {**(notes or {}), "id": secrets.token_hex(16), "kept": keep}
        if key is not None:
            salt = secrets.token_bytes(_SALT)
            seal = Seal(key, salt)
            header |= {"salt": salt.hex(), "check": seal.check()}
        layout = Layout(layer_forms(forms), sealed=seal is not None, notes=json.dumps(header))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            _lock(descriptor, path, fcntl.LOCK_EX)
            _write(descriptor, layout.header, 0)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return cls(path, descriptor, layout, seal, writable=True, keep=keep)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        key: bytes | None = None,
        writable: bool = True,
        keep: bool = True,
    ) -> Self:
        """A file that exists. What a crash left torn at its end is dropped.

        Args:
            path: The file.
            key: The key with which it was sealed, if it was.
            writable: Whether to append to it. Otherwise any number may read it at once.
            keep: As in `create`.

        Raises:
            BlockingIOError: Another has it open for writing; if `writable`, for reading too.
            OSError: It cannot be opened.
            ValueError: It is no such file, damaged, or sealed with another key.
        """
        path = Path(path)
        flags = os.O_RDWR if writable else os.O_RDONLY
        # A pipe must not wait for its other end.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DamagedFile(f"{path} is no file.")
            _lock(descriptor, path, fcntl.LOCK_EX if writable else fcntl.LOCK_SH)
            layout, seal = _read_header(descriptor, key)
            file = cls(path, descriptor, layout, seal, writable=writable, keep=keep)
            file._find_end()
        except BaseException:
            os.close(descriptor)
            raise
        return file

    def _find_end(self) -> None:
        """Find the last block that is whole; drop what is behind it."""
        layout = self.layout
        size = os.fstat(self._descriptor).st_size - len(layout.header)
        blocks = min(size // layout.block_bytes, file_layout.MOST_TOKENS // layout.positions)
        rows = 0
        while blocks > 0 and not (rows := self._rows_of_whole(blocks - 1)):
            blocks -= 1
        self._written = max(blocks - 1, 0) * layout.positions + rows
        self._delivered = [self._written] * len(layout.layers)
        if self.writable:
            os.ftruncate(self._descriptor, layout.block_start(blocks))
            self._take_out_last(self._written)

    def _rows_of_whole(self, block: int) -> int:
        """How many rows a block has; 0 if it is not whole."""
        layout = self.layout
        whole = os.pread(self._descriptor, layout.block_bytes, layout.block_start(block))
        at = layout.record_start
        try:
            record = layout.checked_record(block, whole[at : at + layout.record_bytes])
        except DamagedFile:
            return 0
        body = memoryview(whole)[:at]
        return record.rows if layout.intact(record, body) else 0

    @property
    def notes(self) -> dict[str, Any]:
        """What the header says beside the layout, "id" and "kept" among it."""
        return self.layout.notes_read()

    # -- what it holds ----------------------------------------------------------------------------

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        """The form of each layer's rows."""
        return self.layout.layers

    @property
    def written(self) -> int:
        """Positions 0 to `written` - 1 are in the file in all layers."""
        return self._written

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

    @property
    def nbytes(self) -> int:
        """Bytes of rows in memory that are not in the file yet."""
        layers = range(len(self.forms))
        return sum(int(array.nbytes) for layer in layers for array in self.waiting(layer))

    def waiting(self, layer: int) -> list[mx.array | Array]:
        """The arrays of a layer's rows that are not in the file yet, also those being written.

        Nothing is evaluated, and no writing waited for. The copy of a block from which the writer
        writes it, at once, is left out.

        Args:
            layer: The layer's index.
        """
        with self._lock:
            return [array for part in self._parts[layer] for array in part.fields.values()]

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._descriptor).st_size

    # -- rows come --------------------------------------------------------------------------------

    def append(self, layer: int, first_position: int, fields: dict[str, Any]) -> None:
        """Take new rows of a layer; they are written later.

        MLX's arrays are evaluated (scheduled) when the next step begins, in this thread. Rows of a
        chunk are evaluated at once when all layers have delivered them, and all but the last
        written (`_leave_few`). After a failure this does nothing.

        Args:
            layer: The layer's index.
            first_position: The position of the first row: `delivered(layer)`.
            fields: `[1, H, L, width]` by name, of MLX or numpy (bfloat16 there as uint16). They
                must not change afterwards.

        Raises:
            ValueError: The rows are not the next ones, or of another form.
        """
        if self._writer.failure or not self.writable:
            self.forget_waiting()
            return
        if first_position != self._delivered[layer]:
            raise ValueError(
                f"The next row of layer {layer} has position {self._delivered[layer]}; got "
                f"{first_position}."
            )
        part = checked_part(self.forms[layer], first_position, fields)
        if part.end > file_layout.MOST_TOKENS:
            self.fail(f"a file holds at most {file_layout.MOST_TOKENS} tokens")
            return
        if first_position - self.complete > MOST_APART:
            self.fail("some layers got no more rows")
            return
        self._cut()
        self.schedule()
        end, pieces = part.end, self._pieces_of(part)
        if part.ready_from is None:
            self._fresh += pieces
        with self._lock:
            self._parts[layer] += pieces
        before = self.complete
        self._delivered[layer] = end
        if self.complete > before:
            self._hand_over()
            self._leave_few()

    def _leave_few(self) -> None:
        """Have no more rows wait for the file than a block, and what comes until it is evaluated.

        A size in bytes has room for these (`setting.WAITING`). This waits for the device where a
        chunk has brought more, and for the disk where it is slower than the rows come.
        """
        if self.complete - self._handed * self.layout.positions > self._most_waiting:
            self._evaluate()
            self._hand_over()
        self._writer.wait_before(self._blocks_before(self.complete))

    @property
    def _most_waiting(self) -> int:
        return self.layout.positions + PASSED

    def _blocks_before(self, position: int) -> int:
        """How many blocks are written before a position is the last that came, at least."""
        return max(-(-(position - self._most_waiting) // self.layout.positions), 0)

    def _pieces_of(self, part: Part) -> list[Part]:
        """A part; the blocks of it that may wait have arrays of their own: the others may go."""
        P, waits = self.layout.positions, self._blocks_before(part.end) * self.layout.positions
        if part.first // P == (part.end - 1) // P:
            return [part]
        first = max(part.first, waits)
        bounds = [first, *range(first // P * P + P, part.end, P), part.end]
        pieces = [part.piece(a, b) for a, b in pairwise(bounds)]
        if part.first < first:
            part.cut(first)
            return [part, *pieces]
        return pieces

    def _evaluate(self) -> None:
        """Evaluate all rows."""
        with self._lock:
            parts = [part for of_layer in self._parts for part in of_layer]
        evaluate(parts)
        self._fresh = []

    def forget_waiting(self) -> None:
        """After a failure: hold no rows in memory; those in the file can still be read."""
        if self._fresh or any(self._parts):
            with self._lock:
                self._parts = [[] for _ in self.forms]
                self._written -= self._written % self.layout.positions
            self._fresh = []
            self._delivered = [self._written] * len(self.forms)

    def schedule(self) -> None:
        """Let MLX evaluate rows of the last step, if all layers have delivered it."""
        fresh = self._fresh
        if fresh and self.complete >= max(part.end for part in fresh):
            schedule(fresh, self.complete)
            self._fresh = []

    def _hand_over(self) -> None:
        """Give the writer every block that is complete and evaluated."""
        complete, P = self.complete, self.layout.positions
        while (self._handed + 1) * P <= complete:
            pieces = self._pieces(self._handed, P)
            if not all(
                part.ready_from is not None and part.ready_from <= complete
                for parts in pieces
                for part in parts
            ):
                return
            self._hand(self._handed, P, pieces)
            self._handed += 1

    def _pieces(self, block: int, rows: int) -> list[list[Part]]:
        """Of each layer the parts that a block's first rows are in."""
        first = block * self.layout.positions
        with self._lock:
            return [
                [part for part in parts if part.end > first and part.first < first + rows]
                for parts in self._parts
            ]

    def _hand(self, block: int, rows: int, pieces: list[list[Part]]) -> None:
        self._writer.hand(Job(block, lambda: self._write_block(block, rows, pieces)))

    @property
    def handed(self) -> int:
        """Positions whose blocks were given to the writer."""
        return self._handed * self.layout.positions

    def hand(self, job: Job) -> None:
        """Give the writer something else to write, after the blocks that it has."""
        self._writer.hand(job)

    def checksum_of(self, block: int) -> int:
        """The checksum of a written block's record, by which it is known again."""
        at = self.layout.block_start(block) + self.layout.record_start
        record = os.pread(self._descriptor, self.layout.record_bytes, at)
        return int.from_bytes(record[-4:], "little")

    # -- in the writer's thread -------------------------------------------------------------------

    def _write_block(self, block: int, rows: int, pieces: list[list[Part]]) -> None:
        """Write a block, and forget the parts that are in the file then."""
        whole = self._block(block, rows, pieces)
        start = self.layout.block_start(block)
        try:
            _write(self._descriptor, whole, start)
        except OSError:
            if block * self.layout.positions >= self._written:  # nothing torn stays
                os.ftruncate(self._descriptor, start)
            raise
        full = (block + 1) * self.layout.positions
        with self._lock:
            self._written = block * self.layout.positions + rows
            if rows == self.layout.positions:
                for parts in self._parts:
                    parts[:] = [part for part in parts if part.end > full]

    def _block(self, block: int, rows: int, pieces: list[list[Part]]) -> bytearray:
        """A block's bytes."""
        layout, first = self.layout, block * self.layout.positions
        whole = bytearray(layout.block_bytes)
        for layer, parts in enumerate(pieces):
            for name, places in self._places(whole, layer):
                for part in parts:
                    start, end = max(part.first, first), min(part.end, first + rows)
                    new = part.rows(name)[:, start - part.first : end - part.first]
                    places[:, start - first : end - first] = new
        nonce, tags, at = bytes(NONCE), b"", layout.record_start
        if self.seal is not None:
            nonce = os.urandom(NONCE)
            tags = self._sealed(self.seal, whole, nonce, place_of(layout.checksum, block, rows))
        body = memoryview(whole)[:at]
        whole[at : at + layout.record_bytes] = layout.record(block, rows, body, nonce, tags)
        return whole

    def _places(self, whole: bytearray, layer: int) -> list[tuple[str, Array]]:
        """Each field's places in a block, `[H, P, width]`, by name."""
        layout, form = self.layout, self.forms[layer]
        start, size = layout.segment(layer, 0)
        named = []
        for field, at in zip(form.fields, layout.field_starts[layer], strict=True):
            dtype = np.dtype(DTYPES[field.dtype])
            shape = (form.heads, layout.positions, field.width)
            strides = (size, field.row_bytes, dtype.itemsize)
            places: Array = np.ndarray(shape, dtype, whole, start + at, strides)
            named.append((field.name, places))
        return named

    def _sealed(self, seal: Seal, whole: bytearray, nonce: bytes, place: bytes) -> bytes:
        """Seal all segments of a block in place; their tags."""
        tags = []
        for index, (at, size) in enumerate(self.layout.all_segments):
            whole[at : at + size], tag = seal.encrypt(
                bytes(whole[at : at + size]), nonce, place, index
            )
            tags.append(tag)
        return b"".join(tags)

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
            ValueError: There is no such row.
            DamagedFile: A block is not as it was written.
        """
        positions = self._checked(layer, head, positions)
        with self._lock:
            parts = list(self._parts[layer])
            in_file = parts[0].first if parts else self._written
        from_file = positions < in_file
        if from_file.all():
            return self._mapped_rows(layer, head, positions)
        late = gathered(parts, self.forms[layer], head, positions)
        if from_file.any():
            early = self._mapped_rows(layer, head, positions[from_file])
            for name, rows in early.items():
                late[name][from_file] = rows
        return late

    def _checked(self, layer: int, head: int, positions: Array) -> Array:
        positions = np.asarray(positions, np.int64).reshape(-1)
        if self._closed or not 0 <= layer < len(self.forms):
            raise ValueError(f"This file has no layer {layer}, or is closed.")
        if not 0 <= head < self.forms[layer].heads:
            raise ValueError(f"Layer {layer} has {self.forms[layer].heads} KV heads; got {head}.")
        delivered = self._delivered[layer]
        if len(positions) and not 0 <= positions.min() <= positions.max() < delivered:
            raise ValueError(f"Layer {layer} has rows of positions 0 to {delivered - 1} only.")
        return positions

    def _mapped_rows(self, layer: int, head: int, positions: Array) -> dict[str, Array]:
        """Rows that are in the file."""
        layout, form = self.layout, self.forms[layer]
        blocks, which = np.unique(positions // layout.positions, return_inverse=True)
        last = np.zeros(len(blocks), np.int64)
        np.maximum.at(last, which, positions % layout.positions)
        read = [
            self._segment(int(block), layer, head, int(row))
            for block, row in zip(blocks, last, strict=True)
        ]
        joined, (_, size) = b"".join(read), layout.segment(layer, head)
        rows: dict[str, Array] = {}
        for field, at in zip(form.fields, layout.field_starts[layer], strict=True):
            dtype = np.dtype(DTYPES[field.dtype])
            shape = (len(blocks), layout.positions, field.width)
            strides = (size, field.row_bytes, dtype.itemsize)
            places: Array = np.ndarray(shape, dtype, joined, at if read else 0, strides)
            rows[field.name] = places[which, positions % layout.positions]
        return rows

    def _segment(self, block: int, layer: int, head: int, last: int) -> bytes:
        """One head's part of a block, checked and unsealed; row `last` must be in use."""
        layout, mapped = self.layout, self._map_of(block)
        start = layout.block_start(block)
        at = start + layout.record_start
        record = layout.checked_record(block, mapped[at : at + layout.record_bytes])
        if last >= record.rows:
            raise DamagedFile(f"Block {block} ends before row {last}.")
        index = layout.first_segments[layer] + head
        at, size = layout.segment(layer, head)
        segment = mapped[start + at : start + at + size]
        if not layout.is_intact(record, index, segment):
            raise DamagedFile(f"Block {block} was changed or damaged after it was written.")
        if self.seal is None:
            return segment
        place = place_of(layout.checksum, block, record.rows)
        tag = record.tag(index)
        return self.seal.decrypt(segment, tag, record.nonce, place, index)

    def _map_of(self, block: int) -> mmap.mmap:
        """A map of the file that covers a written block."""
        if self._map is None or block >= self._mapped:
            with self._lock:
                blocks = -(-self._written // self.layout.positions)
            self._unmap()
            end = self.layout.block_start(blocks)
            self._map = mmap.mmap(self._descriptor, end, mmap.MAP_SHARED, mmap.PROT_READ)
            self._map.madvise(mmap.MADV_RANDOM)
            self._mapped = blocks
        return self._map

    def _unmap(self) -> None:
        if self._map is not None:
            self._map.close()
        self._map, self._mapped = None, 0

    def prefetch(self, layer: int, head: int, positions: Array) -> None:
        """Ask the system to read rows ahead, without waiting; arguments as in `rows`."""
        positions = self._checked(layer, head, positions)
        with self._lock:
            full = self._written // self.layout.positions
        at, size = self.layout.segment(layer, head)
        for block in np.unique(positions // self.layout.positions):
            if block >= full:
                continue
            mapped, start = self._map_of(int(block)), self.layout.block_start(int(block))
            for first, length in ((at, size), (self.layout.record_start, self.layout.record_bytes)):
                begin = (start + first) // mmap.PAGESIZE * mmap.PAGESIZE
                end = min(start + first + length, len(mapped))
                mapped.madvise(mmap.MADV_WILLNEED, begin, end - begin)

    # -- going on, taking back, ending -------------------------------------------------------------

    def go_on(
        self, first: int, tails: Sequence[dict[str, Any]] = (), given_up: Sequence[Path] = ()
    ) -> None:
        """Go on from a block's first position, with known rows behind it.

        What the file has from there on is cut off when the next rows come. If it is closed
        before, it stays as it was.

        Args:
            first: The position of the first row that the file is to get.
            tails: For each layer the rows that are known, as for `append`; or none.
            given_up: Files beside it that go with what is cut off.
        """
        self._handed = first // self.layout.positions
        self._delivered = [first] * len(self.forms)
        with self._lock:
            self._parts = [[] for _ in self.forms]
            self._written = min(self._written, first)
        for layer, fields in enumerate(tails):
            self.append(layer, first, fields)
        self._cuts, self._given_up = True, given_up

    def _cut(self) -> None:
        """Cut off what the file has from the first row on that it is to get."""
        if not self._cuts:
            return
        self._cuts = False
        self._unmap()
        os.ftruncate(self._descriptor, self.layout.block_start(self._handed))
        for path in self._given_up:
            path.unlink(missing_ok=True)

    def truncate(self, position: int) -> None:
        """Forget the rows from a position on, in all layers.

        A block that then ends early is taken out of the file, and written again when it is full;
        so `written` may become smaller than `position`.
        """
        position = max(int(position), 0)
        if position >= max(self._delivered) or not self.writable or self._closed:
            return
        self._cut()
        block = position // self.layout.positions
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
        """Hold the rows of a last block that is not full in memory, until it is.

        Args:
            position: One past the last position; it is in the file.
        """
        P = self.layout.positions
        first = position // P * P
        try:
            for layer, parts in enumerate(self._parts):
                end = parts[0].first if parts else position
                if end > first:
                    part = self._part(layer, first, end)
                    with self._lock:
                        parts.insert(0, part)
        except DamagedFile as error:
            self.fail(str(error))
        self._handed = first // P
        if position < self._written:
            self._unmap()
            os.ftruncate(self._descriptor, self.layout.block_start(self._handed))
            self._written = first

    def _part(self, layer: int, first: int, end: int) -> Part:
        """Rows of a layer that are in the file, as a part."""
        positions = np.arange(first, end)
        heads = [
            self._mapped_rows(layer, head, positions) for head in range(self.forms[layer].heads)
        ]
        fields = {name: np.stack([rows[name] for rows in heads])[None] for name in heads[0]}
        return Part(first, end - first, fields, 0)

    def flush(self) -> bool:
        """Write everything that all layers have delivered, and wait until it is on disk.

        Returns:
            Whether it is; if not, `failure` tells why.
        """
        if not self.writable or self._closed or self._writer.failure:
            return False
        self._evaluate()
        complete, P = self.complete, self.layout.positions
        self._hand_over()
        rows = complete - self._handed * P
        if rows > 0 and complete > self._written and not self._cuts:
            self._hand(self._handed, rows, self._pieces(self._handed, rows))
        if not self._writer.wait():
            return False
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self.fail(f"it could not be written: {error}")
        return not self._writer.failure

    def fail(self, why: str) -> None:
        """Write nothing more; rows that are in the file can still be read."""
        self._writer.fail(why)

    def close(self) -> None:
        """Write what is left if the file is kept; remove it if not."""
        if self._closed:
            return
        if self._writer.is_this_thread:  # which would wait for itself
            threading.Thread(target=self.close).start()
            return
        if self.keep:
            try:
                self.flush()
            except RuntimeError as error:  # another thread than the model's cannot evaluate rows
                self.fail(f"the last rows could not be evaluated: {error}")
        self._closed = True
        self._writer.close()
        self._unmap()
        if self.writable and not self.keep:
            for path in (self.path, *paths_of(self.path)):
                path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock(descriptor: int, path: Path, kind: int) -> None:
    """Lock a file for this opening of it.

    Raises:
        BlockingIOError: Another has it.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(f"{path} is open already, here or in another process.") from error


def _read_header(descriptor: int, key: bytes | None) -> tuple[Layout, Seal | None]:
    """The layout of an open file, and the cipher of a sealed one."""
    start = os.pread(descriptor, 64, 0)
    layout = read_layout(os.pread(descriptor, file_layout.header_length(start), 0))
    try:
        notes = layout.notes_read()
        sealed = bytes.fromhex(notes["salt"]) if layout.sealed else b""
        check = notes.get("check")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"The header of this file of rows is damaged: {error}") from error
    if layout.sealed != (key is not None):
        raise ValueError(
            "This file of rows is sealed: give its key."
            if layout.sealed
            else "This file of rows is not sealed: give no key."
        )
    if key is None:
        return layout, None
    seal = Seal(key, sealed)
    seal.require(check)
    return layout, seal


def _write(descriptor: int, data: bytes | bytearray, start: int) -> None:
    """Write all of it at a place; OSError if that is impossible."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, start)
        if count == 0:
            raise OSError("nothing could be written")
        rest, start = rest[count:], start + count
