"""GGUF files for tests, written by the gguf package."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize

F32, F16, Q4_1, Q8_0, BF16 = (
    getattr(GGMLQuantizationType, name) for name in ("F32", "F16", "Q4_1", "Q8_0", "BF16")
)


def packed(rows: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, np.ndarray]:
    """Rows as a file has them, and the numbers that these stand for."""
    data = quantize(rows, kind)
    return data, dequantize(data, kind)


def write_gguf(
    path: Path, metadata: dict, arrays: dict[str, tuple[np.ndarray, GGMLQuantizationType]]
) -> None:
    """A file with these metadata and arrays (each with its type).

    Args:
        path: The file.
        metadata: Its entries.
        arrays: Numbers to be packed, or bytes that are.
    """
    writer = GGUFWriter(path, "")
    writer.kv_data[0].clear()  # a test says itself which architecture it is, if any
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    for name, (array, kind) in arrays.items():
        data = array if array.dtype == np.uint8 else quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
