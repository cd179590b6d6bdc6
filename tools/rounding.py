"""What it would save to round packed keys with regard to the queries that meet them, simulated.

    python tools/rounding.py TEXT [--samples N] [--tokens N]

A key is rounded channel by channel, and the channels still to come make up for what its product
with the head's queries has lost so far (GPTQ, arXiv 2210.17323, does so with a layer's weights).
What is stored keeps its form: only the choice of levels is another. Queries are seen over the
bundled text; TEXT must be another one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from real_model import RowsAsStored, calibration_passes, nats, report, shipped_frames

import mlx_h2o
from mlx_h2o.attention_call import AttentionCall
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.frame import Frame, RowFormat
from mlx_h2o.packed import PackedRows
from mlx_h2o.watching import LookingCache, Watcher, full_attention, looked_through

BITS = (5, 4)
PASSES, PASS_TOKENS = 3, 1024
#: Of the mean energy of a head's queries in a channel, so much is taken to be in every one: what a
#: short text shows none of in some direction may still come.
EVERYWHERE = 0.01


class _Energies(LookingCache):
    """Finds E[q q^T] of a layer's queries in its frame, `[H, D, D]`, of the heads of each group."""

    def __init__(self, frame: Frame, found: list[np.ndarray]):
        self.frame, self.found = frame, found

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        B, Hq, T, D = call.q.shape
        H = keys.shape[1]
        rows = np.array(self.frame.enter_queries(call.q.astype(mx.float32)))
        rows = rows.reshape(B, H, Hq // H, T, D)
        self.found.append(np.einsum("bhgtd,bhgte->hde", rows, rows) / (B * Hq // H * T))
        return full_attention(call.q, keys, values, call.scale, call.sinks, call.softcap)


class Rounding:
    """How keys of one layer are rounded, channel by channel.

    Attributes:
        orders: Channels, those with most energy of the queries first, `[H, D]`.
        parts: What a channel's error asks of each channel after it, `[H, D, D]`, in this order.
    """

    def __init__(self, energies: np.ndarray):
        orders, parts = [], []
        for energy in energies:
            order = np.argsort(-np.diag(energy))
            ordered = energy[np.ix_(order, order)]
            upper = np.linalg.cholesky(np.linalg.inv(ordered)).T
            orders.append(order)
            parts.append(upper / np.diag(upper)[:, None])
        self.orders, self.parts = np.stack(orders), np.stack(parts)

    def of(self, keys: mx.array, bits: int) -> mx.array:
        """Keys `[B, H, L, D]` in the frame, as they come out of packed rows; a group is a row."""
        half = keys.astype(mx.float16)
        packed = PackedRows.of(half, bits, keys.shape[-1])
        rows = np.array(half.astype(mx.float32))
        by, off = (np.array(x[..., 0].astype(mx.float32)) for x in (packed.scales, packed.biases))
        top = 2**bits - 1
        out = np.empty_like(rows)
        for h, (order, parts) in enumerate(zip(self.orders, self.parts, strict=True)):
            wanted = rows[:, h][..., order]
            for i, channel in enumerate(order):
                level = np.clip(np.rint((wanted[..., i] - off[:, h]) / by[:, h]), 0, top)
                out[:, h, :, channel] = level * by[:, h] + off[:, h]
                error = wanted[..., i] - out[:, h, :, channel]
                wanted[..., i + 1 :] -= error[..., None] * parts[i, i + 1 :]
        return mx.array(out)


@dataclass(frozen=True)
class RoundedFormat(RowFormat):
    """Packed rows, keys in their frame by a rounding."""

    rounding: Rounding | None = None

    def keys(self, keys: mx.array) -> mx.array:
        framed = self.rounding.of(self.frame.enter(keys.astype(mx.float32)), self.k_bits)
        return self.frame.leave(framed)


def energies_of(model: nn.Module, passes: mx.array, frames: Sequence[Frame]) -> list[np.ndarray]:
    """Each layer's E[q q^T] in its frame."""
    found: list[np.ndarray] = []
    looked_through(model, passes, Watcher(), lambda i: _Energies(frames[i], found))
    return found


def by_all(energy: np.ndarray) -> np.ndarray:
    """`[H, D, D]`, and a little everywhere."""
    D = energy.shape[-1]
    mean = np.trace(energy, axis1=1, axis2=2) / D
    return energy + EVERYWHERE * mean[:, None, None] * np.eye(D)


def by_one(energy: np.ndarray) -> np.ndarray:
    """Only the direction with most energy is told apart: D numbers a head."""
    D = energy.shape[-1]
    values, vectors = np.linalg.eigh(energy)
    usual = vectors[..., -1] * np.sqrt(values[:, -1:])
    rest = values[:, :-1].mean(axis=-1)
    return usual[:, :, None] * usual[:, None] + rest[:, None, None] * np.eye(D)


def parser() -> argparse.ArgumentParser:
    """What understands the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    made.add_argument("text", type=Path)
    made.add_argument("--samples", type=int, default=8)
    made.add_argument("--tokens", type=int, default=1024)
    return made


def main() -> None:
    """Print a table."""
    args = parser().parse_args()
    mlx_h2o.install()
    model, tokenizer = mlx_h2o.load("smollm2-135m")
    text = tokenizer.encode(args.text.read_text())
    samples = samples_of(text, args.samples, args.tokens, None)
    frames = shipped_frames(model, args.tokens)
    energies = energies_of(model, calibration_passes(tokenizer, PASSES, PASS_TOKENS), frames)
    ways: dict[str, Callable[[np.ndarray], np.ndarray] | None] = {
        "to the nearest level": None,
        "with regard to the usual query": by_one,
        "with regard to all queries": by_all,
    }
    print("| keys are rounded | perplexity | loss |\n|---|---:|---:|")
    full = nats(model, samples, make_prompt_cache)
    report("not at all", full, full)
    for bits in BITS:
        for way, regarded in ways.items():
            formats = [
                RoundedFormat(bits, bits, frame=frame, rounding=Rounding(regarded(energy)))
                if regarded
                else RowFormat(bits, bits, frame=frame)
                for frame, energy in zip(frames, energies, strict=True)
            ]
            nll = nats(model, samples, lambda _, of=formats: [RowsAsStored(f) for f in of])
            report(f"{way}, {bits} bits", nll, full)


if __name__ == "__main__":
    main()
