"""The layout of a file of rows: which byte belongs to which layer, head, field and position.

A header of whole pages is followed by blocks of P positions. A block holds, for every layer and KV
head, a segment: the P rows of each field, field after field. After the segments comes the block's
record: its index, how many of its rows are used, a checksum of each segment and one of the record
itself. Blocks start on pages, so that writing one never touches a page of another.

Every number from a file is compared with a greatest value before anything is computed with it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"MLXH2ORW"
VERSION = 1
#: Positions of a block. Its rows stay in memory until it is full: with 16 of them a file's rows in
#: memory are those of 4 tokens more, with 4 the file of a small model is a fifth larger.
POSITIONS = 8
#: Blocks start at multiples of it: the pages of Linux.
PAGE = 4096
#: The header's size is a multiple of it: the pages of Apple's processors.
LARGE_PAGE = 16384

#: Greatest values of a header's numbers.
MOST_JSON, MOST_LAYERS, MOST_HEADS, MOST_FIELDS = 2**22, 4096, 65536, 16
MOST_WIDTH, MOST_POSITIONS, MOST_NAME, MOST_BLOCK_BYTES = 2**20, 4096, 64, 2**31
#: The most positions of a file.
MOST_TOKENS = 2**31

#: How numpy reads each dtype. It has no bfloat16: those rows are given as their 16 bits.
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "uint32": np.uint32,
}

_START = struct.Struct("<8sIII")  # magic, version, length of the JSON, checksum of all of it
_RECORD = struct.Struct("<QII8s")  # index, rows in use, 0, nonce of sealed blocks
_CHECKSUM = struct.Struct("<I")
#: Bytes of a sealed segment's authentication tag.
TAG = 16


class DamagedFile(ValueError):
    """A file, or a part of it, does not hold what was written."""


class Field(NamedTuple):
    """One field of a layer's rows.

    Attributes:
        name: "keys", "keys.scales", ... as in `Packing.names`.
        dtype: A key of `DTYPES`.
        width: Elements of a row.
    """

    name: str
    dtype: str
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * int(np.dtype(DTYPES[self.dtype]).itemsize)


class LayerForm(NamedTuple):
    """The form of a layer's rows.

    Attributes:
        heads: KV heads.
        fields: The fields of a row, in the file's order.
    """

    heads: int
    fields: tuple[Field, ...]

    @classmethod
    def of(cls, heads: int, fields: dict[str, tuple[str, int]]) -> LayerForm:
        """A form from (dtype, width) by name."""
        return cls(heads, tuple(Field(name, *form) for name, form in fields.items()))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one head."""
        return sum(field.row_bytes for field in self.fields)


@dataclass(frozen=True)
class Layout:
    """Where everything lies.

    Attributes:
        layers: The form of each layer.
        positions: Positions of a block, P.
        sealed: Whether segments are encrypted.
        notes: Further JSON of the header, which the layout does not read.

    Raises:
        ValueError: A number is not within its limits.
    """

    layers: tuple[LayerForm, ...]
    positions: int = POSITIONS
    sealed: bool = False
    notes: str = "{}"

    def __post_init__(self) -> None:
        _within("layers", len(self.layers), MOST_LAYERS)
        _within("positions of a block", self.positions, MOST_POSITIONS)
        total = 0
        for form in self.layers:
            _check_form(form)
            total += form.heads * form.row_bytes * self.positions
            _within("bytes of a block", total, MOST_BLOCK_BYTES)

    @cached_property
    def first_segments(self) -> list[int]:
        """The index of each layer's first segment in a block, and the number of all at the end."""
        firsts = [0]
        for form in self.layers:
            firsts.append(firsts[-1] + form.heads)
        return firsts

    @property
    def segments(self) -> int:
        """Segments of a block: KV heads of all layers."""
        return self.first_segments[-1]

    @cached_property
    def layer_starts(self) -> list[int]:
        """The byte of a block at which each layer begins, and the end of the last."""
        starts = [0]
        for form in self.layers:
            starts.append(starts[-1] + form.heads * form.row_bytes * self.positions)
        return starts

    @cached_property
    def field_starts(self) -> list[list[int]]:
        """For each layer the byte of a segment at which each field begins."""
        starts = []
        for form in self.layers:
            at, of_layer = 0, []
            for field in form.fields:
                of_layer.append(at)
                at += field.row_bytes * self.positions
            starts.append(of_layer)
        return starts

    def segment(self, layer: int, head: int) -> tuple[int, int]:
        """The first byte of a segment in its block, and its bytes."""
        size = self.layers[layer].row_bytes * self.positions
        return self.layer_starts[layer] + head * size, size

    @property
    def record_start(self) -> int:
        """The byte of a block at which its record begins."""
        return self.layer_starts[-1]

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a block's record."""
        per_segment = _CHECKSUM.size + (TAG if self.sealed else 0)
        return _RECORD.size + self.segments * per_segment + _CHECKSUM.size

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block, a multiple of `PAGE`."""
        return _up(self.record_start + self.record_bytes, PAGE)

    @cached_property
    def header(self) -> bytes:
        """The file's header, of whole large pages."""
        layers = [[form.heads, [list(field) for field in form.fields]] for form in self.layers]
        text = json.dumps(
            {
                "layers": layers,
                "positions": self.positions,
                "sealed": self.sealed,
                "notes": self.notes,
            }
        ).encode()
        if len(text) > MOST_JSON:
            raise ValueError("The header of a file of rows is too long.")
        checksum = zlib.crc32(text, VERSION)
        start = _START.pack(MAGIC, VERSION, len(text), checksum)
        return (start + text).ljust(_up(_START.size + len(text), LARGE_PAGE), b"\0")

    @cached_property
    def checksum(self) -> int:
        """The header's checksum, from which those of blocks start: no other file's block fits."""
        return zlib.crc32(self.header)

    def notes_read(self) -> dict[str, Any]:
        """The notes, as JSON types; errors as of `read_layout`."""
        try:
            notes = json.loads(self.notes)
        except (ValueError, RecursionError) as error:
            raise DamagedFile(f"The header of this file of rows is damaged: {error}") from error
        if not isinstance(notes, dict):
            raise DamagedFile("The header of this file of rows is damaged.")
        return notes

    def block_start(self, block: int) -> int:
        """The byte of the file at which a block begins."""
        return len(self.header) + block * self.block_bytes

    def record(self, block: int, rows: int, body: memoryview, nonce: bytes, tags: bytes) -> bytes:
        """The record of a block.

        Args:
            block: The block's index.
            rows: How many of its positions are used.
            body: All its segments, as they are stored.
            nonce: 8 bytes; zeros for blocks that are not sealed.
            tags: Authentication tags of sealed segments, or nothing.
        """
        sums = [zlib.crc32(body[at : at + size], self.checksum) for at, size in self._segments]
        record = _RECORD.pack(block, rows, 0, nonce)
        record += np.array(sums, "<u4").tobytes() + tags
        return record + _CHECKSUM.pack(zlib.crc32(record, self.checksum))

    def checked_record(self, block: int, record: bytes) -> BlockRecord:
        """Read a block's record.

        Raises:
            DamagedFile: It is torn, damaged, or another block's.
        """
        of_record = record[: -_CHECKSUM.size]
        if (
            len(record) != self.record_bytes
            or _CHECKSUM.pack(zlib.crc32(of_record, self.checksum)) != record[-_CHECKSUM.size :]
        ):
            raise DamagedFile(f"Block {block} was not written whole.")
        index, rows, zero, nonce = _RECORD.unpack_from(record)
        if index != block or not 0 < rows <= self.positions or zero:
            raise DamagedFile(f"Block {block} has the record of another.")
        sums = np.frombuffer(record, "<u4", self.segments, _RECORD.size)
        tags = record[_RECORD.size + 4 * self.segments : -_CHECKSUM.size]
        return BlockRecord(rows, nonce, sums, tags)

    def intact(self, record: BlockRecord, body: memoryview) -> bool:
        """Whether all segments are as they were written."""
        pieces = (body[at : at + size] for at, size in self._segments)
        return all(self.is_intact(record, index, piece) for index, piece in enumerate(pieces))

    def is_intact(self, record: BlockRecord, index: int, segment: bytes | memoryview) -> bool:
        """Whether one segment is as it was written.

        Args:
            record: The block's record.
            index: The segment's index in the block.
            segment: Its bytes.
        """
        return zlib.crc32(segment, self.checksum) == int(record.checksums[index])

    @cached_property
    def _segments(self) -> list[tuple[int, int]]:
        layers = enumerate(self.layers)
        return [self.segment(layer, head) for layer, form in layers for head in range(form.heads)]

    @property
    def all_segments(self) -> list[tuple[int, int]]:
        """First byte and bytes of each segment of a block."""
        return self._segments


class BlockRecord(NamedTuple):
    """What a block says of itself.

    Attributes:
        rows: How many of its positions are used.
        nonce: 8 bytes, new at each writing, of sealed blocks.
        checksums: The checksum of each segment, `[segments]` uint32.
        tags: Authentication tags of sealed segments, or nothing.
    """

    rows: int
    nonce: bytes
    checksums: np.ndarray[Any, Any]
    tags: bytes

    def tag(self, segment: int) -> bytes:
        """The authentication tag of a segment."""
        return self.tags[TAG * segment : TAG * (segment + 1)]


def read_layout(start: bytes) -> Layout:
    """The layout that a header describes.

    Args:
        start: The first bytes of the file, at least `header_length` of them.

    Raises:
        DamagedFile: It is no header of this format, or damaged.
        ValueError: It is of another version.
    """
    length = header_length(start)
    _, _, json_length, checksum = _START.unpack_from(start)
    text = start[_START.size : _START.size + json_length]
    if len(start) < length or zlib.crc32(text, VERSION) != checksum:
        raise DamagedFile("The header of this file of rows is damaged.")
    try:
        header = json.loads(text)
        layers = [_form_of(*layer) for layer in header["layers"]]
        positions, sealed, notes = (header[name] for name in ("positions", "sealed", "notes"))
        if type(positions) is not int or type(sealed) is not bool or type(notes) is not str:
            raise TypeError("a number has another type")
        return Layout(tuple(layers), positions, sealed, notes)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFile(f"The header of this file of rows is damaged: {error}") from error


def header_length(start: bytes) -> int:
    """Bytes of a header, from its first 20; errors as of `read_layout`."""
    if len(start) < _START.size:
        raise DamagedFile("This is no file of rows.")
    magic, version, json_length, _ = _START.unpack_from(start)
    if magic != MAGIC:
        raise DamagedFile("This is no file of rows.")
    if version != VERSION:
        raise ValueError(f"This file of rows has version {version}; this mlx-h2o reads {VERSION}.")
    if json_length > MOST_JSON:
        raise DamagedFile("The header of this file of rows is damaged.")
    return _up(_START.size + int(json_length), LARGE_PAGE)


def _form_of(heads: Any, fields: Any) -> LayerForm:
    return LayerForm(heads, tuple(Field(*field) for field in fields))


def _check_form(form: LayerForm) -> None:
    _within("KV heads", form.heads, MOST_HEADS)
    _within("fields", len(form.fields), MOST_FIELDS)
    if len({field.name for field in form.fields}) < len(form.fields):
        raise ValueError("Two fields of a row have one name.")
    for field in form.fields:
        if type(field.name) is not str or not 0 < len(field.name) <= MOST_NAME:
            raise ValueError("A field of a row has no name.")
        if field.dtype not in DTYPES:
            raise ValueError(f"A file of rows holds {', '.join(DTYPES)}; got {field.dtype!r}.")
        _within("elements of a row", field.width, MOST_WIDTH)


def _within(name: str, number: Any, most: int) -> None:
    if type(number) is not int or not 0 < number <= most:
        raise ValueError(f"A file of rows has 1 to {most} {name}; got {number!r}.")


def layer_forms(forms: Sequence[LayerForm]) -> tuple[LayerForm, ...]:
    """Forms as a layout holds them."""
    return tuple(LayerForm(form.heads, tuple(form.fields)) for form in forms)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
