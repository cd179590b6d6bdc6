"""The cost of packed rows, nothing evicted, to a real model's perplexity.

    python -m research.real_model rows TEXT

TEXT must not be the package's calibration text, from which key scaling (`Frame`) is made.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

import mlx_h2o
from mlx_h2o.budgets.profile_store import found_profile
from mlx_h2o.calibration.row_format import RowFormat
from mlx_h2o.calibration.scaling_build import found_frames
from mlx_h2o.evaluate.measures.perplexity import samples_of
from mlx_h2o.hosts.layer_probe import identity_by_kinds, layer_kinds
from mlx_h2o.slots.key_scaling import Frame


class RowsAsStored(KVCache):
    """A full cache whose rows pass through a row format."""

    def __init__(self, row_format: RowFormat):
        super().__init__()
        self.row_format = row_format

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(self.row_format.keys(keys), self.row_format.values(values))


def report(name: str, nll: Sequence[float], full: Sequence[float]) -> None:
    """Print one line: perplexity and loss."""
    perplexity = math.exp(statistics.fmean(nll))
    print(f"| {name} | {perplexity:.3f} | {lost(nll, full)} |", flush=True)


def lost(nll: Sequence[float], beside: Sequence[float]) -> str:
    """Loss in perplexity, and its standard error over the samples, which are paired."""
    worse = [a - b for a, b in zip(nll, beside, strict=True)]
    return f"{math.expm1(statistics.fmean(worse)):+.2%} ± {standard_error(worse):.2%}"


def standard_error(of_samples: Sequence[float]) -> float:
    """The standard error of the mean; NaN for one sample."""
    if len(of_samples) < 2:
        return math.nan
    return float(statistics.stdev(of_samples) / len(of_samples) ** 0.5)


def shipped_frames(model: nn.Module, context: int) -> list[Frame]:
    """The key scaling that the model's caches get for `context` tokens."""
    kinds = layer_kinds(model)
    identity = identity_by_kinds(model, kinds)
    frames = found_frames(identity, found_profile(model, identity))
    if not frames:
        sys.exit("The model has no frames: make a profile first (mlx_h2o calibrate).")
    of_layers = frames[min((c for c in frames if c >= context), default=max(frames))]
    return [Frame(mx.array(centre), mx.array(scale)) for centre, scale in of_layers]


def rows(model: nn.Module, samples: mx.array) -> None:
    """Measure every format, one pass over the samples."""
    frames = shipped_frames(model, samples.shape[1])
    formats: dict[str, list[RowFormat]] = {}
    for bits in (8, 4):
        formats[f"mlx-lm's, {bits} bits"] = [RowFormat(bits, bits, by_range=False)] * len(frames)
    for bits, group in ((8, 64), (6, 64), (6, 32), (5, 64), (5, 32), (4, 64), (4, 32)):
        name = f"in the frame, {bits} bits, groups of {group}"
        formats[name] = [RowFormat(bits, bits, group, frame=frame) for frame in frames]
    full = nats(model, samples, make_prompt_cache)
    print("| what | perplexity | loss |\n|---|---:|---:|")
    report("full cache", full, full)
    for name, of_layers in formats.items():
        nll = nats(model, samples, lambda _, of=of_layers: [RowsAsStored(f) for f in of])
        report(name, nll, full)


def nats(
    model: nn.Module, samples: mx.array, make: Callable[[nn.Module], list[Any]], first: int = 0
) -> list[float]:
    """Nats per token of each sample, over the tokens after `first`."""
    losses: list[float] = []
    for i in range(samples.shape[0]):
        tokens = samples[i : i + 1]
        logits = model(tokens[:, :-1], cache=make(model))[:, first:].astype(mx.float32)
        losses.append(nn.losses.cross_entropy(logits, tokens[:, first + 1 :]).mean().item())
    return losses


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("what", choices=("rows",))
    made.add_argument("text", type=Path)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--samples", type=int, default=4)
    made.add_argument("--tokens", type=int, default=1024)
    return made


def main() -> None:
    """Parse and run; tables are Markdown."""
    args = parser().parse_args()
    mlx_h2o.install()
    model, tokenizer = mlx_h2o.load(args.model)
    text = tokenizer.encode(args.text.read_text())
    rows(model, samples_of(text, args.samples, args.tokens, None))


if __name__ == "__main__":
    main()
