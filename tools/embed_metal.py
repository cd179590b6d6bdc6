"""Write the kernels of metal/ into the Swift package, which has no other way to carry them.

tools/embed_metal.py            write swift/Sources/MLXH2O/Backends/KernelFiles.swift
tools/embed_metal.py --check    fail unless it is up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "swift/Sources/MLXH2O/Backends/KernelFiles.swift"
# Swift launches these; what they include comes with them.
KERNELS = (
    *("attention_vector.metal", "attention_merge.metal", "prompt_lse.metal", "prompt_mass.metal"),
    *("overwrite.metal", "kept_keys.metal", "update.metal", "prelude_metal.h"),
)


def embedded() -> str:
    """The Swift source."""
    lines = [
        "// Written by tools/embed_metal.py from metal/; change that and run the tool.",
        "// swift-format-ignore-file",
        "",
        "/// The texts of the GPU kernels, by file name.",
        "let kernelFiles: [String: String] = [",
    ]
    for name in needed():
        text = (ROOT / "metal" / name).read_text()
        lines += [f'    "{name}": ##"""', text.rstrip("\n"), "", '"""##,']
    return "\n".join([*lines, "]", ""])


def needed() -> list[str]:
    """The kernels' files and all that they include, in order of names."""
    found: set[str] = set()
    left = list(KERNELS)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for line in (ROOT / "metal" / name).read_text().splitlines():
            if line.startswith('#include "'):
                left.append(line.split('"')[1])
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        if not TARGET.exists() or TARGET.read_text() != embedded():
            sys.exit(f"{TARGET.relative_to(ROOT)} is not what metal/ says: run {Path(__file__)}.")
    else:
        TARGET.write_text(embedded())


if __name__ == "__main__":
    main()
