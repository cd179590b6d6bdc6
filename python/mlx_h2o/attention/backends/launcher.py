"""Calls of custom kernels by the names of their buffers.

MLX writes a kernel's signature from the arrays that it gets, so a buffer that a launch omits is not
declared there. Its declaration as a null pointer goes before the body instead, and the template
arguments say that it is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_h2o.attention.backends.interface import interface
from mlx_h2o.attention.backends.kernel_text import KernelText, kernel_text

#: Lanes of a simdgroup.
SIMDGROUP = 32

#: Shapes and dtypes of a kernel's outputs, by name.
Outputs = dict[str, tuple[tuple[int, ...], mx.Dtype]]


class Launcher:
    """Builds kernels when they are first launched.

    Args:
        make: The function that calls `mx.fast.metal_kernel` or `mx.fast.cuda_kernel`.
        prelude: The name of the prelude before the text.
    """

    def __init__(self, make: Callable[..., Any], prelude: str):
        self._make = make
        self._prelude = prelude
        self._kernel = cache(self._build)

    def text(self, kernel: str) -> KernelText:
        """The text that a kernel is compiled from."""
        return kernel_text(kernel, self._prelude)

    def launch(
        self,
        kernel: str,
        inputs: dict[str, mx.array],
        outputs: Outputs,
        template: dict[str, Any],
        threadgroups: tuple[int, int, int],
        threads: int,
    ) -> dict[str, mx.array]:
        """Run a kernel.

        Args:
            kernel: The kernel's name.
            inputs: Inputs by name; optional ones may be missing.
            outputs: Shape and dtype by name; optional ones may be missing.
            template: Template arguments by name.
            threadgroups: The number of threadgroups along x, y and z.
            threads: Threads of each threadgroup, along x.

        Raises:
            ValueError: The kernel does not declare a buffer, or a required buffer is missing.
        """
        reads, writes = _in_order(kernel, tuple(inputs), tuple(outputs))
        written = self._kernel(kernel, reads, writes, threads)(
            inputs=[inputs[name] for name in reads],
            output_shapes=[outputs[name][0] for name in writes],
            output_dtypes=[outputs[name][1] for name in writes],
            grid=(threadgroups[0] * threads, threadgroups[1], threadgroups[2]),
            threadgroup=(threads, 1, 1),
            template=list(template.items()),
        )
        return dict(zip(writes, written, strict=True))

    def _build(
        self, kernel: str, reads: tuple[str, ...], writes: tuple[str, ...], threads: int
    ) -> Any:
        text, buffers = self.text(kernel), interface(kernel)
        passed = {*reads, *writes}
        if missing := buffers.required - passed:
            raise ValueError(f"{kernel} must have the buffers {', '.join(sorted(missing))}.")
        absent = [line for name, line in buffers.optional.items() if name not in passed]
        # One name for each text, since MLX caches compiled kernels by name.
        features = [name for name in buffers.optional if name in passed]
        return self._make(
            name="_".join(("mlx_h2o", kernel, *features, str(threads))),
            input_names=list(reads),
            output_names=list(writes),
            header=f"#define THREADGROUP_SIZE {threads}\n{text.header}",
            source="\n".join([*absent, text.body]),
            ensure_row_contiguous=False,
        )


# Cached, since a launch is asked for its order at every token and layer.
@cache
def _in_order(
    kernel: str, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a launch's buffers in the order of the signature."""
    buffers = interface(kernel)
    if unknown := {*inputs, *outputs} - {*buffers.inputs, *buffers.outputs}:
        raise ValueError(f"{kernel} has no buffers {', '.join(sorted(unknown))}.")
    reads = tuple(name for name in buffers.inputs if name in inputs)
    return reads, tuple(name for name in buffers.outputs if name in outputs)
