"""A safetensors file's header, checked against the file before MLX believes it.

MLX allocates what a shape asks for; [10^12, 10^9] took all memory, [1, -5, 3] an endless loop.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

# MLX counts an axis in 32 bits.
LONGEST_AXIS = 2**31 - 1


def check_header(path: str | Path) -> None:
    """Raise ValueError unless every array lies in the file and fills its shape.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        # Its parser checks that shapes and offsets agree, do not overflow and cover the file.
        with safe_open(str(path), framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                shape = file.get_slice(name).get_shape()
                if max(shape, default=0) > LONGEST_AXIS:
                    raise ValueError(f"{name} has a shape of {shape}")
    except SafetensorError as error:
        raise ValueError(str(error)) from error
