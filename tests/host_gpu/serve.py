"""Runs the launches that host_gpu.c sends on the host harness.

Messages are blobs: a length (8 bytes) and so many bytes. HOST_GPU_RECORD names a file to which each
launch is written as a line, in the form of tools/record_launches.py. With HOST_GPU_RUN=0 nothing is
run, and results are zeros. HOST_GPU_BREAK is one of the ways in which tests/metal/broken.py breaks
kernels, or TRAP: the first launch of attention ends the server, and with it the program.
"""

import os
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "metal"), str(ROOT / "tools")]

from harness import BuildError, DialectError, KernelError, metal_kernel  # noqa: E402
from harness.kernel import changed_inputs  # noqa: E402
from record_launches import described  # noqa: E402

TRAP = "a trap"
# In the order of mlx_dtype.
_DTYPES = (
    *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
    *(mx.float16, mx.float32, mx.float64, mx.bfloat16, mx.complex64),
)


class Messages:
    """Blobs that come and go."""

    def __init__(self, source: BinaryIO, sink: BinaryIO):
        self._source, self._sink = source, sink

    def blob(self) -> bytes:
        size = self._source.read(8)
        if len(size) < 8:
            raise EOFError
        return self._source.read(*struct.unpack("<Q", size))

    def text(self) -> str:
        return self.blob().decode()

    def numbers(self) -> list[int]:
        blob = self.blob()
        return list(struct.unpack(f"<{len(blob) // 8}q", blob))

    def array(self) -> mx.array:
        """A view with the strides that it had, of memory that holds nothing else."""
        dtype, axes, *sizes = self.numbers()
        blob = self.blob()
        if not blob:
            return mx.zeros(sizes[:axes], _DTYPES[dtype])
        return mx.as_strided(_from_bytes(blob, _DTYPES[dtype]), sizes[:axes], sizes[axes:])

    def send(self, blob: bytes) -> None:
        self._sink.write(struct.pack("<Q", len(blob)) + blob)

    def flush(self) -> None:
        self._sink.flush()


def _from_bytes(blob: bytes, dtype: mx.Dtype) -> mx.array:
    stored = mx.uint16 if dtype == mx.bfloat16 else dtype
    flat = mx.array(np.frombuffer(blob, np.asarray(mx.zeros((), stored)).dtype))
    return flat.view(mx.bfloat16) if dtype == mx.bfloat16 else flat


def _to_bytes(array: mx.array) -> bytes:
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).tobytes()


def _span(view: mx.array) -> bytes:
    """From the first element to the last, with what lies between."""
    numbers = np.asarray(view.view(mx.uint16) if view.dtype == mx.bfloat16 else view)
    size = 1 + sum(
        (n - 1) * s // numbers.itemsize for n, s in zip(numbers.shape, numbers.strides, strict=True)
    )
    return np.lib.stride_tricks.as_strided(numbers, (size,), (numbers.itemsize,)).tobytes()


def _launch(messages: Messages, record: Path | None, run: bool) -> None:
    name, header, source = (messages.text() for _ in range(3))
    (count,) = messages.numbers()
    inputs = {messages.text(): messages.array() for _ in range(count)}
    (count,) = messages.numbers()
    outputs: dict[str, list[int]] = {messages.text(): messages.numbers() for _ in range(count)}
    (count,) = messages.numbers()
    template = [(messages.text(), _argument(*messages.numbers())) for _ in range(count)]
    grid = messages.numbers()
    launch: dict[str, Any] = {
        "inputs": list(inputs.values()),
        "output_shapes": [tuple(line[2:]) for line in outputs.values()],
        "output_dtypes": [_DTYPES[line[0]] for line in outputs.values()],
        "grid": tuple(grid[:3]),
        "threadgroup": tuple(grid[3:]),
        "template": template,
    }
    options = {"input_names": list(inputs), "output_names": list(outputs)}
    if record is not None:
        with record.open("a") as lines:
            lines.write(described(name, header, source, options, launch) + "\n")
    if run:
        header, source = _broken(name, header, source)
        kernel = metal_kernel(
            name, **options, source=source, header=header, ensure_row_contiguous=False
        )
        results = kernel(**launch)
        changed = changed_inputs(source)
    else:
        shapes = zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
        results, changed = [mx.zeros(shape, dtype) for shape, dtype in shapes], set()
    messages.send(b"")
    for result in results:
        messages.send(_to_bytes(result))
    for name, array in inputs.items():
        messages.send(_span(array) if name in changed else b"")


def _broken(name: str, header: str, source: str) -> tuple[str, str]:
    """A kernel's text, broken as the environment says."""
    way = os.environ.get("HOST_GPU_BREAK")
    if way == TRAP and "attention_vector" in name:
        os._exit(1)
    if way in (None, TRAP):
        return header, source
    from broken import BROKEN

    for kernel, (old, new) in BROKEN[way][0].items():
        if name.startswith(f"mlx_h2o_{kernel}"):
            assert old in header + source
            header, source = header.replace(old, new), source.replace(old, new)
    return header, source


def _argument(kind: int, value: int) -> mx.Dtype | int | bool:
    return (_DTYPES[value] if kind == 0 else value) if kind < 2 else bool(value)


def main() -> None:
    record = os.environ.get("HOST_GPU_RECORD")
    run = os.environ.get("HOST_GPU_RUN") != "0"
    messages = Messages(sys.stdin.buffer, os.fdopen(os.dup(1), "wb"))
    sys.stdout = sys.stderr
    try:
        while True:
            try:
                _launch(messages, Path(record) if record else None, run)
            except (BuildError, DialectError, KernelError) as error:
                messages.send(str(error).encode() or b"no reason")
            messages.flush()
    except EOFError:
        pass


if __name__ == "__main__":
    main()
