"""Calls of custom kernels by the names of their buffers.

MLX writes a kernel's signature from the arrays that it gets, so a buffer that a launch does without
has no name there. Its declaration as a null pointer goes before the body instead, and the template
arguments say that nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_h2o.backends.kernel_text import kernel_text

#: Lanes of a simdgroup.
SIMDGROUP = 32

#: Shape and dtype of what a kernel is to write, by name.
Outputs = dict[str, tuple[tuple[int, ...], mx.Dtype]]


@dataclass(frozen=True)
class Interface:
    """A kernel's buffers, in order.

    Attributes:
        name: Of its file in metal/.
        inputs: All that it may read.
        outputs: All that it may write.
        optional: Those that a launch may do without, with the declarations that then stand in.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    optional: dict[str, str] = field(default_factory=dict, hash=False)


def absent_inputs(*names: str) -> dict[str, str]:
    """Declarations for optional inputs of floats."""
    return {name: f"const device float* {name} = nullptr;" for name in names}


def absent_outputs(*names: str) -> dict[str, str]:
    """Declarations for optional outputs of floats."""
    return {name: f"device float* {name} = nullptr;" for name in names}


class Launcher:
    """Builds kernels when they are first launched.

    Args:
        make: Calls `mx.fast.metal_kernel` or `mx.fast.cuda_kernel`.
        prelude: Which prelude goes before the text.
    """

    def __init__(self, make: Callable[..., Any], prelude: str):
        self._make = make
        self._prelude = prelude
        self._kernel = cache(self._build)

    def launch(
        self,
        interface: Interface,
        inputs: dict[str, mx.array],
        outputs: Outputs,
        template: dict[str, Any],
        threadgroups: tuple[int, int, int],
        threads: int,
    ) -> dict[str, mx.array]:
        """Run a kernel.

        Args:
            interface: Whose buffers they are.
            inputs: By name; optional ones may lack.
            outputs: Shape and dtype by name; optional ones may lack.
            template: Template arguments by name.
            threadgroups: How many along x, y and z.
            threads: Of each threadgroup, along x.
        """
        reads = tuple(name for name in interface.inputs if name in inputs)
        writes = tuple(name for name in interface.outputs if name in outputs)
        written = self._kernel(interface, reads, writes, threads)(
            inputs=[inputs[name] for name in reads],
            output_shapes=[outputs[name][0] for name in writes],
            output_dtypes=[outputs[name][1] for name in writes],
            grid=(threadgroups[0] * threads, threadgroups[1], threadgroups[2]),
            threadgroup=(threads, 1, 1),
            template=list(template.items()),
        )
        return dict(zip(writes, written, strict=True))

    def _build(
        self, interface: Interface, reads: tuple[str, ...], writes: tuple[str, ...], threads: int
    ) -> Any:
        text = kernel_text(interface.name, self._prelude)
        passed = {*reads, *writes}
        absent = [line for name, line in interface.optional.items() if name not in passed]
        # One name for one text, since MLX keeps compiled kernels by name.
        features = [name for name in interface.optional if name in passed]
        return self._make(
            name="_".join(("mlx_h2o", interface.name, *features, str(threads))),
            input_names=list(reads),
            output_names=list(writes),
            header=f"#define THREADGROUP_SIZE {threads}\n{text.header}",
            source="\n".join([*absent, text.body]),
            ensure_row_contiguous=False,
        )
