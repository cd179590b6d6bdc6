"""One launch of a built kernel: memory with guards around it, the run, and what it counted."""

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import compiler

SPACES = {"device": 0, "constant": 1}


class KernelError(Exception):
    """A kernel did something that a GPU would not forgive, or not tell."""


@dataclass
class Operand:
    """A buffer of a launch.

    Attributes:
        name: As the kernel knows it.
        array: Its elements; an output's are overwritten. Views keep their strides, and what lies
            between their elements is out of bounds.
        space: "device" or "constant".
        output: May be written, and must be, everywhere.
        initialised: An output that need not be written, since it starts with values: one that MLX
            fills, or an input that is changed in place.
    """

    name: str
    array: np.ndarray
    space: str = "device"
    output: bool = False
    initialised: bool = False


@dataclass
class Counts:
    """What a launch did.

    Attributes:
        kernel: Its name.
        bytes_read: Bytes requested from each device buffer; lanes of a simdgroup that read one
            address in one instruction request it once.
        bytes_written: Likewise.
        barriers: Threadgroup barriers, over all threadgroups.
        simd_reductions: Sums, maxima and minima over a simdgroup, over all simdgroups.
        simd_shuffles: Likewise.
        threadgroups: How many there were.
    """

    kernel: str
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    barriers: int = 0
    simd_reductions: int = 0
    simd_shuffles: int = 0
    threadgroups: int = 0

    @property
    def device_bytes(self) -> int:
        return sum(self.bytes_read.values()) + sum(self.bytes_written.values())


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("belongs", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("space", ctypes.c_int32),
        ("writable", ctypes.c_int32),
        ("initialised", ctypes.c_int32),
        ("bytes_read", ctypes.c_int64),
        ("bytes_written", ctypes.c_int64),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_int64),
        ("arena", ctypes.c_void_p),
        ("arena_end", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("barriers", ctypes.c_int64),
        ("simd_reductions", ctypes.c_int64),
        ("simd_shuffles", ctypes.c_int64),
        ("message", ctypes.c_char_p),
        ("message_size", ctypes.c_int64),
    )


def launch(
    kernel: str,
    library: Path,
    operands: Sequence[Operand],
    grid: Sequence[int],
    threadgroup: Sequence[int],
) -> Counts:
    """Run a kernel over a grid of threads, as Metal's dispatchThreads does.

    Raises:
        KernelError: With the kernel, the buffer, the index and the lane in its message.
    """
    threads = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]
    if math.prod(threads) > 1024 or 0 in threads:
        raise KernelError(f"kernel {kernel}: a threadgroup of {threads} threads; 1 to 1024 can run")
    spans = [_Span(operand) for operand in operands]
    # An index far out of bounds still lands between two buffers, not in another one.
    guard = 4 * max(span.bytes for span in spans) + (1 << 20)
    arena = np.empty(guard + sum(span.bytes + guard for span in spans), np.uint8)
    at = guard
    buffers = (_Buffer * len(spans))()
    for buffer, span in zip(buffers, spans, strict=True):
        span.place(arena[at : at + span.bytes], buffer)
        at += span.bytes + guard
    addresses = (ctypes.c_void_p * len(spans))(*(buffer.data for buffer in buffers))
    message = ctypes.create_string_buffer(1024)
    call = _Launch(
        kernel=kernel.encode(),
        entry=_entry(library),
        arguments=ctypes.cast(addresses, ctypes.c_void_p),
        buffers=buffers,
        buffer_count=len(spans),
        arena=arena.ctypes.data,
        arena_end=arena.ctypes.data + arena.nbytes,
        grid=tuple(grid),
        threads=tuple(threads),
        message=ctypes.cast(message, ctypes.c_char_p),
        message_size=len(message),
    )
    if _runtime().host_run(ctypes.byref(call)):
        raise KernelError(message.value.decode())
    counts = Counts(
        kernel,
        barriers=call.barriers,
        simd_reductions=call.simd_reductions,
        simd_shuffles=call.simd_shuffles,
        threadgroups=math.prod(-(-g // t) for g, t in zip(grid, threads, strict=True)),
    )
    for operand, span, buffer in zip(operands, spans, buffers, strict=True):
        if operand.output:
            operand.array[...] = span.view
        if operand.space == "device":
            counts.bytes_read[operand.name] = buffer.bytes_read
            counts.bytes_written[operand.name] = buffer.bytes_written
    return counts


class _Span:
    """The memory that an operand's elements lie in, gaps included."""

    def __init__(self, operand: Operand):
        array = operand.array
        self.operand = operand
        self.name = operand.name.encode()
        steps = [s // array.itemsize for s in array.strides]
        ends = [step * (size - 1) for step, size in zip(steps, array.shape, strict=True)]
        self.first = sum(end for end in ends if end < 0) if array.size else 0
        self.last = sum(end for end in ends if end > 0) + 1 if array.size else 0
        self.bytes = (self.last - self.first) * array.itemsize
        self.dense = self.last - self.first <= array.size and 0 not in [
            step for step, size in zip(steps, array.shape, strict=True) if size > 1
        ]
        # A broadcast view covers its span as well.
        self.belongs: np.ndarray | None = None

    def place(self, memory: np.ndarray, buffer: _Buffer) -> None:
        """Copy the elements to their place in memory, and describe it."""
        operand, array = self.operand, self.operand.array
        elements = memory.view(array.dtype)
        self.view = self._strided(elements)
        if operand.output and not operand.initialised:
            memory.fill(0xFF)
        else:
            self.view[...] = array
        if not self.dense:
            self.belongs = np.zeros(self.last - self.first, np.uint8)
            self._strided(self.belongs)[...] = 1
        buffer.name = self.name
        buffer.data = memory.ctypes.data - self.first * array.itemsize
        buffer.first, buffer.last = self.first, self.last
        buffer.belongs = None if self.belongs is None else self.belongs.ctypes.data
        buffer.width = array.itemsize
        buffer.space = SPACES[operand.space]
        buffer.writable, buffer.initialised = operand.output, operand.initialised

    def _strided(self, elements: np.ndarray) -> np.ndarray:
        array = self.operand.array
        strides = [s // array.itemsize * elements.itemsize for s in array.strides]
        return np.lib.stride_tricks.as_strided(
            elements[-self.first :] if self.first else elements, array.shape, strides
        )


@functools.cache
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(compiler.runtime()), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _entry(library: Path) -> int:
    _runtime()
    entry = ctypes.cast(ctypes.CDLL(str(library)).host_entry, ctypes.c_void_p).value
    assert entry is not None
    return entry
