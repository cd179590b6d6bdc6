"""Keys and values for kernels: buffers, and template arguments that say how to read them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_h2o.slots.packed import PackedRows, Rows

# The buffers of rows: their elements, and the scales and biases of packed rows.
_NAMES = {
    "keys": ("keys", "key_scales", "key_biases"),
    "values": ("values", "value_scales", "value_biases"),
}
_LETTERS = {"keys": "K", "values": "V"}


def buffers(**fields: Rows) -> dict[str, mx.array]:
    """Buffers by name.

    Args:
        fields: `keys` or `values` or both.
    """
    by_name: dict[str, mx.array] = {}
    for field, rows in fields.items():
        arrays = rows.arrays if isinstance(rows, PackedRows) else [rows]
        by_name |= zip(_NAMES[field], arrays, strict=False)
    return by_name


def packing(**fields: Rows) -> dict[str, Any]:
    """Template arguments, as in metal/packed_rows.h: 0 bits are dense rows."""
    by_name: dict[str, Any] = {}
    for field, rows in fields.items():
        bits, group = (rows.bits, rows.group_size) if isinstance(rows, PackedRows) else (0, 1)
        by_name |= {f"{_LETTERS[field]}_BITS": bits, f"{_LETTERS[field]}_GROUP": group}
    return by_name


def row_bytes(rows: Rows) -> int:
    """Bytes of one row."""
    arrays = rows.arrays if isinstance(rows, PackedRows) else [rows]
    return sum(array.shape[-1] * array.dtype.size for array in arrays)
