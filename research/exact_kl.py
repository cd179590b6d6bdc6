"""Exact calibration: the KL divergence caused by limiting one head alone.

    python -m research.exact_kl --out FILE [--model MODEL] [--text FILE] [--tokens 2048]

One pass over a text for each KV head and number of slots, with that head limited to sinks and a
window, and a remainder. The loss is the change of the model's next-token distribution. Where a
calibration by output errors (`calibration/calibrate.py`) orders heads differently, this is right.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o._progress import Progress
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.allocation import falling
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.calibration.calibrate import GRID
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.layer_probe import identity_by_kinds
from mlx_h2o.hosts.recorder import (
    LookingCache,
    Watcher,
    looked_through,
    profiled_kinds,
    trained_context,
    windows_of,
)
from mlx_h2o.loading.load import CALIBRATION_TEXT, EMBEDDED_MODEL, load
from mlx_h2o.slots.remainder import SATURATION

SINK = 4
# Tokens of one pass; longer texts are cut into several.
WINDOW = 1024
# Queries processed at a time: bounds the [G, block, T] logits to less than a prefill needs.
QUERY_BLOCK = 128


class PrefixStatistics:
    """Count, mean and variance of the rows from SINK to any position, for one KV head.

    Args:
        keys: `[T, D]`.
        values: `[T, Dv]`.
    """

    def __init__(self, keys: mx.array, values: mx.array):
        self.keys, self.values = keys.astype(mx.float32), values.astype(mx.float32)
        # Centred, so that the variance is not a small difference of large numbers.
        self.centre = self.keys.mean(axis=0)
        centred = self.keys - self.centre
        self._key_sums = prefix_sums(centred)
        self._square_sums = prefix_sums(mx.square(centred))
        self._value_sums = prefix_sums(self.values)

    def upto(self, ends: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Statistics of rows SINK to end - 1, for each of `ends` `[n]`.

        Returns:
            count `[n, 1]`, mean key `[n, D]`, key variance `[n, D]`, mean value `[n, Dv]`.
        """
        ends = mx.maximum(ends, SINK)
        count = (ends - SINK).astype(mx.float32)[:, None]
        share = 1 / mx.maximum(count, 1)
        key, square, value = (
            (sums[ends] - sums[SINK]) * share
            for sums in (self._key_sums, self._square_sums, self._value_sums)
        )
        return count, key + self.centre, mx.maximum(square - mx.square(key), 0), value


def prefix_sums(x: mx.array) -> mx.array:
    """Sums of the first i rows, `[T + 1, D]`."""
    return mx.concatenate([mx.zeros((1, x.shape[1])), mx.cumsum(x, axis=0)])


def limited_attention(
    q: mx.array, rows: PrefixStatistics, start: int, scale: float, budgets: Sequence[int]
) -> Iterator[mx.array]:
    """Attention of one KV head's queries: in full, then with b slots and the remainder.

    Args:
        q: Queries `[G, n, D]` of positions start to start + n - 1.
        rows: The head's keys and values.
        start: Position of the first query.
        scale: Factor on q.k.
        budgets: The numbers of slots b to try.

    Yields:
        `[G, n, Dv]` float32: full attention, then one per b.
    """
    T = start + q.shape[1]
    keys, values = rows.keys[:T], rows.values[:T]
    scaled = q.astype(mx.float32) * scale
    at, of = mx.arange(start, T)[:, None], mx.arange(T)
    logits = mx.where(of <= at, scaled @ keys.T, -mx.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = mx.exp(logits - top)
    full = (weights @ values) / weights.sum(axis=-1, keepdims=True)
    yield full
    for budget in budgets:
        if budget >= T:  # no row of this block is evicted yet
            yield full
            continue
        # Sinks, then the rows that are still in the window of any query of the block.
        oldest = max(SINK, start - (budget - SINK) + 1)
        window = weights[..., oldest:] * (of[oldest:] > at - (budget - SINK))
        visible = mx.concatenate([weights[..., :SINK], window], axis=-1)
        in_view = mx.concatenate([values[:SINK], values[oldest:]])
        count, mean, variance, value = rows.upto(at[:, 0] + 1 - (budget - SINK))
        x = 0.5 * (mx.square(scaled) * variance).sum(axis=-1, keepdims=True)
        r = (scaled * mean).sum(axis=-1, keepdims=True) + x * mx.rsqrt(1 + x / SATURATION)
        # The shift keeps both exponentials finite when the remainder outweighs every kept slot.
        shift = mx.maximum(r + mx.log(count) - top, 0)
        column = mx.exp(r + mx.log(count) - top - shift)
        visible = visible * mx.exp(-shift)
        total = visible.sum(axis=-1, keepdims=True) + column
        yield (visible @ in_view + column * value) / total


class _Limiting(LookingCache):
    """A looking cache that limits one head of its layer."""

    def __init__(self, limited: tuple[int, int] | None):
        self.limited = limited

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        q = call.q
        out = mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=call.scale, mask=call.mask, sinks=call.sinks
        )
        if self.limited is None:
            return out
        head, budget = self.limited
        group = q.shape[1] // keys.shape[1]
        first, last = head * group, (head + 1) * group
        rows = PrefixStatistics(keys[0, head], values[0, head])
        blocks = []
        for start in range(0, q.shape[2], QUERY_BLOCK):
            queries = q[0, first:last, start : start + QUERY_BLOCK]
            _, limited = limited_attention(queries, rows, start, call.scale, [budget])
            blocks.append(limited)
        limited = mx.concatenate(blocks, axis=1)[None].astype(out.dtype)
        return mx.concatenate([out[:, :first], limited, out[:, last:]], axis=1)


def calibrate_exactly(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    length: int = WINDOW,
    details: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure each head by the KL divergence caused by limiting it alone to a window.

    Args:
        model: An mlx-lm model.
        tokens: A text; some 3000 tokens suffice.
        length: The most tokens of one pass; never more than the model's trained context.
        details: Entries to note in the profile.
        progress: Called after each head and number of slots.

    Raises:
        ValueError: The text is too short.
    """
    kinds = profiled_kinds(model)
    passes = windows_of(tokens, min(length, trained_context(model)))
    routing.install()
    full = [_log_probabilities(model, tokens_in, None) for tokens_in in passes]
    budgets = [b for b in GRID if b < passes[0].shape[1]]
    steps = sum(kind.heads for kind in kinds) * len(budgets)
    done = 0
    losses = []
    for layer, kind in enumerate(kinds):
        losses.append([[0.0] * len(GRID) for _ in range(kind.heads)])
        for head in range(kind.heads):
            for i, budget in enumerate(budgets):
                total = 0.0
                for tokens_in, expected in zip(passes, full, strict=True):
                    got = _log_probabilities(model, tokens_in, (layer, head, budget))
                    kl = (mx.exp(expected) * (expected - got)).sum(axis=-1).mean()
                    total += cast(float, kl.item())
                losses[layer][head][i] = max(total / len(passes), 0.0)
                done += 1
                if progress:
                    progress(done, steps)
    curves = tuple(
        tuple(tuple(float(f"{x:.4g}") for x in falling(curve)) for curve in of_layer)
        for of_layer in losses
    )
    identity = identity_by_kinds(model, kinds)
    measured_on = {"tokens": sum(p.size for p in passes), **(details or {})}
    return Profile(identity, GRID, curves, "KL divergence, one head at a time", measured_on)


def _log_probabilities(
    model: nn.Module, tokens: mx.array, limited: tuple[int, int, int] | None
) -> mx.array:
    """Log-probabilities of all next tokens, with one head limited: (layer, KV head, slots)."""

    def cache(index: int) -> _Limiting:
        return _Limiting(limited[1:] if limited and limited[0] == index else None)

    logits = looked_through(model, tokens, Watcher(), cache).astype(mx.float32)
    logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logits)
    return logits


def main() -> None:
    """Measure a model and write its profile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--text", type=Path, default=CALIBRATION_TEXT)
    parser.add_argument("--tokens", type=int, default=2 * WINDOW)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    tokens = tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    calibrate_exactly(model, tokens, details={"text": args.text.name}).save(args.out)


if __name__ == "__main__":
    main()
