"""The bytes that GPU kernels move over packed keys and values, counted on the host harness.

Prints, as Markdown, attention's device bytes per width of the rows, over the fewest possible bytes
and over dense half's, and the bytes of one token's append; then the bytes of a whole decode step
of 6-bit rows by policy, and those that key scaling (`Frame`) adds. Nothing here is a time, and no
GPU has run it.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import mlx.core as mx

from benchmarks.find_harness import harness
from mlx_h2o import make_policy
from mlx_h2o.attention.backends import reference, step_launches
from mlx_h2o.attention.backends.attention_launches import EXPORT_LOGITS, EXPORT_LSE, EXPORT_NOTHING
from mlx_h2o.attention.backends.decoder import HeadPlan
from mlx_h2o.attention.backends.gpu import Gpu
from mlx_h2o.attention.backends.launcher import Launcher
from mlx_h2o.attention.backends.step_launches import SlotArrays, StepPlan
from mlx_h2o.attention.backends.work import Ranges
from mlx_h2o.policies import Policy
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import PackedRows, Rows, dense
from mlx_h2o.slots.remainder import Remainder
from mlx_h2o.slots.slot_store import NARROW

GPU = Gpu(Launcher(harness.metal_kernel, "metal"), lambda: "applegpu_g13g")
# Hq, Hk, D: a layer of a 4B or 8B model.
HEADS = (32, 8, 128)
GROUP = 64
# Bits of keys and of values; 16 is half.
WIDTHS = ((16, 16), (8, 8), (8, 4), (6, 6), (5, 5), (4, 4), (3, 3), (2, 2))


class Moved(NamedTuple):
    """Attention's device bytes, the fewest possible, and its largest error."""

    device_bytes: int
    least: int
    error: float


def stored(rows: mx.array, bits: int) -> Rows:
    return rows if bits == 16 else PackedRows.of(rows, bits, GROUP)


def attended(slots: int, bits: tuple[int, int], export: int) -> Moved:
    """Attention of one query over `slots` slots."""
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
    """Device bytes for one token's new rows, the folded rows and the remainder."""
    _, Hk, D = HEADS
    slots = 64
    heads = tuple(HeadPlan(h * slots, slots, 0, 0, 1, True) for h in range(Hk))
    plan = StepPlan(1000, Hk * slots, 0, 1, heads)
    keys, values = (
        stored(mx.random.normal((1, plan.slots, D)).astype(mx.float16), width) for width in bits
    )
    arrays = SlotArrays(keys, values, mx.zeros((1, plan.slots), NARROW))
    row = mx.random.normal((1, Hk, 1, D)).astype(mx.float16)
    empty = Remainder.empty(1, Hk, D, D)
    with harness.recorded() as launches:
        written, _ = step_launches.overwrite(
            GPU.launcher, plan, arrays, mx.zeros((1, Hk, 1), mx.int32), row, row, empty
        )
        mx.eval(written)
    return launches[0].device_bytes


def stepped(slots: int, policy: Policy, framed: bool) -> list[int]:
    """Device bytes of each launch of a decode step: overwrite, attention, update."""
    Hq, Hk, D = HEADS
    mx.random.seed(0)
    heads = tuple(HeadPlan(h * slots, slots, 0, slots // 4, 100, True) for h in range(Hk))
    plan = StepPlan(2 * slots, Hk * slots, policy.sink, 1, heads)
    keys, values = (
        stored(mx.random.normal((1, plan.slots, D)).astype(mx.float16), 6) for _ in range(2)
    )
    arrays = SlotArrays(keys, values, mx.tile(mx.arange(slots, dtype=NARROW), (1, Hk)))
    kernel_policy = policy.kernel_policy()
    assert kernel_policy is not None
    ranks = kernel_policy.priority in ("distance", "salience")
    scored = policy.needs_attention
    if scored:
        arrays.scores = mx.zeros((1, plan.slots))
    frame = Frame(mx.zeros((Hk, D)), mx.ones((Hk, D))) if framed else None
    victims = mx.zeros((1, Hk, 1), mx.int32)
    q, row = (mx.random.normal((1, H, 1, D)).astype(mx.float16) for H in (Hq, Hk))
    empty = Remainder.empty(1, Hk, D, D).fold(*(mx.ones((1, Hk, 20, D)) for _ in range(2)))
    with harness.recorded() as launches:
        written, remainder = step_launches.overwrite(
            GPU.launcher, plan, arrays, victims, row, row, empty, frame
        )
        assert remainder is not None
        means = remainder.mean_key if ranks else None
        attended = GPU.attend(
            q,
            arrays.keys,
            arrays.values,
            scale=D**-0.5,
            remainder=remainder,
            frame_scale=frame.scale if frame else None,
            means=means,
            ranges=Ranges(tuple(h.start for h in heads), (slots,) * Hk),
            export=EXPORT_LOGITS if scored else EXPORT_LSE,
            after=written,
        )
        args = kernel_policy, attended, victims, written, means
        mx.eval(step_launches.update(GPU.launcher, plan, arrays, *args))
    return [counts.device_bytes for counts in launches]


def print_steps(slots: int) -> None:
    """Print the table of whole steps."""
    print("\n| slots, 6/6 bits | policy | overwrite | attention | update | a step | in a frame |")
    print("|---" * 7 + "|")
    for name in ("streaming", "h2o", "distinct", "salient"):
        plain, framed = (stepped(slots, make_policy(name), frame) for frame in (False, True))
        cells = [f"{slots}", name, f"{plain[0]:,}", f"{sum(plain[1:-1]):,}", f"{plain[-1]:,}"]
        more = sum(framed) / sum(plain) - 1
        print(f"| {' | '.join(cells)} | {sum(plain):,} | + {more:.2%} |", flush=True)


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
    for slots in options.slots:
        print_steps(slots)


if __name__ == "__main__":
    main()
