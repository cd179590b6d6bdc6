"""A conversation goes on from its file of rows, after its process has ended in whatever way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_h2o.attention.backends.choice import pack
from mlx_h2o.caches import kinds
from mlx_h2o.caches.base import KEPT, BoundedKVCache
from mlx_h2o.engine.layer import Layer
from mlx_h2o.engine.returns_kept import Returning
from mlx_h2o.integration import routing
from mlx_h2o.spill.conversation_rows import ConversationRows
from mlx_h2o.spill.layer_rows import LayerRows
from mlx_h2o.spill.layout import MOST_TOKENS, DamagedFile
from mlx_h2o.spill.parts import Array, Part, checked_part, gathered, of_bits
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.setting import Spill
from mlx_h2o.spill.state_record import TAIL, StateRecord, found_records, paths_of
from mlx_h2o.storage.packed import Packing
from mlx_h2o.storage.pins import true_positions
from mlx_h2o.storage.slot_store import Run

# What damaged numbers of a record may raise where caches are made from them.
_DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RuntimeError)


def resume(
    path: str | Path, key: bytes | None = None, keep: bool = True, position: int | None = None
) -> list[Any]:
    """The caches of a conversation, from its file of rows and the newest record of its state.

    They are as they were at the record's position (`cache[0].offset`); the tokens that came after
    it have to be given again. New rows go on in the same file, which stays as it is until they
    come: who finds that these are another model's caches loses nothing.

    Args:
        path: A file that `Spill(folder, keep=True)` left.
        key: The key with which it was sealed, if it was.
        keep: Whether the file stays when the conversation ends.
        position: The position of the record to go on from; None means the newest. What the file
            has beyond it is given up when new rows come.

    Raises:
        BlockingIOError: Another has the file open.
        OSError: It cannot be opened.
        ValueError: It is no such file, damaged, sealed with another key, or has no such record.
    """
    file = RowFile.open(path, key=key, keep=True)
    try:
        routing.install()
        record, turn = _record_of(file, position)
        rows = _Rows(record, file)
        caches = _restored(record, rows)
        later = [at for other, at in _records(file) if other.position > record.position]
        rows.go_on([paths_of(file.path)[at] for at in later])
    except BaseException:
        file.close()
        raise
    file.keep = keep
    spill = Spill(file.path.parent, keep, key)
    conversation = ConversationRows.over(file, spill, record.position, 1 - turn)
    _go_on(caches, conversation, record.position)
    return list(caches)


def resume_apart(path: str | Path, position: int, key: bytes | None = None) -> list[Any]:
    """The caches of a conversation at one of its records, without its file, which stays as it is.

    Args:
        path: As in `resume`.
        position: The position of the record.
        key: As in `resume`.

    Raises:
        BlockingIOError: Another writes the file.
        OSError: It cannot be opened.
        ValueError: As in `resume`.
    """
    with RowFile.open(path, key=key, writable=False) as file:
        routing.install()
        record = _record_of(file, position)[0]
        caches = _restored(record, _Rows(record, file))
    for cache in caches:
        cache.back = None
        cache.go_on_in(None)
    return list(caches)


def told_by(path: str | Path, key: bytes | None = None) -> list[tuple[int, dict[str, Any]]]:
    """What a file's records tell of its conversation's tokens, by position, the newest first.

    Args:
        path: As in `resume`.
        key: As in `resume`.

    Raises:
        BlockingIOError: Another writes the file.
        OSError: It cannot be opened.
        ValueError: It is no such file, damaged, or sealed with another key.
    """
    with RowFile.open(path, key=key, writable=False) as file:
        return [
            (record.position, record.told)
            for record, _ in _records(file)
            if record.told is not None
        ]


def _record_of(file: RowFile, position: int | None) -> tuple[StateRecord, int]:
    """The record at a position, or the newest, whose rows are in the file; which of the two."""
    for record, turn in _records(file):
        if position in (None, record.position):
            return record, turn
    place = "" if position is None else f" at position {position}"
    raise ValueError(f"{file.path} has no record of its conversation's state{place}.")


def _records(file: RowFile) -> list[tuple[StateRecord, int]]:
    """The records whose rows are in the file, the newest first, and which of the two each is."""
    found = found_records(file.path, file.layout.checksum, file.seal)
    return [(record, turn) for record, turn in found if _belongs(record, file)]


def _belongs(record: StateRecord, file: RowFile) -> bool:
    """Whether a record's rows are in the file, and the same as then."""
    blocks = record.position // file.layout.positions
    if not 0 < record.position <= MOST_TOKENS or blocks * file.layout.positions > file.written:
        return False
    return record.block == (file.checksum_of(blocks - 1) if blocks else 0)


class _Rows:
    """The rows before a record's position: those of whole blocks from the file, others from it.

    Args:
        record: The record, from whose arrays its rows are taken out.
        file: The file of rows to which it belongs.

    Raises:
        DamagedFile: The record has not the rows that the file lacks.
    """

    def __init__(self, record: StateRecord, file: RowFile):
        self.file, self.whole = file, record.position - record.position % file.layout.positions
        self._tails: list[Part] = []
        if len(record.arrays) != len(file.forms):
            raise DamagedFile(f"{file.path} has other layers than its conversation.")
        if record.position == self.whole:
            return
        for own, form in zip(record.arrays, file.forms, strict=True):
            names = [name for name in own if name.startswith(TAIL)]
            fields = {name.removeprefix(TAIL): own.pop(name)[1] for name in names}
            try:
                part = checked_part(form, self.whole, fields)
            except ValueError as error:
                raise DamagedFile(f"A record beside {file.path} is damaged: {error}") from error
            if part.end != record.position:
                raise DamagedFile(f"A record beside {file.path} lacks rows.")
            self._tails.append(part)

    def of(self, layer: int, head: int, positions: Array) -> dict[str, Array]:
        """Rows of one KV head, `[M, width]` by field; arguments and errors as of `RowFile.rows`."""
        late = positions >= self.whole if self._tails else np.zeros(len(positions), bool)
        if not late.any():
            return self.file.rows(layer, head, positions)
        tail = self._tails[layer]
        if positions.max() >= tail.end:
            raise ValueError("a slot holds a later position")
        rows = gathered([tail], self.file.forms[layer], head, positions)
        if not late.all():
            for name, early in self.file.rows(layer, head, positions[~late]).items():
                rows[name][~late] = early
        return rows

    def go_on(self, given_up: list[Path]) -> None:
        """Let the file have these rows, and no others; arguments as of `RowFile.go_on`."""
        self.file.go_on(self.whole, [tail.fields for tail in self._tails], given_up)


def _restored(record: StateRecord, rows: _Rows) -> list[BoundedKVCache]:
    file = rows.file
    caches = []
    for layer, (config, own) in enumerate(zip(record.configs, record.arrays, strict=True)):
        try:
            arrays = {
                name: of_bits(array, bfloat16=dtype == "bfloat16")
                for name, (dtype, array) in own.items()
            }
            returning = config.pop("returning", None)
            kept = {n: arrays.pop(n) for n in list(arrays) if n.startswith(KEPT)}
            arrays |= _slots(config, arrays, rows, layer)
            cache = kinds.restored((arrays, json.dumps(config)))
            if returning is not None:
                types = cast(Layer, cache.layer).types["keys"]
                kept = {name.removeprefix(KEPT): array for name, array in kept.items()}
                cache.back = Returning.of_state(kept, returning, types.heads * types.width)
        except _DAMAGE as error:
            raise DamagedFile(f"The state beside {file.path} is damaged: {error!r}") from error
        if cache.offset != record.position:
            raise DamagedFile(f"The state beside {file.path} is of several positions.")
        caches.append(cache)
    mx.eval([cache.arrays() for cache in caches])
    return caches


def _slots(
    config: dict[str, Any], arrays: dict[str, mx.array], known: _Rows, layer: int
) -> dict[str, mx.array]:
    """The rows of a layer's slots, `[1, S, width]` by name, read from the file.

    Args:
        config: The cache's configuration.
        arrays: Its other arrays, the positions of its slots among them.
        known: The rows before the record's position.
        layer: The layer's index in their file.
    """
    form, packing = known.file.forms[layer], Packing(**config["packing"])
    names = [*packing.names("keys"), *packing.names("values")]
    if [field.name for field in form.fields] != names:
        raise ValueError("the file holds other fields")
    positions = np.array(true_positions(arrays["slots.positions"].astype(mx.int32)))[0]
    count = len(positions)
    none = known.of(layer, 0, np.zeros(0, np.int64))
    rows = {name: np.zeros((1, count, *one.shape[1:]), one.dtype) for name, one in none.items()}
    for run in (Run(**numbers) for numbers in config["runs"]):
        for head in range(run.first, run.last):
            first = run.start + (head - run.first) * run.allocated + config["reserved"]
            used = slice(first, first + run.length)
            if not 0 <= first <= used.stop <= count:
                raise ValueError("slots beyond the end")
            for name, of_head in known.of(layer, head, positions[used]).items():
                rows[name][0, used] = of_head
    return {
        f"slots.{field.name}": of_bits(rows[field.name], bfloat16=field.dtype == "bfloat16")
        for field in form.fields
    }


def _go_on(caches: list[BoundedKVCache], conversation: ConversationRows, position: int) -> None:
    """Let caches write their further rows to the file."""
    for i, cache in enumerate(caches):
        way = LayerRows(conversation, i, cache.packing, cache.frame, pack)
        way.first = way.offset = position
        cache.go_on_in(way)
