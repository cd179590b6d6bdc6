"""Writes GGUF files, so that the tests read what MLX did not write. Format: ggml's docs/gguf.md."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

ALIGNMENT = 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value) -> tuple[int, bytes]:
    """A metadata value's type and bytes."""
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return UINT32, struct.pack("<I", value)
    if isinstance(value, float):
        return FLOAT32, struct.pack("<f", value)
    if isinstance(value, str):
        return STRING, _string(value)
    if isinstance(value[0], str):
        return ARRAY, struct.pack("<IQ", STRING, len(value)) + b"".join(map(_string, value))
    return ARRAY, struct.pack(f"<IQ{len(value)}i", INT32, len(value), *value)


def packed(rows: np.ndarray, kind: int) -> tuple[bytes, np.ndarray]:
    """Rows as ggml's blocks of 32, and the numbers that these stand for."""
    if kind == F32:
        return rows.astype("<f4").tobytes(), rows
    blocks = rows.reshape(-1, 32)
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    if kind == Q8_0:
        scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
        levels = np.round(blocks / scale.astype(np.float32)).astype(np.int8)
        data = [s.tobytes() + row.tobytes() for s, row in zip(scale, levels, strict=True)]
        return b"".join(data), (levels * scale.astype(np.float32)).reshape(rows.shape)
    scale, low = ((high - low) / 15).astype("<f2"), low.astype("<f2")
    levels = np.clip(np.round((blocks - low) / scale.astype(np.float32)), 0, 15).astype(np.uint8)
    halves = levels[:, :16] | levels[:, 16:] << 4
    data = [
        s.tobytes() + m.tobytes() + h.tobytes() for s, m, h in zip(scale, low, halves, strict=True)
    ]
    numbers = levels * scale.astype(np.float32) + low.astype(np.float32)
    return b"".join(data), numbers.reshape(rows.shape)


def write_gguf(path: Path, metadata: dict, arrays: dict[str, tuple[np.ndarray, int]]) -> None:
    """A file with these metadata and arrays (each with its kind)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(metadata))
    for key, value in metadata.items():
        kind, data = _value(value)
        head += _string(key) + struct.pack("<I", kind) + data
    body = b""
    for name, (array, kind) in arrays.items():
        shape = array.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", kind, len(body))
        body += packed(array, kind)[0]
        body += bytes(-len(body) % ALIGNMENT)
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + body)
