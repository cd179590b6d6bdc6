"""MLX's own attention kernels and ours, side by side on the host harness.

Fetches MLX's macOS wheel with pip, runs the source of its `sdpa_vector` kernels (one and two
passes) and of ours lane by lane on the same inputs, and prints the counts of each. Device bytes are
those that simdgroups request, and, separately, those that remain if caches served every repetition.
Nothing here is a time, and no GPU has run it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.find_harness import harness
from benchmarks.mlx_sdpa_vector import Call, Launched, SdpaVector
from mlx_h2o.attention.backends.attention_launches import EXPORT_LOGITS, EXPORT_NOTHING
from mlx_h2o.attention.backends.gpu import Gpu
from mlx_h2o.attention.backends.launcher import Launcher
from tools.wheels import NoWheel, fetch_macos_mlx

# Apple GPUs of a MacBook and of a Studio; MLX chooses one or two passes by them.
SMALL, LARGE = "applegpu_g13g", "applegpu_g13d"
MLX, OURS, EXPORTING = "MLX", "ours", "ours, exporting"
# Our launches' bytes may exceed the fewest bytes that a case can cost by this factor.
MOST_OVER_LEAST = 1.02
TYPES = {"half": mx.float16, "bfloat": mx.bfloat16, "float": mx.float32}


@dataclass(frozen=True)
class Case:
    """One call of attention, contiguous.

    Attributes:
        sizes: Hq, Hk, L, N, D, Dv of a batch of one.
        type: "half", "bfloat" or "float".
        gpu: The architecture that both sides assume.
        mask: "", "causal", "boolean" (hides a third) or "additive".
        sinks: Whether there are attention sinks.
    """

    sizes: tuple[int, int, int, int, int, int]
    type: str = "half"
    gpu: str = SMALL
    mask: str = ""
    sinks: bool = False

    def __str__(self) -> str:
        Hq, Hk, L, N, D, Dv = self.sizes
        width = str(D) if Dv == D else f"{D}/{Dv}"
        words = [f"({Hq}, {Hk}, {width})", self.type, f"N {N}"]
        words += [f"L {L}"] if L > 1 else []
        words += [self.mask] if self.mask else []
        words += ["sinks"] if self.sinks else []
        return ", ".join([*words, "large GPU"] if self.gpu == LARGE else words)

    @property
    def least_bytes(self) -> int:
        """Keys, values, queries and mask once, and the output."""
        Hq, Hk, L, N, D, Dv = self.sizes
        itemsize = TYPES[self.type].size
        mask = {"boolean": 1, "additive": itemsize}.get(self.mask, 0) * Hq * L * N
        return (Hk * N + Hq * L) * (D + Dv) * itemsize + mask + self.sinks * Hq * itemsize

    @property
    def logit_bytes(self) -> int:
        """The bytes that exporting logits and lse adds."""
        Hq, _, L, N, _, _ = self.sizes
        return 4 * Hq * L * (N + 1)


CASES = (
    Case((32, 8, 1, 1024, 128, 128)),
    Case((32, 8, 1, 4096, 128, 128)),
    Case((32, 8, 1, 16384, 128, 128)),
    Case((32, 8, 1, 1024, 128, 128), gpu=LARGE),
    Case((32, 8, 1, 4096, 128, 128), gpu=LARGE),
    Case((32, 8, 1, 16384, 128, 128), gpu=LARGE),
    Case((32, 8, 1, 4096, 128, 128), "bfloat"),
    Case((32, 8, 1, 4096, 128, 128), "float"),
    Case((8, 8, 1, 4096, 128, 128)),
    Case((8, 8, 1, 4096, 128, 128), gpu=LARGE),
    Case((16, 2, 1, 8192, 128, 128)),
    Case((16, 2, 1, 8192, 64, 64)),
    Case((8, 4, 1, 2048, 256, 256)),
    Case((16, 16, 1, 2048, 192, 128)),
    Case((32, 8, 4, 2048, 128, 128), mask="causal"),
    Case((16, 4, 2, 2048, 128, 128), mask="boolean"),
    Case((16, 4, 2, 2048, 128, 128), "bfloat", mask="additive"),
    Case((64, 8, 1, 2048, 64, 64), "bfloat", sinks=True),
)


@dataclass(frozen=True)
class Measured:
    """The counts and the error of one side for a case.

    Attributes:
        error: The largest distance from attention in float64 on the same operands.
        device_bytes: Requested bytes, read and written.
        over_least: `device_bytes` over the fewest bytes that the case can cost.
        distinct_over_least: The same ratio if caches served every repeated request of a launch.
        barriers: Barriers, over all threadgroups.
        reductions: Reductions of simdgroups, per key and query row.
        shuffles: Shuffles within simdgroups, per key and query row.
        threadgroups: Threadgroups of each launch.
    """

    error: float
    device_bytes: int
    over_least: float
    distinct_over_least: float
    barriers: int
    reductions: float
    shuffles: float
    threadgroups: list[int]


@dataclass(frozen=True)
class Operands:
    """A case's arrays."""

    q: mx.array
    k: mx.array
    v: mx.array
    mask: mx.array | None
    sinks: mx.array | None


def operands_of(case: Case) -> Operands:
    """Unit-normal operands."""
    Hq, Hk, L, N, D, Dv = case.sizes
    mx.random.seed(0)
    dtype = TYPES[case.type]
    shapes = ((1, Hq, L, D), (1, Hk, N, D), (1, Hk, N, Dv))
    q, k, v = (mx.random.normal(shape).astype(dtype) for shape in shapes)
    mask = None
    if case.mask == "boolean":
        mask = mx.random.uniform(shape=(1, Hq, L, N)) > 1 / 3
    elif case.mask == "additive":
        mask = mx.random.normal((1, Hq, L, N)).astype(dtype)
    sinks = mx.random.normal((Hq,)).astype(dtype) if case.sinks else None
    return Operands(q, k, v, mask, sinks)


def reference(case: Case, operands: Operands) -> np.ndarray:
    """Attention in float64."""
    Hq, Hk, L, N, D, Dv = case.sizes
    q, k, v = (as_float64(x) for x in (operands.q, operands.k, operands.v))
    logits = (q.reshape(Hk, -1, D) * D**-0.5) @ k[0].swapaxes(-1, -2)
    logits = logits.reshape(1, Hq, L, N)
    if case.mask == "causal":
        logits[..., np.arange(N) > np.arange(N - L, N)[:, None]] = -np.inf
    elif case.mask == "boolean":
        logits[~np.array(operands.mask)] = -np.inf
    elif operands.mask is not None:
        logits += as_float64(operands.mask)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    if operands.sinks is not None:
        total += np.exp(as_float64(operands.sinks)[:, None, None] - top)
    out: np.ndarray = (weights / total).reshape(Hk, -1, N) @ v[0]
    return out.reshape(1, Hq, L, Dv)


def as_float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def theirs(case: Case, operands: Operands, wheel: Path) -> Measured:
    """MLX's kernels on a case."""

    def as_numpy(array: mx.array | None) -> np.ndarray | None:
        if array is None or array.dtype != mx.bfloat16:
            return None if array is None else np.array(array)
        return np.array(array.view(mx.uint16))

    q, k, v, mask, sinks = (as_numpy(getattr(operands, name)) for name in Operands.__annotations__)
    assert q is not None and k is not None and v is not None  # noqa: PT018
    scale = case.sizes[4] ** -0.5
    call = Call(q, k, v, scale, case.type, case.mask == "causal", mask, sinks)
    out, launches = SdpaVector(wheel, case.gpu)(call)
    array = mx.array(out)
    array = array.view(mx.bfloat16) if case.type == "bfloat" else array
    return measured(case, operands, array, launches, case.least_bytes)


def ours(case: Case, operands: Operands, export: int) -> Measured:
    """Our kernels on a case."""
    sizes: list[dict[str, int]] = []

    def make(**kernel: Any) -> Any:
        """The harness's kernel, which also notes the sizes of its buffers."""
        host = harness.metal_kernel(**kernel)

        def call(inputs: list[mx.array], **launch: Any) -> list[mx.array]:
            written: list[mx.array] = host(inputs=inputs, **launch)
            names = (*host.input_names, *host.output_names)
            buffers = zip(names, [*inputs, *written], strict=True)
            sizes.append({name: array.nbytes for name, array in buffers})
            return written

        return call

    gpu = Gpu(Launcher(make, "metal"), lambda: case.gpu)
    with harness.recorded() as counts:
        attended = gpu.attend(
            operands.q,
            operands.k,
            operands.v,
            scale=case.sizes[4] ** -0.5,
            mask="causal" if case.mask == "causal" else operands.mask,
            sinks=operands.sinks,
            export=export,
        )
    least = case.least_bytes + (case.logit_bytes if export == EXPORT_LOGITS else 0)
    launches = [Launched(*launch) for launch in zip(counts, sizes, strict=True)]
    return measured(case, operands, attended.out, launches, least)


def measured(
    case: Case, operands: Operands, out: mx.array, launches: list[Launched], least: int
) -> Measured:
    """The launches' counts, and the error of their output."""
    Hq, _, L, N, _, _ = case.sizes
    counted = [launch.counts for launch in launches]
    device_bytes = sum(counts.device_bytes for counts in counted)
    return Measured(
        error=float(np.abs(as_float64(out) - reference(case, operands)).max()),
        device_bytes=device_bytes,
        over_least=device_bytes / least,
        distinct_over_least=sum(launch.distinct_bytes for launch in launches) / least,
        barriers=sum(counts.barriers for counts in counted),
        reductions=sum(counts.simd_reductions for counts in counted) / (Hq * L * N),
        shuffles=sum(counts.simd_shuffles for counts in counted) / (Hq * L * N),
        threadgroups=[counts.threadgroups for counts in counted],
    )


def compared(cases: tuple[Case, ...], wheel: Path) -> Iterator[tuple[Case, dict[str, Measured]]]:
    """Each case with both sides, and with ours exporting."""
    for case in cases:
        operands = operands_of(case)
        yield (
            case,
            {
                MLX: theirs(case, operands, wheel),
                OURS: ours(case, operands, EXPORT_NOTHING),
                EXPORTING: ours(case, operands, EXPORT_LOGITS),
            },
        )


COLUMNS: dict[str, Callable[[Measured], str]] = {
    "error": lambda x: f"{x.error:.1e}",
    "device bytes": lambda x: f"{x.device_bytes:,}",
    "over the least": lambda x: f"{x.over_least:.3f}",
    "with caches": lambda x: f"{x.distinct_over_least:.3f}",
    "barriers": lambda x: f"{x.barriers:,}",
    "reductions per key": lambda x: f"{x.reductions:.2f}",
    "shuffles per key": lambda x: f"{x.shuffles:.2f}",
    "threadgroups": lambda x: " + ".join(map(str, x.threadgroups)),
}


def print_row(case: Case, sides: dict[str, Measured]) -> None:
    """Print a case as a row in Markdown."""
    for name, side in sides.items():
        cells = [str(case) if name == MLX else "", name]
        cells += [column(side) for column in COLUMNS.values()]
        print(f"| {' | '.join(cells)} |", flush=True)


def print_head() -> None:
    """Print the head of the table."""
    print(" | ".join(["| case", "", *COLUMNS, ""]).rstrip())
    print("|---" * (2 + len(COLUMNS)) + "|")


def failures(results: list[tuple[Case, dict[str, Measured]]]) -> list[str]:
    """The cases in which our kernels request more bytes than they may."""
    names = []
    for case, sides in results:
        if sides[OURS].device_bytes > sides[MLX].device_bytes:
            names.append(f"{case}: more device bytes than MLX's kernel")
        for name in (OURS, EXPORTING):
            if sides[name].over_least > MOST_OVER_LEAST:
                names.append(f"{case}, {name}: {sides[name].over_least:.3f} of the least bytes")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--case", type=int, nargs="*", help="only these, counted from 0")
    parser.add_argument("--wheel", type=Path, help="an unpacked macOS wheel's mlx folder")
    options = parser.parse_args()
    cases = CASES if options.case is None else tuple(CASES[i] for i in options.case)
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheel = options.wheel or fetch_macos_mlx(Path(folder))
        except NoWheel as error:
            sys.exit(str(error))
        results = []
        if not options.json:
            print_head()
        for case, sides in compared(cases, wheel):
            results.append((case, sides))
            if not options.json:
                print_row(case, sides)
    if options.json:
        listed = [
            {**asdict(case), "sides": {name: asdict(side) for name, side in sides.items()}}
            for case, sides in results
        ]
        print(json.dumps(listed, indent=2))
    if failed := failures(results):
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
