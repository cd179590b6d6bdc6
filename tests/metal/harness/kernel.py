"""What `mx.fast.metal_kernel` returns, on the host: the same calls run the same text here."""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from . import compiler, dialect
from .launch import Counts, Operand, launch
from .signature import Generated, TemplateValue, generate

PRELUDE = '#include "prelude_host.h"\n'
TYPES_PRELUDE = '#include "prelude_types.h"\n'

# Inputs that a kernel changes (metal/decode_step.h).
_IN_PLACE = re.compile(r"\bIN_PLACE\(\w+, (\w+)\)")

_recorders: list[list[Counts]] = []


def changed_inputs(source: str) -> set[str]:
    """Names of the inputs that a kernel's body changes in place."""
    return set(_IN_PLACE.findall(source))


@contextlib.contextmanager
def recorded() -> Iterator[list[Counts]]:
    """What the launches inside the block counted, in order."""
    counts: list[Counts] = []
    _recorders.append(counts)
    try:
        yield counts
    finally:
        _recorders.remove(counts)


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: object = None,
) -> "HostKernel":
    """Stands where `mx.fast.metal_kernel` stands."""
    if atomic_outputs:
        raise NotImplementedError("The dialect has no atomics.")
    return HostKernel(name, input_names, output_names, source, header, ensure_row_contiguous)


@dataclass
class HostKernel:
    """A kernel that is built when it is first called with new types or template values."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str
    ensure_row_contiguous: bool

    def __call__(
        self,
        inputs: Sequence[mx.array | float | int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, TemplateValue]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        mx.eval(arrays)
        generated = generate(
            self.name,
            self.header,
            self.source,
            list(zip(self.input_names, arrays, strict=True)),
            list(zip(self.output_names, output_dtypes, strict=True)),
            template or [],
        )
        if verbose:
            print(generated.text + generated.instantiation)
        held = dict(zip(self.input_names, map(self._as_numpy, arrays), strict=True))
        outputs = {
            name: np.full(shape, 0 if init_value is None else init_value, _numpy_dtype(dtype))
            for name, shape, dtype in zip(
                self.output_names, output_shapes, output_dtypes, strict=True
            )
        }
        changed = changed_inputs(self.source)
        operands = []
        for argument in generated.arguments:
            if argument.output:
                array = outputs[argument.name]
            elif argument.of is None:
                array = held[argument.name]
            else:
                array = _property(held[argument.of[0]], argument.of[1])
            operands.append(
                Operand(
                    argument.name,
                    array,
                    argument.space,
                    argument.output or argument.name in changed,
                    argument.name in changed or init_value is not None,
                )
            )
        counts = launch(self.name, build(generated), operands, grid, threadgroup)
        for recorder in _recorders:
            recorder.append(counts)
        return [
            _as_mlx(outputs[name], dtype)
            for name, dtype in zip(self.output_names, output_dtypes, strict=True)
        ]

    def _as_numpy(self, array: mx.array) -> np.ndarray:
        view = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
        return np.ascontiguousarray(view) if self.ensure_row_contiguous else view


@functools.cache
def build(generated: Generated) -> Path:
    """The library of a generated kernel, checked for the dialect first."""
    dialect.check(generated.text)
    with ThreadPoolExecutor(2) as jobs:
        types = jobs.submit(compiler.check_types, TYPES_PRELUDE + generated.text + generated.use)
        library = jobs.submit(compiler.build, PRELUDE + generated.text + _entry(generated))
        types.result()
        return library.result()


def _entry(generated: Generated) -> str:
    """A function that calls the kernel as one lane."""
    arguments = []
    for i, argument in enumerate(generated.arguments):
        const = "" if argument.output else "const "
        star = "*" if argument.reference else ""
        arguments.append(f"{star}static_cast<{const}{argument.type}*>(arguments[{i}])")
    arguments += [f"where->{attribute}" for attribute in generated.attributes]
    return (
        'extern "C" __attribute__((no_sanitize("thread")))\n'
        "void host_entry(void* const* arguments, const HostAttributes* where) {\n"
        f"  {generated.call}({', '.join(arguments)});\n}}\n"
    )


def _property(array: np.ndarray, name: str) -> np.ndarray:
    if name == "strides":
        return np.array([s // array.itemsize for s in array.strides], np.int64)
    return np.array(array.shape if name == "shape" else array.ndim, np.int32)


def _numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    return np.asarray(mx.zeros((), mx.uint16 if dtype == mx.bfloat16 else dtype)).dtype


def _as_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    result = mx.array(array)
    return result.view(mx.bfloat16) if dtype == mx.bfloat16 else result
