"""The text of the kernels in metal/, as compilers get it.

A `.metal` file holds functions and, after a line `//! body`, the body of the kernel itself, whose
signature MLX writes. Between them its buffers are declared (interface.py). Includes are replaced by
the headers' text, since kernels are compiled from memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: The lines before the declarations of buffers, and before the body.
BUFFERS = "\n//! buffers\n"
BODY = "\n//! body\n"
_INCLUDE = re.compile(r'^#include "(\w+\.h)"\n', re.MULTILINE)


@dataclass(frozen=True)
class KernelText:
    """A kernel's functions and its body."""

    header: str
    body: str


def folder() -> Path:
    """The folder of the kernels: in the installed package, or in the checkout around it."""
    package = Path(__file__).parents[2]
    installed = package / "metal"
    return installed if installed.is_dir() else package.parents[1] / "metal"


@cache
def kernel_file(name: str) -> str:
    """The text of a file of metal/."""
    return (folder() / name).read_text()


@cache
def kernel_text(name: str, prelude: str) -> KernelText:
    """A kernel by name, after a prelude.

    Args:
        name: The name of the file, without `.metal`.
        prelude: `"metal"` or `"cuda"`.
    """
    declared, body = kernel_file(f"{name}.metal").split(BODY)
    functions, _ = declared.split(BUFFERS)
    included: set[str] = set()
    header = f'#include "prelude_{prelude}.h"\n{functions}\n'
    return KernelText(_with_includes(header, included), body)


def _with_includes(text: str, included: set[str]) -> str:
    """Text with each header in place of its first `#include`, and no other."""

    def content(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in included:
            return ""
        included.add(name)
        return _with_includes(kernel_file(name), included)

    return _INCLUDE.sub(content, text)
