"""Record what Python would launch on a GPU, so that Swift's launches can be held to the same.

tools/record_launches.py            write swift/Tests/MLXH2OTests/Fixtures/launches.json
tools/record_launches.py --check    fail unless it is up to date
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_h2o.backends.attention_launches import attend
from mlx_h2o.backends.launcher import Launcher
from mlx_h2o.packed import PackedRows, Rows

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "swift/Tests/MLXH2OTests/Fixtures/launches.json"


def calls() -> Iterator[dict[str, Any]]:
    """Sizes, masks and GPUs that between them take every branch of the rules."""
    shapes = itertools.product(
        ((1, 4, 4), (2, 8, 2), (1, 32, 1)),
        (1, 3, 8),
        ((64, 64), (128, 128), (192, 128), (576, 512)),
        (7, 1500, 9000),
    )
    for i, ((B, Hq, Hk), L, (D, Dv), N) in enumerate(shapes):
        yield {
            "batch": B,
            "query_heads": Hq,
            "kv_heads": Hk,
            "queries": L,
            "keys": max(N, L),
            "key_width": D,
            "value_width": Dv,
            "dtype": ("float16", "bfloat16", "float32")[i % 3],
            "mask": ("none", "causal", "bool", "row")[i % 4],
            "sinks": i % 5 == 0,
            "k_bits": (0, 0, 4, 8)[i % 4] if D < 576 else 0,
            "v_bits": (0, 3, 4, 0)[i % 4] if D < 576 else 0,
            "architecture": "applegpu_g13" + "psgd"[i // 3 % 4],
        }


def described(
    name: str, header: str, source: str, options: dict[str, Any], launch: dict[str, Any]
) -> dict[str, Any]:
    """A launch as JSON: texts and integers by their digests.

    Args:
        name: Of the kernel.
        header: What goes before it.
        source: Its body.
        options: The names that `mx.fast.metal_kernel` got.
        launch: The arguments that the kernel got.
    """
    names = options["input_names"]
    params = launch["inputs"][names.index("plan" if "plan" in names else "params")]
    dtypes = launch["output_dtypes"]
    return {
        "name": name,
        "inputs": names,
        "outputs": options["output_names"],
        "shapes": [list(shape) for shape in launch["output_shapes"]],
        "dtypes": [str(dtype).removeprefix("mlx.core.") for dtype in dtypes],
        "template": [
            [key, str(value).removeprefix("mlx.core.")] for key, value in launch["template"]
        ],
        "grid": list(launch["grid"]),
        "threads": launch["threadgroup"][0],
        "params": hashlib.sha256(str(params.tolist()).encode()).hexdigest(),
        "text": hashlib.sha256(f"{header}\0{source}".encode()).hexdigest(),
    }


def launches(call: dict[str, Any]) -> list[dict[str, Any]]:
    """What is launched for a call."""
    found: list[dict[str, Any]] = []

    def make(name: str, header: str, source: str, **options: Any) -> Any:
        def kernel(**launch: Any) -> list[mx.array]:
            found.append(described(name, header, source, options, launch))
            outputs = zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in outputs]

        return kernel

    B, Hq, L, N = call["batch"], call["query_heads"], call["queries"], call["keys"]
    dtype = getattr(mx, call["dtype"])
    mask: mx.array | str | None = {
        "none": None,
        "causal": "causal",
        "bool": mx.zeros((B, 1, L, N), mx.bool_),
        "row": mx.zeros((L, 1), dtype),
    }[call["mask"]]

    def rows(heads: int, width: int, bits: int) -> Rows:
        zeros = mx.zeros((B, heads, N, width), dtype)
        return PackedRows.of(zeros, bits, 32) if bits else zeros

    attend(
        Launcher(make, "metal"),
        mx.zeros((B, Hq, L, call["key_width"]), dtype),
        rows(call["kv_heads"], call["key_width"], call["k_bits"]),
        rows(call["kv_heads"], call["value_width"], call["v_bits"]),
        scale=0.125,
        mask=mask,
        sinks=mx.zeros(Hq) if call["sinks"] else None,
        architecture=call["architecture"],
    )
    return found


def recorded() -> str:
    """The fixture."""
    lines = [
        json.dumps({"call": call, "launches": launches(call)}, separators=(",", ":"))
        for call in calls()
    ]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        if not TARGET.exists() or TARGET.read_text() != recorded():
            sys.exit(f"{TARGET.relative_to(ROOT)} is out of date: run {Path(__file__)}.")
    else:
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        TARGET.write_text(recorded())


if __name__ == "__main__":
    main()
