"""Compiles kernels for NVIDIA GPUs, without one: NVRTC from PyPI, headers likewise."""

import ctypes
import functools
import hashlib
import importlib.util
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from . import signature
from .compiler import BUILDS
from .signature import TemplateValue

TYPE_NAMES = {**signature.TYPE_NAMES, mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}

#: MLX compiles for the very GPU that it finds; this one's code is checked here.
ARCHITECTURE = "sm_90a"

_UTILITIES = "mlx/backend/cuda/device/utils.cuh"
_PREAMBLE = f'\n#include "{_UTILITIES}"\n\n#include <cooperative_groups.h>\n\n'
# Stands for MLX's own file of that name, as far as the text that it generates needs it.
_UTILITIES_TEXT = b"""
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}
"""


class NvrtcError(Exception):
    """NVRTC refused a kernel."""


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel.

    Attributes:
        registers: Of a thread.
        spilled: Bytes of a thread's registers that went to memory.
        local_arrays: Whether a thread has arrays in memory, since only runs know their indices.
        threadgroup_bytes: Threadgroup memory of a block.
        most_threads: Of a block, as the text promises.
        doubles: Whether anything is computed in double precision.
    """

    registers: int
    spilled: int
    local_arrays: bool
    threadgroup_bytes: int
    most_threads: int
    doubles: bool


def generate(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: Sequence[tuple[str, TemplateValue]],
) -> str:
    """The text that `mx.fast.cuda_kernel` makes around a kernel's body."""
    parameters = []
    for input_name, array in inputs:
        parameters.append(f"const {TYPE_NAMES[array.dtype]}* {input_name}")
        for of, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
            if array.ndim > 0 and f"{input_name}_{of}" in source:
                parameters.append(f"const __grid_constant__ {kind} {input_name}_{of}")
    parameters += [f"{TYPE_NAMES[dtype]}* {output_name}" for output_name, dtype in outputs]
    text = _PREAMBLE + header
    text += "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
    text += f"__global__ void {name}(\n    " + ",\n    ".join(parameters) + ") {\n"
    for template_name, value in template:
        if isinstance(value, mx.Dtype):
            text += f"  using {template_name} = {TYPE_NAMES[value]};\n"
        else:
            kind = "bool" if isinstance(value, bool) else "int"
            text += f"  constexpr {kind} {template_name} = {str(value).lower()};\n"
    text += "\n" if template else ""
    return text + source + "\n}\n\n} // namespace mlx::core::cu\n"


def compile_text(text: str, architecture: str = ARCHITECTURE) -> Compiled:
    """Compile a kernel to machine code, once per text and compiler.

    Raises:
        NvrtcError: With the compiler's log.
    """
    identity = f"{Path(__file__).read_text()}\0{_version()}\0{architecture}\0{text}"
    result = BUILDS / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.nvrtc.json"
    if not result.exists():
        compiled = _compile(text, architecture)
        BUILDS.mkdir(exist_ok=True)
        (BUILDS / ".gitignore").write_text("*\n")
        result.write_text(json.dumps(asdict(compiled)))
    return Compiled(**json.loads(result.read_text()))


def available() -> bool:
    """Whether NVRTC and the headers are installed."""
    return importlib.util.find_spec("nvidia") is not None and bool(_found("libnvrtc.so*"))


def _compile(text: str, architecture: str) -> Compiled:
    nvrtc = _library()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        text.encode(),
        b"kernel.cu",
        1,
        (ctypes.c_char_p * 1)(_UTILITIES_TEXT),
        (ctypes.c_char_p * 1)(_UTILITIES.encode()),
    )
    options = [
        "--device-as-default-execution-space",
        f"--gpu-architecture={architecture}",
        "--ptxas-options=-v",
        *(f"--include-path={path}" for path in _include_paths()),
        *_precompiled_headers(),
    ]
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    log = _text(nvrtc, program, "ProgramLog")
    ptx = "" if failed else _text(nvrtc, program, "PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise NvrtcError(log)
    return Compiled(
        registers=_number(r"Used (\d+) registers", log),
        spilled=_number(r"(\d+) bytes spill stores", log),
        local_arrays=".local" in ptx,
        threadgroup_bytes=_number(r"(\d+) bytes smem", log),
        most_threads=_number(r"\.maxntid (\d+)", ptx),
        doubles=".f64" in ptx,
    )


def _number(pattern: str, text: str) -> int:
    """The number that a pattern finds, or 0."""
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_found("libnvrtc.so*")[0]))


@functools.cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@functools.cache
def _precompiled_headers() -> list[str]:
    """Options by which the headers, most of the work, are compiled once per process."""
    if _version() < (12, 8):
        return []
    _precompiled_headers.folder = tempfile.TemporaryDirectory()  # lives as long as the process
    return ["--pch", "--pch-messages=false", f"--pch-dir={_precompiled_headers.folder.name}"]


@functools.cache
def _include_paths() -> list[Path]:
    headers = ("cuda_fp16.h", "cuda/std/array")
    return sorted({path for header in headers for path in _roots_of(header)})


def _roots_of(header: str) -> list[Path]:
    depth = header.count("/") + 1
    return [found.parents[depth - 1] for found in _found(header)]


def _found(pattern: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    return sorted(path for root in roots or () for path in Path(root).rglob(pattern))
