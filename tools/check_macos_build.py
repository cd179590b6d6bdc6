#!/usr/bin/env python3
"""Compiles and links the extension and the C API for Apple's computers, on any machine, and looks
at what the wheel for them would hold.

Needs ziglang from PyPI, which is a compiler for macOS, and packages that pip downloads: MLX's macOS
wheel and nanobind. Says so and succeeds where they are not available; fails if something does not
compile or link. Nothing runs.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import check_packages
from wheels import NoWheel, fetch, fetch_macos_mlx

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / "python"
C_API = ROOT / "c_api"
CPU = C_API / "src" / "cpu"
MACHINE = ROOT / "benchmarks" / "native"
TARGET = "aarch64-macos.14.0"
PLATFORM = "macosx_14_0_arm64"
# As python/CMakeLists.txt has it: the extension finds the library in the wheel mlx-metal.
RPATH = "@loader_path/../mlx/lib"
LIBRARY_OF_MLX = "@rpath/libmlx.dylib"
WARNINGS = ("-Wall", "-Wextra")
# As python/CMakeLists.txt and nanobind's CMake functions have them for a Mac.
KERNEL_OPTIONS = (*WARNINGS, "-fno-math-errno", "-ffp-contract=fast", "-DMLX_H2O_ISA=baseline")
BINDINGS_OPTIONS = (*WARNINGS, "-DNB_DOMAIN=mlx", "-fvisibility=hidden")
# These are checked and linked, but not run: optimisation is not needed.
C_API_OPTIONS = (*WARNINGS, "-O0", '-DMLX_H2O_VERSION="0"', "-fvisibility=hidden")
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
        folder: The folder for built files.
    """

    mlx: Path
    nanobind: Path
    folder: Path

    def libraries(self) -> list[Path]:
        """Build the extension, the benchmarks' probe, and the C API.

        Raises:
            BuildError: Something failed; the message is the compiler's or the linker's.
        """
        objects = {source: self._object(source, *_options(source)) for source in sources()}
        core = self.nanobind / "src" / "nb_combined.cpp"
        python = [self._object(core, *NANOBIND_OPTIONS), self._python_stub()]
        kernels = [built for source, built in objects.items() if source.is_relative_to(CPU)]
        bindings = [built for source, built in objects.items() if source.parent == PYTHON / "src"]
        machine = [built for source, built in objects.items() if source.parent == MACHINE]
        c_api = [self._object(source, *C_API_OPTIONS) for source in self._c_api_sources()]
        return [
            self._linked("_ext.so", *kernels, *bindings, *python),
            self._linked("_machine.so", *machine, objects[CPU / "thread_pool.cpp"], *python),
            self._linked("libmlx_h2o.dylib", *kernels, *c_api),
        ]

    def _linked(self, name: str, *objects: Path) -> Path:
        library = self.folder / name
        library_of_mlx = self.mlx / "lib" / "libmlx.dylib"
        self._run("-shared", f"-Wl,-rpath,{RPATH}", *objects, library_of_mlx, "-o", library)
        return library

    def _c_api_sources(self) -> list[Path]:
        """The library's sources, over MLX's C++ API, and those of the mlx-c subset."""
        elsewhere = (CPU, C_API / "src" / "over_mlx_c")
        engine = (C_API / "src").rglob("*.cpp")
        return [
            *sorted(path for path in engine if not any(map(path.is_relative_to, elsewhere))),
            *sorted(C_API.glob("mlx_c/src/*.cpp")),
        ]

    def _object(self, source: Path, *options: str) -> Path:
        missing = (
            self.mlx / "include",
            self.nanobind / "include",
            self.nanobind / "ext" / "robin_map" / "include",
            sysconfig.get_path("include"),
        )
        own = (CPU, C_API / "src", C_API / "include", C_API / "mlx_c" / "include")
        includes = [*(f"-I{path}" for path in own), *(f"-isystem{path}" for path in missing)]
        compiled = self.folder / f"{'_'.join(source.parts[-3:])}.o"
        print(source.name, flush=True)
        errors = self._run("-std=c++20", "-O2", "-c", *options, *includes, source, "-o", compiled)
        print(errors, end="")
        return compiled

    def _python_stub(self) -> Path:
        """A stub that Python's symbols are linked against.

        A Mac's linker is told to ignore them (nanobind lists them). To ignore all undefined symbols
        would hide missing ones, so these are declared to be in a library instead.
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
    """The sources of Python's two libraries, as CMake lists them.

    Raises:
        BuildError: CMake does not list all of them.
    """
    paths = {
        (folder / name).resolve()
        for folder in (PYTHON, CPU)
        for name in re.findall(
            r"[\w/.]+\.cpp\b", re.sub(r"#.*", "", (folder / "CMakeLists.txt").read_text())
        )
    }
    there = {path.resolve() for folder in (PYTHON, CPU, MACHINE) for path in folder.rglob("*.cpp")}
    if missing := sorted(there ^ paths):
        raise BuildError(f"not both there and in a CMakeLists.txt: {missing}")
    return sorted(paths)


def _options(source: Path) -> tuple[str, ...]:
    if source.name == "kernels.cpp":
        return KERNEL_OPTIONS
    return BINDINGS_OPTIONS if source.name == "bindings.cpp" else WARNINGS


def check_wheel(extension: Path, mlx: Path, folder: Path) -> str:
    """Put a wheel for a Mac together of what is linked and the package's files, and look at it.

    Args:
        extension: The library `_ext`.
        mlx: The folder `mlx` of the macOS wheel.
        folder: For what is built.

    Returns:
        What was found, in words.

    Raises:
        SystemExit: It lacks something, holds what no user runs, or would not find MLX's library.
    """
    linked = extension.read_bytes()
    if not all(name.encode() in linked for name in (RPATH, LIBRARY_OF_MLX)):
        raise SystemExit(f"{extension.name} does not look for {LIBRARY_OF_MLX} in {RPATH}.")
    if not (mlx / "lib" / "libmlx.dylib").exists():
        raise SystemExit("mlx-metal has no mlx/lib/libmlx.dylib.")
    # The package's files, as in any wheel.
    options = ("--wheel", "--no-isolation", "--skip-dependency-check", "-Cwheel.cmake=false")
    check_packages.run(sys.executable, "-m", "build", *options, "--outdir", folder, ROOT)
    (pure,) = folder.glob("*.whl")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = "-".join([*pure.stem.split("-")[:2], python, python, PLATFORM])
    wheel = pure.rename(folder / f"{name}.whl")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.write(extension, f"mlx_h2o/_ext.cpython-{python[2:]}-darwin.so")
    check_packages.check_contents(wheel)
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    megabytes = sum(entry.file_size for entry in entries) / 2**20
    return f"{wheel.name} would hold {len(entries)} files of {megabytes:.1f} MiB, and all it must."


def nanobind_requirement() -> str:
    """The version of nanobind with which the extension is built."""
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
            libraries = Build(mlx, nanobind, folder).libraries()
        except BuildError as error:
            sys.exit(f"{error}\nThis does not build for macOS.")
        for library in libraries:
            size = library.stat().st_size
            print(f"{library.name} compiles and links for {TARGET} ({size} bytes).")
        print(check_wheel(libraries[0], mlx, folder))


if __name__ == "__main__":
    main()
