"""One conversation of very many decode steps: flat memory, no slower steps, no step lost.

    python -m benchmarks.million_steps --steps 1000000

Far beyond the model's trained context the text may be nonsense; the run must not break.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time

import mlx.core as mx
from mlx_lm.generate import generate_step

import mlx_h2o

#: The number of parts of the run that are compared.
PARTS = 10


def resident_mb() -> float:
    """Resident memory of this process."""
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--model", default="builtin:recall-4m")
    parser.add_argument("--max-kv-size", type=int, default=256)
    args = parser.parse_args()
    model, tokenizer = mlx_h2o.load(args.model)
    cache = mlx_h2o.make_prompt_cache(model, args.max_kv_size)
    prompt = mx.array(tokenizer.encode("The house stood on the cliff, and"))
    steps = generate_step(prompt, model, max_tokens=-1, prompt_cache=cache)
    print(f"{args.steps:,} steps of {args.model}, {args.max_kv_size} slots")
    # Processor time, unlike the clock's, hardly depends on what else runs on the machine.
    print("| steps | processor ms | ms per step | resident MB | KV bytes | logical offset |")
    print("|---:|---:|---:|---:|---:|---:|")
    done, milliseconds, resident, sizes = 0, [], [], []
    for part in range(1, PARTS + 1):
        start, busy, first = time.perf_counter(), time.process_time(), done
        while done < part * args.steps // PARTS:
            next(steps)
            done += 1
        clock = 1e3 * (time.perf_counter() - start) / (done - first)
        milliseconds.append(1e3 * (time.process_time() - busy) / (done - first))
        resident.append(resident_mb())
        sizes.append(sum(entry.nbytes for entry in cache))
        # One token of look-ahead.
        offset = {entry.offset for entry in cache}
        assert offset == {prompt.size + done}, offset
        print(
            f"| {done:,} | {milliseconds[-1]:.3f} | {clock:.3f} | {resident[-1]:.0f} | "
            f"{sizes[-1]:,} | {offset.pop():,} |",
            flush=True,
        )
    late = statistics.median(milliseconds[-3:]) / statistics.median(milliseconds[1:4])
    print(f"\nThe last three parts take {late:.2f} times the processor time of the 2nd to 4th.")
    print(f"Resident memory grew by {resident[-1] - resident[1]:.1f} MB after the second part.")


if __name__ == "__main__":
    main()
