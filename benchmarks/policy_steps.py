"""The cost of each policy's choice in a fused decode step on the CPU, as a Markdown table.

    python -m benchmarks.policy_steps [--rounds N] [--heads HQ HK] [--width D]

One thread; processor time instead of the clock's, so that other processes count little; arms in
turns; a layer small enough to stay in the caches, so that memory hides nothing.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

import mlx.core as mx

from benchmarks.layers import full_layer
from benchmarks.measuring import Arm, in_turns, timed
from mlx_h2o import _ext, make_policy
from mlx_h2o.slots.packed import Packing

POLICIES = ("streaming", "h2o", "distinct", "salient")
#: A second arm of the same policy, which shows the random error of a ratio.
TWICE = "distinct again"
SLOTS, BITS = (512, 2048), (None, 6)
RATIOS = (("salient", "distinct"), (TWICE, "distinct"), ("salient", "h2o"))


def arm(policy: str, slots: int, bits: int | None, heads: tuple[int, int], width: int) -> Arm:
    """A step, with a choice of victim, of a layer whose every slot is in use."""
    Hq, Hk = heads
    keys, values = (mx.random.normal((1, Hk * slots, width)) for _ in range(2))
    q = mx.random.normal((1, Hq, 1, width))
    mx.eval(q)
    step = full_layer(
        make_policy(policy), keys, values, [slots] * Hk, q, packing=Packing(bits, bits)
    )
    return timed(lambda: mx.eval(step()), clock=time.process_time)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--heads", type=int, nargs=2, default=(9, 3), metavar=("HQ", "HK"))
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    _ext.set_threads(1)
    names = [*POLICIES, TWICE]
    print(
        f"| slots | rows | {' | '.join(names)} | {' | '.join(' over '.join(r) for r in RATIOS)} |"
    )
    print("|---" * (2 + len(names) + len(RATIOS)) + "|")
    for slots, bits in product(SLOTS, BITS):
        shape = (slots, bits, tuple(args.heads), args.width)
        samples = in_turns({name: arm(name.split()[0], *shape) for name in names}, args.rounds)
        times = [f"{1e6 * samples.median(name):.0f} us" for name in names]
        ratios = [f"{samples.ratio(*r):.3f} ({samples.quiet_ratio(*r):.3f})" for r in RATIOS]
        rows = "float32" if bits is None else f"{bits} bits"
        print(f"| {slots} | {rows} | {' | '.join(times + ratios)} |", flush=True)


if __name__ == "__main__":
    main()
