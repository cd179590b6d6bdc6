"""A kernel's buffers, as its own text in metal/ declares them.

Between the lines `//! buffers` and `//! body` of a `.metal` file there is a line for each buffer:

    //! in keys
    //! in key_scales optional float strided
    //! out lse optional float

A launch may omit an optional buffer. Its element type and whether the body reads its strides
determine the declaration in its place; without a type none is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from mlx_h2o.attention.backends.kernel_text import BODY, BUFFERS, kernel_file


@dataclass(frozen=True)
class Interface:
    """A kernel's buffers, in order.

    Attributes:
        name: The name of its file in metal/.
        inputs: Buffers that it may read.
        outputs: Buffers that it may write.
        optional: Buffers that a launch may omit, with the declarations in their place.
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
        ValueError: A line of the file is not a declaration.
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
    """The declaration that replaces an omitted buffer."""
    match kind:
        case []:
            return ""
        case [element] | [element, "strided"]:
            const = "const " if way == "in" else ""
            strides = f"\nconst int64_t {buffer}_strides[4] = {{0}};" if len(kind) > 1 else ""
            return f"{const}device {element}* {buffer} = nullptr;{strides}"
    raise ValueError(f"The buffer {buffer} cannot be declared as {kind}.")
