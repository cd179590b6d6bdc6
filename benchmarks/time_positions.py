"""The cost of positions without gaps to a decode step on the CPU, as a Markdown table.

    python -m benchmarks.time_positions

The embedded model, one token at a time past its budget, without a remainder; the processor's time,
so that other processes count little; the better of two turns.
"""

from __future__ import annotations

import time

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o import _ext, make_prompt_cache
from mlx_h2o.loading.load import load

BEFORE, STEPS, ROUNDS = 20, 100, 2


def milliseconds(model: nn.Module, slots: int, positions: str) -> float:
    """Milliseconds of processor time for each token."""
    cache = make_prompt_cache(
        model, max_size=slots, budgets="uniform", remainder=False, positions=positions
    )
    tokens = mx.random.randint(0, 4096, (1, slots + 50), key=mx.random.key(0))
    mx.eval(model(tokens, cache=cache))
    begun = 0.0
    for step in range(BEFORE + STEPS):
        if step == BEFORE:
            begun = time.process_time()
        mx.eval(model(tokens[:, step : step + 1], cache=cache))
    return 1000 * (time.process_time() - begun) / STEPS


def main() -> None:
    """Print the table."""
    _ext.set_threads(1)
    model, _ = load("builtin:recall-4m")
    print("| slots | absolute, ms | rolling, ms |\n|---:|---:|---:|")
    for slots in (256, 1024, 4096):
        kinds = ("absolute", "rolling")
        times = [min(milliseconds(model, slots, k) for _ in range(ROUNDS)) for k in kinds]
        print(f"| {slots} | {times[0]:.1f} | {times[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
