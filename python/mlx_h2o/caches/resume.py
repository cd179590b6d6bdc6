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
from mlx_h2o.spill.layout import DamagedFile
from mlx_h2o.spill.parts import of_bits
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.setting import Spill
from mlx_h2o.spill.state_record import StateRecord, found_records
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
    it have to be given again. New rows go on in the same file.

    Args:
        path: A file that `Spill(folder, keep=True)` left.
        key: The key with which it was sealed, if it was.
        keep: Whether the file stays when the conversation ends.
        position: The position of the record to go on from; None means the newest. What the file
            has beyond it is given up.

    Raises:
        BlockingIOError: Another has the file open.
        OSError: It cannot be opened.
        ValueError: It is no such file, damaged, sealed with another key, or has no such record.
    """
    file = RowFile.open(path, key=key, keep=True)
    try:
        routing.install()
        record, turn = _record_of(file, position)
        caches = _restored(record, file)
        file.truncate(record.position)
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
        caches = _restored(_record_of(file, position)[0], file)
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
            for record, _ in found_records(file.path, file.layout.checksum, file.seal)
            if record.told is not None and _belongs(record, file)
        ]


def _record_of(file: RowFile, position: int | None) -> tuple[StateRecord, int]:
    """The record at a position, or the newest, whose rows are in the file; which of the two."""
    for record, turn in found_records(file.path, file.layout.checksum, file.seal):
        if position in (None, record.position) and _belongs(record, file):
            return record, turn
    place = "" if position is None else f" at position {position}"
    raise ValueError(f"{file.path} has no record of its conversation's state{place}.")


def _belongs(record: StateRecord, file: RowFile) -> bool:
    """Whether a record's rows are in the file, and the same as then."""
    block = record.position // file.layout.positions - 1
    whole = record.position == (block + 1) * file.layout.positions > 0
    return whole and record.position <= file.written and file.checksum_of(block) == record.block


def _restored(record: StateRecord, file: RowFile) -> list[BoundedKVCache]:
    if len(record.configs) != len(file.forms):
        raise DamagedFile(f"{file.path} has other layers than its conversation.")
    caches = []
    for layer, (config, own) in enumerate(zip(record.configs, record.arrays, strict=True)):
        try:
            arrays = {
                name: of_bits(array, bfloat16=dtype == "bfloat16")
                for name, (dtype, array) in own.items()
            }
            returning = config.pop("returning", None)
            kept = {n: arrays.pop(n) for n in list(arrays) if n.startswith(KEPT)}
            arrays |= _slots(config, arrays, file, layer)
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
    config: dict[str, Any], arrays: dict[str, mx.array], file: RowFile, layer: int
) -> dict[str, mx.array]:
    """The rows of a layer's slots, `[1, S, width]` by name, read from the file.

    Args:
        config: The cache's configuration.
        arrays: Its other arrays, the positions of its slots among them.
        file: The file of rows.
        layer: The layer's index in it.
    """
    form, packing = file.forms[layer], Packing(**config["packing"])
    names = [*packing.names("keys"), *packing.names("values")]
    if [field.name for field in form.fields] != names:
        raise ValueError("the file holds other fields")
    positions = np.array(true_positions(arrays["slots.positions"].astype(mx.int32)))[0]
    count = len(positions)
    none = file.rows(layer, 0, np.zeros(0, np.int64))
    rows = {name: np.zeros((1, count, *one.shape[1:]), one.dtype) for name, one in none.items()}
    for run in (Run(**numbers) for numbers in config["runs"]):
        for head in range(run.first, run.last):
            first = run.start + (head - run.first) * run.allocated + config["reserved"]
            used = slice(first, first + run.length)
            if not 0 <= first <= used.stop <= count:
                raise ValueError("slots beyond the end")
            for name, of_head in file.rows(layer, head, positions[used]).items():
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
