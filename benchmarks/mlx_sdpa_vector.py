"""MLX's own attention kernels for few queries, on the host harness.

Their source comes unchanged from MLX's macOS wheel (`mlx/backend/metal/kernels/sdpa_vector.h`);
constructs that the harness's prelude lacks are rewritten for it on the way: function constants,
declarations of threadgroup memory, attributes. The choice of kernel and of threads is MLX's
(`scaled_dot_product_attention.cpp`), repeated here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import compiler
from harness.kernel import PRELUDE
from harness.launch import Counts, Operand, launch

HEADER = "include/mlx/backend/metal/kernels/sdpa_vector.h"
SIMDGROUP = 32
THREADS = 1024

# The part of MLX's utilities that these kernels use.
UTILITIES = """
#include <stddef.h>
template <typename T>
struct Limits {
  static constexpr float finite_min = -3.40282347e38f;
};
template <>
struct Limits<half> {
  static constexpr float finite_min = -65504.0f;
};
template <>
struct Limits<bfloat> {
  static constexpr float finite_min = -3.38953139e38f;
};
"""

# With this many query heads per KV head, and this many slots, MLX has a first pass that reads keys
# and values less often; and the query heads of one simdgroup, by width.
GROUP, GROUP_SLOTS = 8, 8192
HEADS_PER_SIMDGROUP = {64: 8, 128: 4}


@dataclass(frozen=True)
class Call:
    """The operands of one attention call, as numpy holds them (bfloat as its bits).

    Attributes:
        q: `[B, Hq, L, D]`; all operands are contiguous.
        k: `[B, Hk, N, D]`.
        v: `[B, Hk, N, Dv]`.
        scale: Factor on q.k.
        type: "half", "bfloat" or "float".
        causal: Whether the mask is the causal one.
        mask: `[B, Hq, L, N]`, booleans or of the queries' type.
        sinks: `[Hq]` of the queries' type.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    type: str
    causal: bool = False
    mask: np.ndarray | None = None
    sinks: np.ndarray | None = None


@dataclass(frozen=True)
class Launched:
    """A launch of a kernel.

    Attributes:
        counts: The launch's counts.
        sizes: Bytes of its buffers, by name.
    """

    counts: Counts
    sizes: dict[str, int]

    @property
    def distinct_bytes(self) -> int:
        """Device bytes, each counted once however often it is requested."""
        requested = (self.counts.bytes_read, self.counts.bytes_written)
        return sum(min(n, self.sizes[name]) for of in requested for name, n in of.items())


class SdpaVector:
    """MLX's `sdpa_vector` in one and two passes.

    Args:
        wheel: The unpacked wheel.
        architecture: The Apple GPU that MLX assumes; its last letter decides.
    """

    def __init__(self, wheel: Path, architecture: str):
        self._header = (wheel / HEADER).read_text()
        self._size = architecture[-1]

    def __call__(self, call: Call) -> tuple[np.ndarray, list[Launched]]:
        """out `[B, Hq, L, Dv]`, and the counts of each launch."""
        Hq, Hk, N = call.q.shape[1], call.k.shape[1], call.k.shape[2]
        if (self._size in "ds" and N >= 1024) or (Hk < Hq and N >= 4096):
            return self._two_passes(call)
        return self._one_pass(call)

    def _one_pass(self, call: Call) -> tuple[np.ndarray, list[Launched]]:
        B, Hq, L, D = call.q.shape
        out = np.zeros((B, Hq, L, call.v.shape[-1]), call.q.dtype)
        values = {
            "gqa_factor": np.int32(Hq // call.k.shape[1]),
            "num_q_heads": np.int32(Hq),
            "out": out,
        }
        launched = self._launch(
            "sdpa_vector",
            [call.type, D, call.v.shape[-1]],
            call,
            values,
            (B * Hq * THREADS, L, 1),
            (THREADS, 1, 1),
        )
        return out, [launched]

    def _two_passes(self, call: Call) -> tuple[np.ndarray, list[Launched]]:
        (B, Hq, L, D), (Hk, N, Dv) = call.q.shape, call.v.shape[1:]
        G = Hq // Hk
        blocks = self._blocks(N, G * L)
        partials = np.zeros((B, Hq, L, blocks, Dv), call.q.dtype)
        sums, maxs = np.zeros((2, B, Hq, L, blocks), np.float32)
        plain = call.mask is None and call.sinks is None and not call.causal
        name, template = "sdpa_vector_2pass_1", [call.type, D, Dv]
        few = plain and L == 1 and G == GROUP and N >= GROUP_SLOTS
        if few and Dv == D and D in HEADS_PER_SIMDGROUP:
            name, template = f"{name}_gqa", [*template, G, HEADS_PER_SIMDGROUP[D]]
        first = self._launch(
            name,
            template,
            call,
            {"out": partials, "sums": sums, "maxs": maxs},
            (Hk * SIMDGROUP, B * G, blocks * L),
            (SIMDGROUP, G, L),
            blocks,
        )
        out = np.zeros((B, Hq, L, Dv), call.q.dtype)
        last = self._launch(
            "sdpa_vector_2pass_2",
            [call.type, Dv],
            call,
            {
                "partials": partials,
                "sums": sums,
                "maxs": maxs,
                "out": out,
                "blocks": np.int32(blocks),
            },
            (B * Hq * THREADS, L, 1),
            (THREADS, 1, 1),
            blocks,
        )
        return out, [first, last]

    def _blocks(self, slots: int, rows: int) -> int:
        """The number of simdgroups over which the first pass spreads a head's keys."""
        if self._size == "s":
            if slots <= 1024 or rows <= 4:
                return 64
            return next(
                (b for n, b in ((8192, 128), (32768, 256), (65536, 512)) if slots <= n), 1024
            )
        if self._size == "d":
            if rows <= 2 and slots > 8192:
                return 256
            if rows >= 6 and slots >= 16384:
                return 512 if slots < 65536 else 1024
            return 128
        return 64 if rows >= 4 else 32

    def _launch(
        self,
        name: str,
        template: Sequence[str | int],
        call: Call,
        values: dict[str, Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        blocks: int = 0,
    ) -> Launched:
        """Run one kernel; its results are in `values` afterwards."""
        constants = {
            "has_mask": call.mask is not None,
            "query_transposed": False,
            "do_causal": call.causal and call.q.shape[2] > 1,
            "bool_mask": call.mask is not None and call.mask.dtype == bool,
            "float_mask": call.mask is not None and call.mask.dtype != bool,
            "has_sinks": call.sinks is not None,
            "blocks": blocks,
        }
        arguments = _of_call(call) | values
        parameters = _parameters(self._header, name)
        written = {"out", "sums", "maxs"} if "2pass_1" in name else {"out"}
        operands = [
            Operand(p.name, np.atleast_1d(arguments[p.name]), p.space, p.name in written)
            for p in parameters
            if p.space
        ]
        source = PRELUDE + UTILITIES + _in_the_harness_words(self._header, constants)
        source += _entry(name, template, parameters)
        counts = launch(name, compiler.build(source), operands, grid, threadgroup)
        return Launched(counts, {operand.name: operand.array.nbytes for operand in operands})


@dataclass(frozen=True)
class _Parameter:
    """A parameter of a kernel: a buffer, or (without a space) an attribute of a thread."""

    name: str
    type: str
    space: str
    reference: bool
    attribute: str


def _of_call(call: Call) -> dict[str, Any]:
    """The operands by the names of the kernels' parameters, unused ones too."""
    mask, (N, D), Dv = call.mask, call.k.shape[2:], call.v.shape[-1]
    nothing = np.zeros(1, call.q.dtype)
    return {
        "queries": call.q,
        "keys": call.k,
        "values": call.v,
        "N": np.int32(N),
        "k_head_stride": np.uint64(N * D),
        "k_seq_stride": np.uint64(D),
        "v_head_stride": np.uint64(N * Dv),
        "v_seq_stride": np.uint64(Dv),
        "scale": np.float32(call.scale),
        "bmask": mask if mask is not None and mask.dtype == bool else np.zeros(1, bool),
        "fmask": mask if mask is not None and mask.dtype != bool else nothing,
        "mask_kv_seq_stride": np.int32(1),
        "mask_q_seq_stride": np.int32(N),
        "mask_head_stride": np.int32(call.q.shape[2] * N),
        "sinks": nothing if call.sinks is None else call.sinks,
    }


def _in_the_harness_words(header: str, constants: dict[str, bool | int]) -> str:
    """The header's source without constructs that only Metal's compiler accepts."""
    text = re.sub(r"#include <metal_\w+>\n|using namespace metal;\n", "", header)
    text = re.sub(
        r"^constant (\w+) (\w+) \[\[function_constant\(\d+\)\]\];",
        lambda match: f"constexpr {match[1]} {match[2]} = {int(constants[match[2]])};",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"\bthreadgroup (\w+) (\w+)\[(.+?)\];", r"THREADGROUP_ARRAY(\1, \2, \3);", text)
    return re.sub(r"\[\[.*?\]\]", "", text, flags=re.DOTALL)


def _parameters(header: str, kernel: str) -> list[_Parameter]:
    """The parameters of a kernel, in order."""
    match = re.search(rf"\[\[kernel\]\] void {kernel}\((.*?)\) \{{", header, re.DOTALL)
    assert match, f"the wheel's {HEADER} has no {kernel}"
    pattern = r"(?:const )?(?:(device|constant) )?(\w+)([*&]?) (\w+)\s*\[\[(.*?)\]\](?:,|\s*$)"
    return [
        _Parameter(name, type_name, space, mark == "&", attribute)
        for space, type_name, mark, name, attribute in re.findall(pattern, match[1], re.DOTALL)
    ]


def _entry(name: str, template: Sequence[str | int], parameters: Sequence[_Parameter]) -> str:
    """A function that calls the kernel as one lane."""
    arguments, buffers = [], 0
    for parameter in parameters:
        if parameter.space:
            star = "*" if parameter.reference else ""
            arguments.append(f"{star}static_cast<{parameter.type}*>(arguments[{buffers}])")
            buffers += 1
        else:
            arguments.append(f"where->{parameter.attribute}")
    values = ", ".join(map(str, template))
    return (
        '\nextern "C" __attribute__((no_sanitize("thread")))\n'
        "void host_entry(void* const* arguments, const HostAttributes* where) {\n"
        f"  using T = {template[0]};\n"
        f"  {name}<{values}>({', '.join(arguments)});\n}}\n"
    )
