"""What packing loses, by how the keys' frame is fitted and how they are rounded, simulated.

    python tools/key_errors.py TEXT [--samples N] [--tokens N]

Prints how far the model's next-token distributions are from the full cache's (KL divergence in
nats), which tells ways apart by few samples, and the loss of perplexity, which does not. Rounded
with regard to the usual query, a key's channels make up one after the other for what its product
with the direction in which its head's queries have most energy has lost so far (GPTQ, arXiv
2210.17323, does so with a layer's weights). Frames are made of the bundled text; TEXT must be
another one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from real_model import RowsAsStored

import mlx_h2o
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.calibration.scaling_build import frame_passes, frame_tokens, sample_of
from mlx_h2o.calibration.scaling_fit import FrameSample, KeyUse, fitted
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.integration.recorder import LookingCache, Watcher, looked_through
from mlx_h2o.storage.key_scaling import Frame, RowFormat
from mlx_h2o.storage.packed import PackedRows

#: The last is looked at closely.
BITS = (6, 5, 4)
#: Of the tokens, so many are left out where distributions are compared.
STEP = 3


@dataclass(frozen=True)
class SeenLayer:
    """What a layer's frames are made of.

    Attributes:
        keys: `[B, H, T, D]`.
        use: Of the keys.
        energies: E[q q^T] of each head's queries, `[H, D, D]`.
    """

    keys: mx.array
    use: KeyUse
    energies: np.ndarray

    def frame(self, fit: Callable[[Frame, SeenLayer], Frame]) -> Frame:
        """As a way of fitting makes it."""
        return fit(Frame.of(self.keys), self)

    @property
    def sample(self) -> FrameSample:
        """What caches' frames are fitted to."""
        return sample_of([self.keys], [self.use.weights], [self.use.queries])


def as_it_begins(start: Frame, seen: SeenLayer) -> Frame:
    """Each channel's mean and greatest distance."""
    return start


def rows_alike(start: Frame, seen: SeenLayer) -> Frame:
    """Fitted, but that every row weighs the same."""
    return fitted(start, replace(seen.sample, weights=mx.ones_like(seen.sample.weights)))


def scales_alone(start: Frame, seen: SeenLayer) -> Frame:
    """Fitted, but for the centres."""
    return fitted(start, seen.sample, centred=False)


def as_caches_have_it(start: Frame, seen: SeenLayer) -> Frame:
    """Fitted."""
    return fitted(start, seen.sample)


class _Seeing(LookingCache):
    """Finds what a layer's frames are made of."""

    def __init__(self, seen: list[SeenLayer]):
        self.seen = seen

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        B, Hq, T, D = call.q.shape
        rows = np.array(call.q.astype(mx.float32)).reshape(B, keys.shape[1], -1, D)
        energies = np.einsum("bhte,bhtf->hef", rows, rows) / (B * rows.shape[2])
        out, use = KeyUse.attended(call, keys, values)
        self.seen.append(SeenLayer(keys.astype(mx.float32), use, energies))
        return out


class UsualQuery:
    """How keys of one layer are rounded so that the usual query meets them as they were.

    Attributes:
        usual: Where a head's queries have most energy, by its root, in the frame: `[H, D]`.
        rest: Energy in any other direction, `[H]`.
    """

    def __init__(self, energies: np.ndarray, frame: Frame):
        scale = np.array(frame.scale)
        values, vectors = np.linalg.eigh(energies * scale[:, :, None] * scale[:, None])
        self.usual = vectors[..., -1] * np.sqrt(values[:, -1:])
        self.rest = values[:, :-1].mean(axis=-1)

    def of(self, keys: mx.array, bits: int) -> mx.array:
        """Keys `[B, H, L, D]` in the frame, as they come out of packed rows; a group is a row."""
        half = keys.astype(mx.float16)
        packed = PackedRows.of(half, bits, keys.shape[-1])
        rows = np.array(half.astype(mx.float32))
        by, off = (np.array(x[..., 0].astype(mx.float32)) for x in (packed.scales, packed.biases))
        to_come = np.cumsum(self.usual[:, ::-1] ** 2, axis=-1)[:, ::-1]
        parts = self.usual / (self.rest[:, None] + to_come)
        missing, out = np.zeros(rows.shape[:-1]), np.empty_like(rows)
        for i in range(rows.shape[-1]):
            wanted = rows[..., i] + parts[:, i, None] * missing
            level = np.clip(np.rint((wanted - off) / by), 0, 2**bits - 1)
            out[..., i] = level * by + off
            missing += self.usual[:, i, None] * (rows[..., i] - out[..., i])
        return mx.array(out)


@dataclass(frozen=True)
class RoundedFormat(RowFormat):
    """Packed keys in their frame by a rounding."""

    rounding: UsualQuery | None = None

    def keys(self, keys: mx.array) -> mx.array:
        framed = self.rounding.of(self.frame.enter(keys.astype(mx.float32)), self.k_bits)
        return self.frame.leave(framed)


def log_chances(
    model: nn.Module, samples: mx.array, make: Callable[[nn.Module], list[Any]]
) -> list[mx.array]:
    """Each sample's next-token log probabilities `[T / STEP, vocabulary]`."""
    out = []
    for i in range(samples.shape[0]):
        logits = model(samples[i : i + 1, :-1], cache=make(model))[0, ::STEP].astype(mx.float32)
        out.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(out[-1])
    return out


def report(
    name: str, full: Sequence[mx.array], other: Sequence[mx.array], samples: mx.array
) -> None:
    """One line: the divergence and the loss, each with its standard error over the samples."""
    apart, worse = [], []
    for f, o, tokens in zip(full, other, samples, strict=True):
        apart.append((mx.exp(f) * (f - o)).sum(axis=-1).mean().item())
        said = tokens[1:][::STEP, None]
        worse.append(mx.take_along_axis(f - o, said, axis=-1).mean().item())
    error = [float(np.std(of, ddof=1)) / len(of) ** 0.5 for of in (apart, worse)]
    loss = math.exp(np.mean(worse)) - 1
    print(
        f"| {name} | {np.mean(apart):.4f} ± {error[0]:.4f} | {loss:+.1%} ± {error[1]:.1%} |",
        flush=True,
    )


def parser() -> argparse.ArgumentParser:
    """What understands the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    made.add_argument("text", type=Path)
    made.add_argument("--samples", type=int, default=4)
    made.add_argument("--tokens", type=int, default=1024)
    return made


def main() -> None:
    """Print a table."""
    args = parser().parse_args()
    mlx_h2o.install()
    model, tokenizer = mlx_h2o.load("smollm2-135m")
    samples = samples_of(tokenizer.encode(args.text.read_text()), args.samples, args.tokens, None)
    seen: list[SeenLayer] = []
    passes = frame_passes(model, frame_tokens(tokenizer))
    looked_through(model, passes, Watcher(), lambda _: _Seeing(seen))
    begun, fitted_whole = "each channel's mean and greatest distance", "fitted"
    parts = {
        "fitted, every row weighed alike": rows_alike,
        "fitted, the centres left where they are": scales_alone,
    }
    print("| what is packed | divergence | loss |\n|---|---:|---:|")
    full = log_chances(model, samples, make_prompt_cache)

    def told(name: str, formats: Sequence[RowFormat]) -> None:
        """What these formats cost."""
        caches = lambda _: [RowsAsStored(form) for form in formats]  # noqa: E731
        report(name, full, log_chances(model, samples, caches), samples)

    for bits in BITS:
        told(f"values, {bits} bits", [RowFormat(None, bits)] * len(seen))
        closely = bits == BITS[-1]
        fits = {begun: as_it_begins, **(parts if closely else {}), fitted_whole: as_caches_have_it}
        for name, fit in fits.items():
            frames = [layer.frame(fit) for layer in seen]
            told(f"keys, {bits} bits: {name}", [RowFormat(bits, frame=f) for f in frames])
            if closely and fit not in parts.values():
                regarded = [
                    RoundedFormat(bits, frame=f, rounding=UsualQuery(layer.energies, f))
                    for f, layer in zip(frames, seen, strict=True)
                ]
                told(f"keys, {bits} bits: {name}, rounded with regard to the usual query", regarded)


if __name__ == "__main__":
    main()
