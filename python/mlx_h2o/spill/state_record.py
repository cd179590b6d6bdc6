"""Records of a conversation's state beside its rows: what lies in which slot, and all the rest.

Two files beside the file of rows take records by turns, so that one of them is whole whatever
happens. A record counts if its checksum is right, its rows are in the file, and the last block
before it is the one that was there when the record was made. A record within a block has that
block's rows itself, so that it needs whole blocks of the file only.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_h2o.spill.layout import MOST_LAYERS, MOST_TOKENS, DamagedFile
from mlx_h2o.spill.parts import Array
from mlx_h2o.spill.sealing import NONCE, Seal, place_of

MAGIC, VERSION = b"MLXH2OST", 1
SUFFIXES = (".state-a", ".state-b")
#: Greatest values of a record's numbers. A state has some 20 bytes for each slot, and 2^28 slots of
#: all heads are more than any memory holds rows for.
MOST_JSON, MOST_BYTES, MOST_AXIS = 2**26, 2**33, 2**31 - 1
MOST_ARRAYS, MOST_AXES, MOST_CACHES = 2**18, 8, MOST_LAYERS
#: How names of the rows behind the last whole block begin, among each cache's arrays.
TAIL = "tail."
#: The index by which a record's nonce differs from those of segments.
_SEALED_AS = 2**32 - 1
_HEAD = struct.Struct("<8sIIQI8s16s")  # magic, version, JSON's bytes, all, checksum, nonce, tag

#: How numpy reads each dtype of a state; bfloat16 as its 16 bits.
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "uint32": np.uint32,
    "int32": np.int32,
    "int16": np.int16,
}


@dataclass(frozen=True)
class StateRecord:
    """The state of a conversation between two steps.

    Attributes:
        position: The next logical position.
        block: Checksum of the record of the last whole block before it; 0 if there is none.
        configs: Each cache's configuration, as JSON types.
        arrays: Each cache's arrays by name: dtype, and the array in numpy.
        told: What the conversation's owner tells of its tokens, as JSON types, or None.
    """

    position: int
    block: int
    configs: list[Any]
    arrays: list[dict[str, tuple[str, Array]]]
    told: dict[str, Any] | None = None

    def as_bytes(self, checksum: int, seal: Seal | None) -> bytes:
        """The record as it is stored.

        Args:
            checksum: The header checksum of the file of rows to which the record belongs.
            seal: The cipher of a sealed file.
        """
        index, parts = [], []
        for i, of_cache in enumerate(self.arrays):
            for name, (dtype, array) in of_cache.items():
                index.append([i, name, dtype, list(array.shape)])
                parts.append(np.ascontiguousarray(array).tobytes())
        told = {
            "position": self.position,
            "block": self.block,
            "configs": self.configs,
            "arrays": index,
            "told": self.told,
        }
        text = json.dumps(told).encode()
        if len(text) > MOST_JSON or len(text) + sum(map(len, parts)) > MOST_BYTES:
            raise ValueError("the state is too large")
        body, nonce, tag = text + b"".join(parts), bytes(NONCE), bytes(16)
        if seal is not None:
            nonce = os.urandom(NONCE)
            body, tag = seal.encrypt(body, nonce, place_of(checksum, 0, 0), _SEALED_AS)
        crc = zlib.crc32(body, checksum)
        return _HEAD.pack(MAGIC, VERSION, len(text), len(body), crc, nonce, tag) + body


def read_record(path: Path, checksum: int, seal: Seal | None) -> StateRecord:
    """A record from its file, of which only the first bytes are read if they are not one's.

    Args:
        path: Where it is.
        checksum: As in `StateRecord.as_bytes`.
        seal: As in `StateRecord.as_bytes`.

    Raises:
        OSError: It cannot be read.
        DamagedFile: It is torn, damaged, or of another file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        there, head = os.fstat(descriptor), file.read(_HEAD.size)
        if len(head) < _HEAD.size or not stat.S_ISREG(there.st_mode):
            raise DamagedFile("This is no record of a state.")
        magic, version, length, size, crc, nonce, tag = _HEAD.unpack(head)
        if (magic, version) != (MAGIC, VERSION) or there.st_size != _HEAD.size + size:
            raise DamagedFile("This is no record of a state, or it was not written whole.")
        if length > min(size, MOST_JSON) or size > MOST_BYTES:
            raise DamagedFile("A record of a state has a number that it cannot have.")
        body = file.read(size)
    if len(body) != size or zlib.crc32(body, checksum) != crc:
        raise DamagedFile("A record of a state is damaged.")
    if seal is not None:
        body = seal.decrypt(body, tag, nonce, place_of(checksum, 0, 0), _SEALED_AS)
    try:
        return _parsed(json.loads(body[:length]), memoryview(body)[length:])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise DamagedFile(f"A record of a state is damaged: {error!r}") from error


def _parsed(told: dict[str, Any], rest: memoryview) -> StateRecord:
    configs, index, at = list(told["configs"]), list(told["arrays"]), 0
    if len(index) > MOST_ARRAYS or len(configs) > MOST_CACHES:
        raise ValueError("too many arrays")
    arrays: list[dict[str, tuple[str, Array]]] = [{} for _ in configs]
    for i, name, dtype, shape in index:
        if type(i) is not int or not 0 <= i < len(configs) or len(shape) > MOST_AXES:
            raise ValueError("an array of no cache")
        if any(type(axis) is not int or not 0 <= axis <= MOST_AXIS for axis in shape):
            raise ValueError("an array of no shape")
        kind = np.dtype(DTYPES[dtype])
        if math.prod(max(axis, 1) for axis in shape) * kind.itemsize > MOST_AXIS:
            raise ValueError("an array of more bytes than there can be")
        size = math.prod(shape) * kind.itemsize
        if size > len(rest) - at:
            raise ValueError("an array beyond the end")
        array = np.frombuffer(rest[at : at + size], kind).reshape(shape)
        arrays[i][str(name)], at = (dtype, array), at + size
    position, block = told["position"], told["block"]
    for name, number, most in (("position", position, MOST_TOKENS), ("block", block, 2**32 - 1)):
        if type(number) is not int or not 0 <= number <= most:
            raise ValueError(f"a {name} that there cannot be")
    of_owner = told.get("told")
    if of_owner is not None and not isinstance(of_owner, dict):
        raise ValueError("what is told of the tokens has another type")
    return StateRecord(position, block, configs, arrays, of_owner)


def paths_of(path: Path) -> list[Path]:
    """Where the records of a file of rows lie."""
    return [path.with_name(path.name + suffix) for suffix in SUFFIXES]


def write_record(path: Path, record: bytes) -> None:
    """Write a record over the older of two.

    Args:
        path: Where; readable by its owner only.
        record: From `StateRecord.as_bytes`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        rest = memoryview(record)
        while rest:
            rest = rest[file.write(rest) :]


def found_records(path: Path, checksum: int, seal: Seal | None) -> list[tuple[StateRecord, int]]:
    """The whole records beside a file of rows, the newest first, and which of the two each is.

    Args:
        path: The file of rows.
        checksum: As in `StateRecord.as_bytes`.
        seal: As in `StateRecord.as_bytes`.
    """
    found = []
    for turn, of_record in enumerate(paths_of(path)):
        try:
            found.append((read_record(of_record, checksum, seal), turn))
        except (OSError, DamagedFile):
            continue
    return sorted(found, key=lambda one: -one[0].position)
