"""Builds of kernels for this machine: compilers, flags, and a cache by content."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BUILDS = HERE.parent / ".build"

FLAGS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-Wno-attributes", "-w"]
# Every access that could be shared calls the runtime; clang leaves out reads before writes.
WATCHED = ["-fsanitize=thread"]
WATCHED_BY_CLANG = [*WATCHED, "-mllvm", "-tsan-instrument-read-before-write=1"]


class BuildError(Exception):
    """A compiler refused a kernel."""


def build(source: str) -> Path:
    """A shared library of a kernel, built once per text and compiler."""
    # Linking apart: -fsanitize=thread must not bring that sanitizer's own runtime along.
    compiled = [*host_compiler(), *FLAGS, *_watched(), "-I", str(HERE)]
    linked = [*host_compiler(), "-shared", str(runtime())]
    library = BUILDS / f"{_key(source, [*compiled, *linked])}.so"
    if not library.exists():
        code = library.with_suffix(".o")
        _in_builds(source, code, [*compiled, "-c"])
        _run([*linked, str(code)], library)
        code.unlink()
    return library


def check_types(source: str) -> None:
    """Compile C++ text with address spaces as types, to look at it only.

    Raises:
        BuildError: A pointer lacks its address space, or anything else is wrong.
    """
    command = [*clang(), "-std=c++17", "-c", "-w", "-I", str(HERE)]
    checked = BUILDS / f"{_key(source, command)}.checked.o"
    if not checked.exists():
        _in_builds(source, checked, command)
        checked.write_bytes(b"")


def assembly(source: str) -> str:
    """What the compiler makes of C++ text with full optimisation."""
    command = [*host_compiler(), *FLAGS, "-O2", "-S", "-g0", "-I", str(HERE)]
    listing = BUILDS / f"{_key(source, command)}.s"
    if not listing.exists():
        _in_builds(source, listing, command)
    return listing.read_text()


@functools.cache
def runtime() -> Path:
    """The library that runs launches and watches accesses."""
    names = ("runtime.cpp", "fiber.h", "prelude_host.h")
    text = "".join((HERE / name).read_text() for name in names)
    command = [*host_compiler(), "-std=c++17", "-O2", "-fPIC", "-shared", "-I", str(HERE)]
    library = BUILDS / f"runtime-{_key(text, command)}.so"
    if not library.exists():
        _in_builds('#include "runtime.cpp"\n', library, command)
    return library


def _watched() -> list[str]:
    return WATCHED if _is_gcc(host_compiler()) else WATCHED_BY_CLANG


@functools.cache
def host_compiler() -> tuple[str, ...]:
    """The C++ compiler named by CXX, else the machine's, else ziglang's."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return (name,)
    return zig()


@functools.cache
def clang() -> tuple[str, ...]:
    """A clang, which has address spaces: the machine's, else ziglang's."""
    return ("clang++",) if shutil.which("clang++") else zig()


def zig() -> tuple[str, ...]:
    """The C++ compiler of the package ziglang."""
    try:
        import ziglang  # noqa: F401
    except ImportError:
        raise BuildError("No C++ compiler here: pip install ziglang.") from None
    return (sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=undefined")


@functools.cache
def _is_gcc(compiler: tuple[str, ...]) -> bool:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True)
    return "clang" not in version.stdout


@functools.cache
def _identity(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True).stdout


def _key(source: str, command: list[str]) -> str:
    parts = [source, *command, _identity(command[0])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _in_builds(source: str, result: Path, command: list[str]) -> None:
    """Run a compiler on text."""
    BUILDS.mkdir(exist_ok=True)
    (BUILDS / ".gitignore").write_text("*\n")
    text = result.with_suffix(".cpp")
    text.write_text(source)
    _run([*command, str(text)], result)


def _run(command: list[str], result: Path) -> None:
    """Run a compiler; its output appears under its name only when whole."""
    partial = result.with_suffix(f".{os.getpid()}{result.suffix}")
    done = subprocess.run(
        [*command, "-o", str(partial)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    partial.rename(result)
