#!/usr/bin/env python3
"""What the GPU kernels move over packed keys and values, counted on the host harness.

Prints, as Markdown, attention's device bytes per width of the rows, over the least that it can cost
and over dense half's, and what one token's append moves. Nothing here is a time, and no GPU has run
it.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import find_harness  # noqa: F401
import harness
import mlx.core as mx

from mlx_h2o import Remainder
from mlx_h2o.backends import reference, step_launches
from mlx_h2o.backends.attention_launches import EXPORT_LOGITS, EXPORT_NOTHING
from mlx_h2o.backends.decoder import HeadPlan
from mlx_h2o.backends.gpu import Gpu
from mlx_h2o.backends.launcher import Launcher
from mlx_h2o.backends.step_launches import SlotArrays, StepPlan
from mlx_h2o.packed import PackedRows, Rows, dense

GPU = Gpu(Launcher(harness.metal_kernel, "metal"), lambda: "applegpu_g13g")
# Hq, Hk, D: a 4B or 8B model's layer.
HEADS = (32, 8, 128)
GROUP = 64
# Of keys and of values; 16 is half.
WIDTHS = ((16, 16), (8, 8), (8, 4), (6, 6), (5, 5), (4, 4), (3, 3), (2, 2))


class Moved(NamedTuple):
    """What attention did: bytes moved, the least there are to move, and its largest error."""

    device_bytes: int
    least: int
    error: float


def stored(rows: mx.array, bits: int) -> Rows:
    return rows if bits == 16 else PackedRows.of(rows, bits, GROUP)


def attended(slots: int, bits: tuple[int, int], export: int) -> Moved:
    """One query over so many slots."""
    Hq, Hk, D = HEADS
    mx.random.seed(0)
    q, k, v = (
        mx.random.normal(shape).astype(mx.float16)
        for shape in ((1, Hq, 1, D), (1, Hk, slots, D), (1, Hk, slots, D))
    )
    keys, values = stored(k, bits[0]), stored(v, bits[1])
    with harness.recorded() as launches:
        out = GPU.attend(q, keys, values, scale=D**-0.5, export=export).out
    expected, _, _ = reference.attention_with_scores(
        q.astype(mx.float32), dense(keys), dense(values), scale=D**-0.5
    )
    logits = 4 * Hq * (slots + 1) if export == EXPORT_LOGITS else 0
    return Moved(
        sum(counts.device_bytes for counts in launches),
        keys.nbytes + values.nbytes + 2 * q.nbytes + logits,
        float(mx.abs(out.astype(mx.float32) - expected).max()),
    )


def appended(bits: tuple[int, int]) -> int:
    """Device bytes of one token's new rows, the folded ones and the remainder."""
    _, Hk, D = HEADS
    slots = 64
    heads = tuple(HeadPlan(h * slots, slots, 0, 0, 1, True) for h in range(Hk))
    plan = StepPlan(1000, Hk * slots, 0, 1, heads)
    keys, values = (
        stored(mx.random.normal((1, plan.slots, D)).astype(mx.float16), width) for width in bits
    )
    held = SlotArrays(keys, values, mx.zeros((1, plan.slots), mx.int32))
    row = mx.random.normal((1, Hk, 1, D)).astype(mx.float16)
    empty = Remainder.empty(1, Hk, D, D)
    with harness.recorded() as launches:
        written, _ = step_launches.overwrite(
            GPU.launcher, plan, held, mx.zeros((1, Hk, 1), mx.int32), row, row, empty
        )
        mx.eval(written)
    return launches[0].device_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="*", default=[1024, 4096])
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    print("| slots | keys/values | device bytes | over the least | exporting | of half's | error |")
    print("|---" * 7 + "|")
    for slots in options.slots:
        half = attended(slots, (16, 16), EXPORT_NOTHING)
        for bits in WIDTHS:
            plain, exporting = (attended(slots, bits, e) for e in (EXPORT_NOTHING, EXPORT_LOGITS))
            cells = [
                f"{slots}",
                f"{bits[0]}/{bits[1]}",
                f"{plain.device_bytes:,}",
                f"{plain.device_bytes / plain.least:.3f}",
                f"{exporting.device_bytes / exporting.least:.3f}",
                f"{plain.device_bytes / half.device_bytes:.3f}",
                f"{plain.error:.1e}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    moved = ", ".join(f"{k}/{v} bits {appended((k, v)):,}" for k, v in WIDTHS)
    print(f"\nBytes of an append: {moved}.")


if __name__ == "__main__":
    main()
