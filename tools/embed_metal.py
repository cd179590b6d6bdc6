"""Write the kernels of metal/ into a source of the C library.

SwiftPM builds the source too and runs no generator, so it is committed.

tools/embed_metal.py            write c_api/src/gpu/kernel_files.cpp
tools/embed_metal.py --check    fail unless it is up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CPP = ROOT / "c_api/src/gpu/kernel_files.cpp"
# The C library launches these kernels; files that they include are added.
KERNELS = (
    *("attention_vector.metal", "attention_merge.metal", "prompt_lse.metal", "prompt_mass.metal"),
    *("overwrite.metal", "kept_keys.metal", "update.metal", "prelude_metal.h"),
)


def cpp_source() -> str:
    """The C++ source."""
    lines = [
        "// Written by tools/embed_metal.py from metal/; change that and run the tool.",
        "// clang-format off",
        "#include <map>",
        "",
        '#include "kernel_text.h"',
        "",
        "namespace mlx_h2o {",
        "",
        "const char* kernel_file(const std::string& name) {",
        "  static const auto& files = *new std::map<std::string, const char*>{",
    ]
    for name in needed():
        text = (ROOT / "metal" / name).read_text()
        lines += [f'{{"{name}", R"metal({text})metal"}},']
    lines += [
        "  };",
        "  const auto found = files.find(name);",
        "  return found == files.end() ? nullptr : found->second;",
        "}",
        "",
        "}  // namespace mlx_h2o",
    ]
    return "\n".join([*lines, ""])


def needed() -> list[str]:
    """The kernels' files and all files that they include, in order of names."""
    files: set[str] = set()
    left = list(KERNELS)
    while left:
        name = left.pop()
        if name in files:
            continue
        files.add(name)
        for line in (ROOT / "metal" / name).read_text().splitlines():
            if line.startswith('#include "'):
                left.append(line.split('"')[1])
    return sorted(files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    source = cpp_source()
    if not check:
        CPP.write_text(source)
    elif not CPP.exists() or CPP.read_text() != source:
        sys.exit(f"{CPP.relative_to(ROOT)} is not what metal/ says: run {Path(__file__)}.")


if __name__ == "__main__":
    main()
