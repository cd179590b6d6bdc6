#!/usr/bin/env python3
"""Compiles and links the extension for Apple's computers, on any machine.

Needs ziglang from PyPI, which is a compiler for macOS, and what pip downloads: MLX's macOS wheel
and nanobind. Says so and succeeds where they cannot be had; fails where something does not compile
or link. Nothing runs.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from wheels import NoWheel, fetch, fetch_macos_mlx

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / "python"
TARGET = "aarch64-macos.14.0"
WARNINGS = ("-Wall", "-Wextra")
# As python/CMakeLists.txt and nanobind's CMake functions have them for a Mac.
KERNEL_OPTIONS = (*WARNINGS, "-fno-math-errno", "-ffp-contract=fast", "-DMLX_H2O_ISA=baseline")
BINDINGS_OPTIONS = (*WARNINGS, "-DNB_DOMAIN=mlx", "-fvisibility=hidden")
NANOBIND_OPTIONS = (
    *("-DNB_BUILD", "-DNB_COMPACT_ASSERTIONS", "-DNB_DOMAIN=mlx"),
    *("-fno-strict-aliasing", "-fvisibility=hidden"),
)


class BuildError(Exception):
    """Something does not compile or link."""


@dataclass(frozen=True)
class Build:
    """A build for Apple's computers.

    Attributes:
        mlx: The folder `mlx` of the macOS wheel.
        nanobind: The folder `nanobind` of its wheel.
        folder: For what is built.
    """

    mlx: Path
    nanobind: Path
    folder: Path

    def extension(self) -> Path:
        """Build everything.

        Raises:
            BuildError: With what the compiler or the linker said.
        """
        objects = [self._object(source, *_options(source)) for source in sources()]
        core = self.nanobind / "src" / "nb_combined.cpp"
        objects.append(self._object(core, *NANOBIND_OPTIONS))
        library = self.folder / "_ext.so"
        mlx = self.mlx / "lib" / "libmlx.dylib"
        self._run("-shared", *objects, mlx, self._python_stub(), "-o", library)
        return library

    def _object(self, source: Path, *options: str) -> Path:
        found = (
            self.mlx / "include",
            self.nanobind / "include",
            self.nanobind / "ext" / "robin_map" / "include",
            sysconfig.get_path("include"),
        )
        includes = [f"-I{PYTHON / 'src'}", *(f"-isystem{path}" for path in found)]
        compiled = self.folder / f"{source.stem}.o"
        print(source.name, flush=True)
        said = self._run("-std=c++20", "-O2", "-c", *options, *includes, source, "-o", compiled)
        print(said, end="")
        return compiled

    def _python_stub(self) -> Path:
        """What Python's symbols are linked against.

        A Mac's linker is told to leave them alone (nanobind lists them). To leave alone whatever is
        undefined would hide what is missing here, so they are declared to be in a library instead.
        """
        listed = (self.nanobind / "cmake" / "darwin-ld-cpython.sym").read_text()
        names = ", ".join(re.findall(r"-U (\w+)", listed))
        stub = self.folder / "libpython.tbd"
        stub.write_text(
            "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\n"
            "install-name: '@rpath/libpython.dylib'\n"
            f"exports:\n  - targets: [ arm64-macos ]\n    symbols: [ {names} ]\n...\n"
        )
        return stub

    def _run(self, *arguments: str | Path) -> str:
        command = [sys.executable, "-m", "ziglang", "c++", "-target", TARGET]
        done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(done.stderr)
        return done.stderr


def sources() -> list[Path]:
    """The extension's sources, as CMake has them.

    Raises:
        BuildError: CMake has not all of them.
    """
    lists = [folder / "CMakeLists.txt" for folder in (PYTHON, PYTHON / "src")]
    found = {
        cmake.parent / name
        for cmake in lists
        for name in re.findall(r"[\w/]+\.cpp\b", re.sub(r"#.*", "", cmake.read_text()))
    }
    missing = sorted(set((PYTHON / "src").rglob("*.cpp")) ^ found)
    if missing:
        raise BuildError(f"not both in python/src and in a CMakeLists.txt: {missing}")
    return sorted(found)


def _options(source: Path) -> tuple[str, ...]:
    if source.name == "kernels.cpp":
        return KERNEL_OPTIONS
    return BINDINGS_OPTIONS if source.name == "bindings.cpp" else WARNINGS


def nanobind_requirement() -> str:
    """The nanobind that the extension is built with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (requirement,) = (r for r in project["build-system"]["requires"] if r.startswith("nanobind"))
    return str(requirement)


def main() -> None:
    if importlib.util.find_spec("ziglang") is None:
        print("Not checked: no compiler for macOS here (pip install ziglang).")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            mlx = fetch_macos_mlx(folder)
            nanobind = fetch(nanobind_requirement(), folder) / "nanobind"
        except NoWheel as error:
            print(f"Not checked: {error}")
            return
        try:
            library = Build(mlx, nanobind, folder).extension()
        except BuildError as error:
            sys.exit(f"{error}\nThe extension does not build for macOS.")
        print(f"The extension compiles and links for {TARGET} ({library.stat().st_size} bytes).")


if __name__ == "__main__":
    main()
