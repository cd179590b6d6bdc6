"""What tests launched, one of each variant, for other compilers than the host's."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o.attention.backends.interface import interface
from mlx_h2o.attention.backends.launcher import Launcher

#: What a text depends on: a name (a template argument's, a buffer's) and its value or type.
Option = tuple[str, Any]


@dataclass(frozen=True)
class Variant:
    """All that the text of a launched kernel depends on.

    Attributes:
        kernel: Whose launch it was.
        inputs: Name, dtype and number of dimensions of what was passed.
        outputs: Name and dtype of what was asked for.
        template: Template arguments.
        threads: Of a threadgroup.
    """

    kernel: str
    inputs: tuple[tuple[str, mx.Dtype, int], ...]
    outputs: tuple[tuple[str, mx.Dtype], ...]
    template: tuple[tuple[str, Any], ...]
    threads: int

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.template]
        return " ".join([self.kernel, *options, f"threads={self.threads}"])

    @property
    def options(self) -> frozenset[tuple[frozenset[mx.Dtype], Option]]:
        """Each option, together with the floats that the variant works on."""
        passed = {name: dtype for name, dtype, *_ in (*self.inputs, *self.outputs)}
        absent = {name: None for name in interface(self.kernel).optional if name not in passed}
        floats = frozenset(x for x in passed.values() if mx.issubdtype(x, mx.floating))
        options = {**passed, **absent, **dict(self.template), "threads": self.threads}
        return frozenset((floats, option) for option in options.items())

    def launch(self, launcher: Launcher) -> None:
        """Launch it again somewhere else, on a threadgroup of nothing."""
        launcher.launch(
            self.kernel,
            {name: mx.zeros((1,) * ndim, dtype) for name, dtype, ndim in self.inputs},
            {name: ((1,), dtype) for name, dtype in self.outputs},
            dict(self.template),
            (1, 1, 1),
            self.threads,
        )


class RecordingLauncher(Launcher):
    """Remembers the variants that it launches.

    Attributes:
        launched: Each of them once, in the order of their first launches.
    """

    def __init__(self, make: Any, prelude: str):
        super().__init__(make, prelude)
        self.launched: dict[Variant, None] = {}

    def launch(
        self,
        kernel: str,
        inputs: dict[str, mx.array],
        outputs: dict[str, Any],
        template: dict[str, Any],
        threadgroups: tuple[int, int, int],
        threads: int,
    ) -> dict[str, mx.array]:
        written = super().launch(kernel, inputs, outputs, template, threadgroups, threads)
        variant = Variant(
            kernel,
            tuple((name, array.dtype, array.ndim) for name, array in inputs.items()),
            tuple((name, dtype) for name, (_, dtype) in outputs.items()),
            tuple(template.items()),
            threads,
        )
        self.launched[variant] = None
        return written


def covering(variants: Iterable[Variant]) -> list[Variant]:
    """Few of the variants, in which each option occurs with all floats that it occurs with."""
    left = list(variants)
    missing = frozenset().union(*(variant.options for variant in left))
    chosen = []
    while missing:
        best = max(left, key=lambda variant: len(variant.options & missing))
        chosen.append(best)
        missing -= best.options
    return chosen
