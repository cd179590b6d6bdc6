"""Arrays of numbers inside JSON: base64 of their bytes, little-endian."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np

DTYPES = ("float16", "float32")
#: The most numbers of one array in a file.
MOST_NUMBERS = 2**26


def as_text(numbers: np.ndarray, dtype: str = "float32") -> dict[str, Any]:
    """An array as JSON types.

    Args:
        numbers: Any shape.
        dtype: "float32", or "float16" where their range allows it (else float32 is taken).
    """
    with np.errstate(over="ignore"):
        narrow = numbers.astype(dtype)
    if not np.isfinite(narrow).all():
        narrow, dtype = numbers.astype("float32"), "float32"
    data = base64.b64encode(narrow.astype(narrow.dtype.newbyteorder("<")).tobytes()).decode()
    return {"dtype": dtype, "shape": list(numbers.shape), "data": data}


def of_text(text: Any) -> np.ndarray:
    """The array that `as_text` wrote, as float32.

    Raises:
        ValueError: The value was not written by `as_text`, or some numbers are not finite.
    """
    try:
        shape = tuple(text["shape"])
        count = 1
        for size in shape:
            if type(size) is not int or not 0 <= size <= MOST_NUMBERS:
                raise ValueError(f"no array has the shape {shape}")
            count *= size
        if text["dtype"] not in DTYPES or count > MOST_NUMBERS:
            raise ValueError(f"{text['dtype']} {shape} is not read")
        data = base64.b64decode(text["data"], validate=True)
        numbers = np.frombuffer(data, np.dtype(text["dtype"]).newbyteorder("<"))
        numbers = numbers.reshape(shape).astype(np.float32)
    except (KeyError, TypeError, binascii.Error, ValueError) as error:
        raise ValueError(f"The numbers of a profile are damaged: {error}.") from error
    if not np.isfinite(numbers).all():
        raise ValueError("A profile's numbers must be finite.")
    return numbers
