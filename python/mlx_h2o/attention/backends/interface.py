"""A kernel's buffers, as its own text in metal/ declares them.

Between the lines `//! buffers` and `//! body` of a `.metal` file stands a line per buffer:

    //! in keys
    //! in key_scales optional float strided
    //! out lse optional float

An optional buffer is one that a launch may do without. Its element type and whether the body reads
its strides say what stands in for it; without a type nothing has to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from mlx_h2o.attention.backends.kernel_text import BODY, BUFFERS, kernel_file


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

    @property
    def required(self) -> frozenset[str]:
        """The buffers that every launch has."""
        return frozenset({*self.inputs, *self.outputs} - self.optional.keys())


@cache
def interface(name: str) -> Interface:
    """A kernel's buffers, by the name of its file.

    Raises:
        ValueError: A line of the file declares nothing.
    """
    declared = kernel_file(f"{name}.metal").split(BUFFERS)[1].split(BODY)[0]
    names: dict[str, list[str]] = {"in": [], "out": []}
    optional: dict[str, str] = {}
    for line in declared.splitlines():
        match line.split():
            case ["//!", "in" | "out" as way, buffer]:
                pass
            case ["//!", "in" | "out" as way, buffer, "optional", *kind]:
                optional[buffer] = _stand_in(way, buffer, kind)
            case _:
                raise ValueError(f"{name}.metal declares no buffer by {line!r}.")
        names[way].append(buffer)
    return Interface(name, tuple(names["in"]), tuple(names["out"]), optional)


def _stand_in(way: str, buffer: str, kind: list[str]) -> str:
    """The declaration of a buffer that is not there."""
    match kind:
        case []:
            return ""
        case [element] | [element, "strided"]:
            const = "const " if way == "in" else ""
            strides = f"\nconst int64_t {buffer}_strides[4] = {{0}};" if len(kind) > 1 else ""
            return f"{const}device {element}* {buffer} = nullptr;{strides}"
    raise ValueError(f"The buffer {buffer} cannot be declared as {kind}.")
