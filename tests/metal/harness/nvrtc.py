"""Compiles kernels for NVIDIA GPUs, without one: NVRTC from PyPI, headers likewise."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from .signature import TemplateValue

TYPE_NAMES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.bool_: "bool",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
}

# What MLX includes before every kernel, as far as the text that it generates needs it.
MLX_UTILITIES = """
#include <cuda/std/array>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}
"""


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
    text = MLX_UTILITIES + "\n#include <cooperative_groups.h>\n" + header
    text += "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
    text += f"__global__ void {name}(\n    " + ",\n    ".join(parameters) + ") {\n"
    for template_name, value in template:
        if isinstance(value, mx.Dtype):
            text += f"  using {template_name} = {TYPE_NAMES[value]};\n"
        else:
            kind = "bool" if isinstance(value, bool) else "int"
            text += f"  constexpr {kind} {template_name} = {str(value).lower()};\n"
    return text + source + "\n}\n\n}\n"


def compile_text(text: str, architecture: str = "compute_90") -> str:
    """The PTX of a kernel.

    Raises:
        RuntimeError: With the compiler's log.
    """
    nvrtc = _library()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    options = [
        b"--device-as-default-execution-space",
        f"--gpu-architecture={architecture}".encode(),
    ]
    options += [f"--include-path={path}".encode() for path in _include_paths()]
    failed = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    result = _text(nvrtc, program, "ProgramLog" if failed else "PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(result)
    return result


def available() -> bool:
    """Whether NVRTC and the headers are installed."""
    return importlib.util.find_spec("nvidia") is not None and bool(_found("libnvrtc.so*"))


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
