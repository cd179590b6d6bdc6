"""Keys in few bits after a rotation of each head's channels, beside the key scaling that ships.

    python -m research.rotating TEXT [--model builtin:recall-4m] [--bits 4 3 2]

All tokens are kept and values are exact, so that only the rounding of keys differs: a row of a KV
head has one scale and one bias, as in slots. The first tokens and the newest are exact, too.
Transforms of keys, fitted on the bundled text, after RoPE or before it (keys are turned back by
their positions, rounded, and turned again):

- key scaling: the profile's centre and scale of each channel (`storage/key_scaling.py`);
- scaled: the same from the text's own means and greatest distances;
- Hadamard: a Hadamard rotation after that;
- fitted: with K the covariance of a head's keys and Q the second moment of its queries, the linear
  map for which rounding errors of one step size move logits least. A = K^(1/2), A Q A = U L U';
  keys k become H L^(1/4) U' A^(-1) (k - centre), and H, a Hadamard rotation, gives all channels the
  same range. Then logits err by tr(L^(1/2))^2 / D at a step of 1.

Measured as in `research.mending`; differences are paired by prompt with today's key scaling. The
second table has bounded caches at equal bytes, whose keys are transformed at the door: what fewer
bits buy. Transforms after RoPE only; their matrices, D * D numbers a head, are not counted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.attention.ops import scaled_dot_product_attention
from mlx_h2o.budgets.profile_data import frames_for
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.evaluate.equal_bytes import caches_in_16_bits
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.integration.layer_probe import layer_kinds
from mlx_h2o.integration.recorder import LookingCache
from mlx_h2o.integration.rope_probe import ropes_in_keys
from mlx_h2o.integration.stock_caches import stock_caches
from mlx_h2o.loading.load import CALIBRATION_TEXT
from mlx_h2o.model_caches.make import plain_bytes
from mlx_h2o.storage.key_scaling import Frame, RowFormat
from mlx_h2o.storage.rope import Rope
from research.mending import Answers, begun, divergence, profile_of
from research.mending import parser as trial_parser

Array = npt.NDArray[Any]
#: Rows that stay exact: the first tokens, and the newest.
SINK, NEWEST = 4, 64
#: Passes of the bundled text on which transforms are fitted, and their tokens.
PASSES, LENGTH = 2, 1024
#: What is added to a covariance's diagonal, of its mean.
RIDGE = 1e-4
SHIPPED, FITTED = "key scaling, after RoPE", "fitted, after RoPE"
#: Bits of keys and of values of bounded caches.
WIDTHS = ((5, 5), (4, 4), (3, 4), (3, 3))


@dataclass(frozen=True)
class Transform:
    """A linear map of one layer's keys to what is rounded, and back.

    Attributes:
        centre: `[H, 1, D]`.
        into: `[H, D, D]`, applied to rows from the right.
        back: Its inverse.
        rope: The RoPE that keys are rounded without, or None.
    """

    centre: mx.array
    into: mx.array
    back: mx.array
    rope: Rope | None = None

    @classmethod
    def of_frame(cls, frame: Frame, rotation: mx.array | None = None, **of: Any) -> Transform:
        """A centre and a scale of each channel, and a rotation after them."""
        turn = mx.eye(frame.scale.shape[1]) if rotation is None else rotation
        scale = frame.scale[..., None]
        return cls(frame.centre[:, None], turn / scale, (turn * scale).swapaxes(1, 2), **of)

    def entered(self, keys: mx.array) -> mx.array:
        """Keys `[B, H, L, D]` after the map."""
        return (keys - self.centre) @ self.into

    def asked(self, queries: mx.array) -> mx.array:
        """Queries `[B, Hq, L, D]` that give such keys the logits of the keys before, but for one
        number a query, which does not change its weights."""
        group = queries.shape[1] // self.back.shape[0]
        return queries @ mx.repeat(self.back.swapaxes(1, 2), group, axis=0)

    def rounded(self, keys: mx.array, first: int, bits: int) -> mx.array:
        """Keys `[B, H, L, D]` of the positions from `first` on, rounded to so many bits."""
        B, H, L, D = keys.shape
        at = mx.broadcast_to(mx.arange(first, first + L), (B, H, L))
        plain = keys if self.rope is None else self.rope.turned(keys, -at)
        rows = RowFormat(k_bits=bits, group_size=D).keys(self.entered(plain))
        near = rows.astype(mx.float32) @ self.back + self.centre
        return near if self.rope is None else self.rope.turned(near, at)


class RoundedCache(KVCache):
    """A full cache whose keys are rounded, but for the first and the newest."""

    def __init__(self, transform: Transform, bits: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.transform, self.k_bits, self.rounded = transform, bits, list[mx.array]()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The keys, rounded but for those that stay exact, and the values."""
        self.rounded.append(self.transform.rounded(keys, self.offset, self.k_bits))
        exact, values = super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
        at = mx.arange(self.offset)[:, None]
        stays = (at < SINK) | (at >= self.offset - NEWEST)
        self.rounded = [mx.concatenate(self.rounded, axis=2)]
        return mx.where(stays, exact, self.rounded[0]), values


class TurningCache(H2OKVCache):
    """A bounded cache that holds transformed keys."""

    transform: Transform

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return super().update_and_fetch(self.transform.entered(keys), values)

    def attend(self, q: mx.array, *args: Any, **named: Any) -> mx.array:
        return super().attend(self.transform.asked(q), *args, **named)


class Recording(LookingCache):
    """Keys `[H, N, D]` and queries `[Hq, N, D]` of one pass over a text."""

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Plain causal attention; the rows are noted."""
        self.keys, self.queries = keys[0], call.q[0]
        return scaled_dot_product_attention(call.q, keys, values, scale=call.scale, mask="causal")


def recorded(model: nn.Module, tokens: mx.array) -> list[list[tuple[mx.array, mx.array]]]:
    """Keys and queries of each pass, by layer."""
    passes = []
    for row in tokens:
        caches = [Recording() for _ in stock_caches(model)]
        mx.eval(model(row[None], cache=caches)[:, -1, :1])
        passes.append([(cache.keys, cache.queries) for cache in caches])
    return [list(of_layer) for of_layer in zip(*passes, strict=True)]


def without_rope(
    keys: mx.array, queries: mx.array, rope: Rope, rng: np.random.Generator
) -> tuple[mx.array, mx.array]:
    """Keys as they were before RoPE, and queries as such keys see them: each from a random one."""
    at = np.arange(keys.shape[1])
    seen = mx.array(rng.integers(0, at + 1))
    keys = rope.turned(keys[None], mx.broadcast_to(-mx.array(at), (1, *keys.shape[:2])))[0]
    back = mx.broadcast_to(-seen, (1, *queries.shape[:2]))
    return keys, rope.turned(queries[None], back)[0]


def fitted(rows: Sequence[mx.array], rotation: mx.array, **of: Any) -> Transform:
    """The map for which rounding errors of keys, seen by queries, move logits least."""
    keys, queries = rows
    H, _, D = keys.shape
    k, q = np.array(keys, np.float64), np.array(queries, np.float64).reshape(H, -1, D)
    centre = k.mean(axis=1, keepdims=True)
    away, turn, ways = k - centre, np.array(rotation, np.float64), []
    for head in range(H):
        covariance = away[head].T @ away[head] / len(away[head])
        covariance += RIDGE * np.trace(covariance) / D * np.eye(D)
        lengths, axes = np.linalg.eigh(covariance)
        root = axes * np.sqrt(lengths) @ axes.T
        moment = root @ (q[head].T @ q[head]) @ root / len(q[head])
        worth, own = np.linalg.eigh(moment)
        worth = np.maximum(worth, RIDGE * worth.mean())
        into = np.linalg.inv(root) @ own * worth**0.25 @ turn.T
        ways.append((into, np.linalg.inv(into)))
    into, back = (mx.array(np.stack(part).astype(np.float32)) for part in zip(*ways, strict=True))
    return Transform(mx.array(centre.astype(np.float32)), into, back, **of)


def transforms(
    model: nn.Module, name: str, tokens: mx.array, context: int
) -> dict[str, list[Transform]]:
    """Each arm's transforms, by layer."""
    layers = recorded(model, tokens)
    ropes = ropes_in_keys(name, model, len(layers))
    measured = profile_of(model).measured
    assert measured is not None
    frames = [Frame(*map(mx.array, of)) for of in frames_for(measured.frames, context)]
    rng, out = np.random.default_rng(0), dict[str, list[Transform]]()
    for passes, rope, frame in zip(layers, ropes, frames, strict=True):
        assert rope is not None
        D = passes[0][0].shape[2]
        rotation = mx.hadamard_transform(mx.eye(D), scale=D**-0.5)
        plain = [without_rope(*one, rope, rng) for one in passes]
        after, before = (
            [mx.concatenate(list(part), axis=1) for part in zip(*of, strict=True)]
            for of in (passes, plain)
        )
        scaled = Frame.of(before[0][None])
        of_layer = {
            SHIPPED: Transform.of_frame(frame),
            "key scaling and Hadamard, after RoPE": Transform.of_frame(frame, rotation),
            FITTED: fitted(after, rotation),
            "scaled, before RoPE": Transform.of_frame(scaled, rope=rope),
            "scaled and Hadamard, before RoPE": Transform.of_frame(scaled, rotation, rope=rope),
            "fitted, before RoPE": fitted(before, rotation, rope=rope),
        }
        for arm, transform in of_layer.items():
            out.setdefault(arm, []).append(transform)
    return out


def row(full: Answers, got: Answers, shipped: Answers) -> str:
    """Divergence, its difference from today's key scaling, and facts."""
    far, usual = (divergence(full.logits, one.logits) for one in (got, shipped))
    paired = [a - b for a, b in zip(far, usual, strict=True)]
    error, apart = (statistics.stdev(of) / len(of) ** 0.5 for of in (far, paired))
    known = sum(a and b for a, b in zip(got.known, full.known, strict=True))
    over = f"{statistics.fmean(paired):+.4f} ± {apart:.4f}" if got is not shipped else "-"
    return f"{statistics.fmean(far):.4f} ± {error:.4f} | {over} | {known} of {sum(full.known)}"


def everything(
    arms: dict[str, list[Transform]], bits: int
) -> dict[str, Callable[[int], list[Any]]]:
    """Makes caches of all tokens, by arm."""

    def maker(of_layers: list[Transform]) -> Callable[[int], list[Any]]:
        return lambda _: [RoundedCache(transform, bits) for transform in of_layers]

    return {arm: maker(of_layers) for arm, of_layers in arms.items()}


def bounded(
    model: nn.Module,
    arms: dict[str, list[Transform]],
    tokens: int,
    part: int,
    bits: tuple[int, int],
) -> dict[str, Callable[[int], list[Any]]]:
    """Makes bounded caches of equal bytes, by arm."""
    k_bits, v_bits = bits

    def maker(of_layers: list[Transform]) -> Callable[[int], list[Any]]:
        D = of_layers[0].into.shape[1]
        # Takes the bytes of key scaling, and does nothing.
        frames = [
            Frame(mx.zeros(one.into.shape[:2]), mx.ones(one.into.shape[:2])) for one in of_layers
        ]
        settings = ModelSettings.of(
            1, policy="salient", k_bits=k_bits, v_bits=v_bits, group_size=D, frames=frames
        )

        def make(context: int) -> list[Any]:
            caches = caches_in_16_bits(model, settings, tokens // part, context)
            for cache, transform in zip(caches, of_layers, strict=True):
                cache.__class__, cache.transform = TurningCache, transform
            return caches

        return make

    return {arm: maker(arms[arm]) for arm in (SHIPPED, FITTED)}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = trial_parser()
    made.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    return made


def main() -> None:
    """Parse and run; the tables are Markdown."""
    args = parser().parse_args()
    trial = begun(args)
    model, stage = trial.stage.model, trial.stage
    full = trial.answered(trial.chunked(lambda _: stock_caches(model)))
    bos = stage.first[0] if stage.first else None
    text = samples_of(stage.encode(CALIBRATION_TEXT.read_text()), PASSES, LENGTH, bos)
    arms = transforms(model, args.model, text, args.tokens)

    def table(kind: str, makers: dict[str, dict[str, Callable[[int], list[Any]]]]) -> None:
        print(f"| model | {kind} | keys | divergence, nats | over key scaling | facts | held |")
        print("|---|---|---|---:|---:|---:|---:|", flush=True)
        plain = sum(map(plain_bytes, layer_kinds(model))) * args.tokens
        for of, tried in makers.items():
            shipped = None
            for arm, make in tried.items():
                got = trial.answered(trial.chunked(make))
                shipped = shipped or got
                held, figures = f"{got.nbytes / plain:.3f}", row(full, got, shipped)
                print(f"| {args.model} | {of} | {arm} | {figures} | {held} |", flush=True)

    table("bits", {f"{bits}": everything(arms, bits) for bits in args.bits})
    print()
    table(
        "bytes, bits of keys and values",
        {
            f"1/{part}, {k} and {v}": bounded(model, arms, args.tokens, part, (k, v))
            for part in args.parts
            for k, v in WIDTHS
        },
    )


if __name__ == "__main__":
    main()
