"""A GGUF file as the `gguf` package reads it, with what a damaged file could do checked first.

Source of the format: ggml's docs/gguf.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_h2o import _checks
from mlx_h2o.loading.tested_versions import warn_if_newer

#: Values that a header may have. The package makes objects of each, some 300 bytes; a vocabulary of
#: 262,144 tokens, with scores and types, has a quarter of it.
MOST_VALUES = 4_000_000
#: The largest weight: what float16 can hold. Bytes that are no weights soon give larger numbers.
LARGEST_WEIGHT = 65_504.0
#: Elements that are dequantized at a time: 16 MB in float32.
CHUNK = 2**22
#: Rows at each end and in the middle of a matrix that `GGUFFile.check_numbers` looks at.
SAMPLED_ROWS = 4


class Metadata(dict[str, Any]):
    """A file's metadata; each method returns an entry whose type and range are checked.

    A `default` stands for a missing entry; without one the entry is required. All raise ValueError.
    """

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"The GGUF file lacks {key}.")
        return value

    def whole(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number from `least` to `most`; see the class."""
        return _checks.whole(f"The GGUF file's {key}", self._value(key, default), least, most)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        number = _checks.finite(f"The GGUF file's {key}", self._value(key, default))
        if number <= 0:
            raise ValueError(f"The GGUF file's {key} must be above 0; got {number}.")
        return number

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise ValueError(f"The GGUF file's {key} must be a text; got {_checks.shown(value)}.")
        return value

    def items(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:  # type: ignore[override]
        """An array of `str`, `int` or `float`; see the class."""
        values = self._value(key, default)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ValueError(f"The GGUF file's {key} must be an array of {kind.__name__}.")
        return values


class GGUFFile:
    """A GGUF file: its metadata, and its arrays by name.

    Opening reads the header alone; arrays stay on disk until `array` is called.

    Args:
        path: The file.

    Raises:
        ValueError: There is no such file, its header is damaged, or it is longer than the file.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise ValueError(f"There is no model file {path}.")
        self.path = path
        reader_class = _reader_class()
        try:
            reader = reader_class(path)
            if reader.byte_order != "I":
                raise ValueError("it is big-endian; only little-endian files are read")
            fields = reader.fields.values()
            self.metadata = Metadata({field.name: field.contents() for field in fields})
        except (ValueError, LookupError, ArithmeticError, TypeError, RecursionError, OSError) as e:
            raise ValueError(
                f"Cannot read the model {path}: {e}. It may be damaged, an incomplete download, or "
                "joined of parts in the wrong order."
            ) from e
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {
            name: tuple(int(length) for length in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        self.elements = sum(int(tensor.n_elements) for tensor in reader.tensors)

    def check_numbers(self) -> None:
        """Raise ValueError if vectors, or some rows of each matrix, hold numbers of no weight.

        A header in order does not prove what follows it: parts may be joined in the wrong order.
        """
        for name, tensor in self._tensors.items():
            rows = len(tensor.data)
            if tensor.data.ndim == 1:
                self._rows(name, 0, rows)
                continue
            for start in {0, rows // 2, max(rows - SAMPLED_ROWS, 0)}:
                self._rows(name, start, start + SAMPLED_ROWS)

    def array(self, name: str, dtype: mx.Dtype) -> mx.array:
        """An array, dequantized chunk by chunk.

        Args:
            name: One of `shapes`.
            dtype: The dtype of the result; float32 is held for one chunk at a time alone.

        Raises:
            ValueError: It holds numbers of no weight.
        """
        shape = self.shapes[name]
        rows = max(CHUNK // int(np.prod(shape[1:])), 1)
        chunks = []
        for start in range(0, shape[0], rows):
            chunks.append(mx.array(self._rows(name, start, start + rows)).astype(dtype))
            mx.eval(chunks[-1])
        whole = mx.concatenate(chunks) if len(chunks) > 1 else chunks[0]
        mx.eval(whole)
        return whole

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Some rows of an array as float32."""
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            with np.errstate(invalid="ignore", over="ignore"):  # looked for below
                numbers = np.asarray(dequantize(tensor.data[start:stop], tensor.tensor_type))
        except NotImplementedError as error:
            raise ValueError(
                f"The GGUF file's array {name} is of type {tensor.tensor_type.name}, which the "
                "gguf package does not dequantize."
            ) from error
        low, high = numbers.min(), numbers.max()
        if not (low >= -LARGEST_WEIGHT and high <= LARGEST_WEIGHT):  # also where one is NaN
            raise ValueError(
                f"The GGUF file {self.path} is damaged, or joined of parts in the wrong order: its "
                f"array {name} has numbers from {low:g} to {high:g}, which no weights are."
            )
        return numbers.astype(np.float32, copy=False)


def _reader_class() -> Any:
    """`gguf.GGUFReader`, which follows a damaged header no further than the file goes.

    Raises:
        ValueError: The package is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(
            "The gguf package, which reads GGUF files, is missing: pip install gguf."
        ) from error
    warn_if_newer("gguf")

    class BoundedReader(GGUFReader):  # type: ignore[misc]
        """Numpy cuts a slice at the end of a file, so that a huge count would be read for ever."""

        values = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            """What the reader takes out of the file, be it a number, a text or an array."""
            start, count = int(offset), int(count)
            end, size = start + np.dtype(dtype).itemsize * count, self.data.size
            if end > size:
                raise ValueError(
                    f"what begins at byte {start} ends at byte {end}, and the file has {size}"
                )
            self.values += 1
            if self.values > MOST_VALUES:
                raise ValueError(f"its header has more than {MOST_VALUES:,} values")
            # A slice of a memmap takes ten times as long.
            return np.frombuffer(self.data, dtype, count, start)

    return BoundedReader
