"""Checks a GGUF file's header against the file before MLX reads it.

MLX's reader trusts counts, lengths, types and offsets, and a damaged file ends the process.
This module first reads everything that MLX will follow, and compares each number with what is left
of the file before using it. Source of the format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

MAGIC = b"GGUF"
#: Versions whose counts have 64 bits; all files since September 2023.
VERSIONS = (2, 3)
#: Entries of the metadata, and arrays: no model has a tenth of it.
MOST_ENTRIES, MOST_ARRAYS = 10_000, 100_000
#: Bytes of a name. The format allows 65,535 for a key and 64 for an array.
LONGEST_KEY, LONGEST_NAME = 65_535, 256
#: Axes of an array, and elements along one, which MLX counts in 32 bits.
MOST_AXES, LONGEST_AXIS = 4, 2**31 - 1
#: Suffixes of the arrays that MLX makes of a packed array.
PARTS = (".scales", ".biases")
#: Alignment of arrays where the file gives none, and the largest that it may give.
ALIGNMENT, MOST_ALIGNMENT = 32, 2**16
ALIGNMENT_KEY = "general.alignment"

#: Bytes of each kind of metadata value.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9


@dataclass(frozen=True)
class Kind:
    """How an array's elements are stored.

    Attributes:
        name: ggml's name of the kind.
        elements: Elements of a block.
        size: Bytes of a block.
        reads: Whether MLX reads it, and correctly.
    """

    name: str
    elements: int
    size: int
    reads: bool = False


#: ggml's kinds of array, by number.
KINDS = {
    0: Kind("F32", 1, 4, True),
    1: Kind("F16", 1, 2, True),
    2: Kind("Q4_0", 32, 18, True),
    3: Kind("Q4_1", 32, 20, True),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34, True),
    9: Kind("Q8_1", 32, 36),
    10: Kind("Q2_K", 256, 84, True),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),  # MLX 0.32 reads the scales of every second 32 elements wrongly
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210, True),
    15: Kind("Q8_K", 256, 292),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    24: Kind("I8", 1, 1),
    25: Kind("I16", 1, 2),
    26: Kind("I32", 1, 4),
    27: Kind("I64", 1, 8),
    28: Kind("F64", 1, 8),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2, True),
    34: Kind("TQ1_0", 256, 54),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class _Array:
    """An array's place by the header: bytes counted from where the first array begins."""

    name: str
    start: int
    end: int


class _Reader:
    """Reads bytes of a file from the front, and nothing beyond its end.

    Args:
        data: The file's bytes.
    """

    def __init__(self, data: mmap.mmap):
        self._data, self._size, self.at = data, len(data), 0

    def take(self, count: int, what: str) -> bytes:
        """The next bytes.

        Raises:
            ValueError: The file has fewer.
        """
        self.skip(count, what)
        return self._data[self.at - count : self.at]

    def skip(self, count: int, what: str) -> None:
        """Pass over bytes; errors as in `take`."""
        if count > self._size - self.at:
            raise ValueError(
                f"{what} takes {count} bytes at {self.at}, and the file has {self._size}"
            )
        self.at += count

    def u32(self, what: str) -> int:
        """The next four bytes as a number."""
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        """The next eight bytes as a number."""
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def text(self, most: int, what: str) -> str:
        """A text of at most `most` bytes."""
        length = self.u64(what)
        if length > most:
            raise ValueError(f"{what} has {length} bytes, of at most {most}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is no text in UTF-8") from error


def check_header(path: str | Path) -> None:
    """Raise ValueError unless MLX can follow everything in a GGUF file's header.

    Raises:
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        if file.seek(0, 2) == 0:
            raise ValueError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check(_Reader(data), len(data))


def _check(reader: _Reader, size: int) -> None:
    """Read a whole header."""
    if reader.take(4, "the file's mark") != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = reader.u32("the version")
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise ValueError(f"it is of version {version}; versions {known} are read")
    arrays, entries = reader.u64("the number of arrays"), reader.u64("the number of entries")
    if entries > MOST_ENTRIES:
        raise ValueError(f"it has {entries} metadata entries, of at most {MOST_ENTRIES}")
    if arrays > MOST_ARRAYS:
        raise ValueError(f"it has {arrays} arrays, of at most {MOST_ARRAYS}")
    alignment = _alignment_of(reader, entries)
    found = sorted(_arrays(reader, arrays, alignment), key=lambda array: array.start)
    begin = -(-reader.at // alignment) * alignment
    for array in found:
        if begin + array.end > size:
            raise ValueError(
                f"array {array.name!r} ends at byte {begin + array.end}, and the file has {size}; "
                "it may be an incomplete download"
            )
    for one, other in pairwise(found):
        if one.end > other.start:
            raise ValueError(f"arrays {one.name!r} and {other.name!r} overlap")


def _alignment_of(reader: _Reader, entries: int) -> int:
    """Read the metadata; return the alignment that it gives arrays."""
    keys, alignment = set(), ALIGNMENT
    for number in range(entries):
        key = reader.text(LONGEST_KEY, f"the key of metadata entry {number}")
        if key in keys:
            raise ValueError(f"metadata has {key!r} twice")
        keys.add(key)
        kind = reader.u32(f"the type of {key}")
        if key != ALIGNMENT_KEY:
            _skip_value(reader, key, kind)
            continue
        if kind != _UINT32:
            raise ValueError(f"{key} is of type {kind}, and must be of type {_UINT32}")
        alignment = reader.u32(key)
        if not 8 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(
                f"{key} is {alignment}, and must be a power of two from 8 to {MOST_ALIGNMENT}"
            )
    return alignment


def _skip_value(reader: _Reader, key: str, kind: int) -> None:
    """Pass over a metadata value."""
    if kind != _ARRAY:
        _skip_items(reader, key, kind, 1)
        return
    of, count = reader.u32(f"the type of {key}'s items"), reader.u64(f"the length of {key}")
    if of == _ARRAY:
        raise ValueError(f"{key} is an array of arrays, which are not read")
    _skip_items(reader, key, of, count)


def _skip_items(reader: _Reader, key: str, kind: int, count: int) -> None:
    """Pass over `count` values of a kind."""
    if kind == _STRING:
        for number in range(count):  # ends with the file: each takes at least eight bytes
            length = reader.u64(f"text {number} of {count} of {key}")
            if b"\0" in reader.take(length, f"text {number} of {count} of {key}"):
                raise ValueError(f"a text of {key} has a zero byte in it")
    elif kind == _BOOL:
        if reader.take(count, key).translate(None, b"\0\1"):
            raise ValueError(f"{key} has a truth value that is neither 0 nor 1")
    elif kind in _SIZES:
        reader.skip(count * _SIZES[kind], key)
    else:
        raise ValueError(f"{key} is of type {kind}, which is not known")


def _arrays(reader: _Reader, count: int, alignment: int) -> Iterator[_Array]:
    """Read the header's entries about arrays."""
    names = set()
    unread: dict[str, str] = {}
    for number in range(count):
        name = reader.text(LONGEST_NAME, f"the name of array {number}")
        if name in names:
            raise ValueError(f"it has array {name!r} twice")
        names.add(name)
        if name.endswith(PARTS):
            raise ValueError(f"array {name!r} has a name that MLX gives to parts of packed arrays")
        axes = reader.u32(f"the number of axes of {name}")
        if not 1 <= axes <= MOST_AXES:
            raise ValueError(f"array {name!r} has {axes} axes, of 1 to {MOST_AXES}")
        shape = [reader.u64(f"the shape of {name}") for _ in range(axes)]
        if not all(1 <= length <= LONGEST_AXIS for length in shape):
            raise ValueError(f"array {name!r} has a shape of {shape[::-1]}")
        number_of_kind = reader.u32(f"the type of {name}")
        kind = KINDS.get(number_of_kind)
        start = reader.u64(f"the offset of {name}")
        if kind is None or not kind.reads:
            unread[name] = kind.name if kind else f"type {number_of_kind}"
            continue
        if shape[0] % kind.elements:
            raise ValueError(
                f"rows of array {name!r} have {shape[0]} elements, and {kind.name} packs "
                f"{kind.elements} at a time"
            )
        if start % alignment:
            raise ValueError(
                f"array {name!r} begins at byte {start}, which is no multiple of {alignment}"
            )
        elements = 1
        for length in shape:
            elements *= length
        yield _Array(name, start, start + elements // kind.elements * kind.size)
    if unread:
        kinds, first = ", ".join(sorted(set(unread.values()))), next(iter(unread))
        good = ", ".join(kind.name for kind in KINDS.values() if kind.reads)
        raise ValueError(
            f"{len(unread)} of its arrays are {kinds} ({first!r} is the first), which MLX "
            f"cannot read; it reads {good}. Quantize the model anew to Q4_0, Q4_1 or Q8_0 "
            "(llama-quantize --allow-requantize), or use a folder that mlx_lm.convert made"
        )
