"""Does a compressed prompt lose less when a gradient moves its kept rows?

    python -m research.distilling TEXT [--model builtin:recall-4m] [--parts 16 32] [--steps 40]

As `research.refitting`: a prompt is read twice and cut down (`mlx_h2o compress`) to the same bytes,
with fitted values. Then its kept rows move (`model_caches/distillation.py`), or not. Differences
are paired by prompt; the processor time is that of the steps and of writing the lessons.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import mlx.core as mx

from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.evaluate.equal_bytes import caches_in_16_bits
from mlx_h2o.integration.layer_probe import layer_kinds
from mlx_h2o.integration.stock_caches import stock_caches
from mlx_h2o.model_caches import distillation
from mlx_h2o.model_caches.compress import compress_into
from mlx_h2o.model_caches.make import plain_bytes
from research.mending import CHUNK, Answers, begun, divergence
from research.mending import parser as trial_parser
from research.refitting import ROOM


def row(full: Answers, got: Answers, unmoved: Answers, seconds: float) -> str:
    """The figures of one cache: divergence, difference from the rows as they were, facts, time."""
    far, before = (divergence(full.logits, one.logits) for one in (got, unmoved))
    paired = [a - b for a, b in zip(far, before, strict=True)]
    errors = [statistics.stdev(of) / len(of) ** 0.5 for of in (far, paired)]
    known = sum(a and b for a, b in zip(got.known, full.known, strict=True))
    apart = f"{statistics.fmean(paired):+.4f} ± {errors[1]:.4f}" if got is not unmoved else "-"
    return (
        f"{statistics.fmean(far):.4f} ± {errors[0]:.4f} | {apart} | {known} of {sum(full.known)} | "
        f"{seconds / len(far):.0f}"
    )


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = trial_parser()
    made.add_argument("--steps", type=int, nargs="+", default=[40])
    return made


def main() -> None:
    """Parse and run; the table is Markdown."""
    args = parser().parse_args()
    trial = begun(args)
    model, tokenizer = trial.stage.model, trial.stage.tokenizer
    full = trial.answered(trial.chunked(lambda _: stock_caches(model)), together=1)
    plain = sum(map(plain_bytes, layer_kinds(model))) * args.tokens
    print(
        "| model | bytes | steps | divergence, nats | over no step | facts | s a prompt | held |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|",
        flush=True,
    )
    distil = distillation.distil
    spent = 0.0

    def timed(*arguments: Any) -> None:
        nonlocal spent
        start = time.process_time()
        distil(*arguments)
        spent += time.process_time() - start

    distillation.distil = timed
    for part in args.parts:
        unmoved = None
        for steps in (0, *args.steps):
            spent = 0.0

            def after(prompts: mx.array, part: int = part, steps: int = steps) -> list[Any]:
                settings = ModelSettings.of(1, policy="salient")
                empty = caches_in_16_bits(model, settings, args.tokens // part, args.tokens)
                of = model, tokenizer, prompts
                return compress_into(empty, *of, room=ROOM, chunk=CHUNK, steps=steps)

            got = trial.answered(after, together=1)
            unmoved = unmoved or got
            figures = row(full, got, unmoved, spent)
            held = f"{got.nbytes / plain:.3f}"
            print(f"| {args.model} | 1/{part} | {steps} | {figures} | {held} |", flush=True)


if __name__ == "__main__":
    main()
