"""The layout of a file of rows: which byte belongs to which layer, head, field and position.

The file consists of blocks of P positions. A block holds, for every layer and KV head, a segment:
the P rows of each field, field after field.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

#: Positions of a block. Its rows stay in memory until it is full: with 16 of them a file's rows in
#: memory are those of 4 tokens more; with 4 each write is half as long.
POSITIONS = 8

#: How numpy reads each dtype. It has no bfloat16: those rows are given as their 16 bits.
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "uint32": np.uint32,
}


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

    @property
    def segment_bytes(self) -> int:
        """Bytes of one head's part of a block."""
        return self.row_bytes * POSITIONS

    def views(self, segments: Any, start: int, count: int) -> dict[str, Array]:
        """The rows of neighbouring segments, `[count, P, width]` by field, without a copy.

        Args:
            segments: A buffer of segments of this form.
            start: The byte at which the first of them begins.
            count: How many there are.
        """
        views: dict[str, Array] = {}
        for field in self.fields:
            dtype = np.dtype(DTYPES[field.dtype])
            shape = (count, POSITIONS, field.width)
            strides = (self.segment_bytes, field.row_bytes, dtype.itemsize)
            views[field.name] = np.ndarray(shape, dtype, segments, start, strides)
            start += field.row_bytes * POSITIONS
        return views


class Layout:
    """Where the segments of a block lie.

    Args:
        layers: The form of each layer.
    """

    def __init__(self, layers: Sequence[LayerForm]):
        self.layers = tuple(layers)

    @cached_property
    def layer_starts(self) -> list[int]:
        """The byte of a block at which each layer begins, and the end of the last."""
        starts = [0]
        for form in self.layers:
            starts.append(starts[-1] + form.heads * form.segment_bytes)
        return starts

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.layer_starts[-1]

    def segment_start(self, block: int, layer: int, head: int) -> int:
        """The byte of the file at which a segment begins.

        Args:
            block: The block's index.
            layer: The layer's index.
            head: KV head.
        """
        within = self.layer_starts[layer] + head * self.layers[layer].segment_bytes
        return block * self.block_bytes + within
