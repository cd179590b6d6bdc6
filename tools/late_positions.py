"""What packed keys cost at early and late positions, by what their frames are fitted to.

    python tools/late_positions.py TEXT [--samples N] [--tokens N]

A RoPE turns queries and keys alike, so a text can be read as if it stood anywhere, and only what
packing does to the turned keys changes. TEXT must not be what frames are made of, which is the
package's calibration text.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from real_model import nats, report

import mlx_h2o
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.calibration.scaling_build import FIRST, Turn, frame_tokens, frames_of_keys, turn_by
from mlx_h2o.calibration.scaling_fit import KeyUse
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.integration.recorder import LookingCache, Watcher, looked_through, windows_of
from mlx_h2o.storage.key_scaling import Frame, RowFormat

#: Widths of keys, and where the sample ends.
KEY_BITS = (6, 4)
LATE_CONTEXTS = (1024, 8192, 131072)
#: Positions between a key and its query: some of those at which keys before rotation are met.
ANGLES = (0, 7, 61, 523, 4099)


class LateRows:
    """A cache whose first token stands at a late position; it is read in one call.

    Queries and keys are turned alike, so that without packing nothing changes.
    """

    def __init__(self, position: int, store: Callable[[mx.array], mx.array]):
        self.offset, self.store = position, store

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> str:
        return "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.store(keys), values


#: A layer's keys `[B, H, L, D]` at a position, as they are stored.
Store = Callable[[mx.array], mx.array]


def turned_back(rope: nn.Module, position: int, keys: mx.array) -> mx.array:
    """Keys `[B, H, L, D]` of the tokens from a position on, without their rotation."""
    last = position + keys.shape[2] - 1
    # From the last token to the first, angles rise by one position a token.
    return cast(mx.array, rope(keys[:, :, ::-1], offset=-last)[:, :, ::-1])


def before_rotation(rope: nn.Module, position: int, store: Store) -> Store:
    """Keys turned back by their RoPE, stored, and turned on again."""

    def stored(keys: mx.array) -> mx.array:
        return cast(mx.array, rope(store(turned_back(rope, position, keys)), offset=position))

    return stored


def with_the_first_at_0(rope: nn.Module, position: int, store: Store) -> Store:
    """The first keys stored as if they stood at the beginning, as they do in a conversation."""

    def stored(keys: mx.array) -> mx.array:
        first = store(rope(turned_back(rope, position, keys[:, :, :FIRST])))
        first = rope(turned_back(rope, 0, first), offset=position)
        return mx.concatenate([first, store(keys[:, :, FIRST:])], axis=2)

    return stored


class _Seeing(LookingCache):
    """Finds a layer's keys `[B, H, T, D]` of a text, and how they are used."""

    def __init__(self, seen: list[tuple[mx.array, KeyUse]]):
        self.seen = seen

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        out, use = KeyUse.attended(call, keys, values)
        self.seen.append((keys.astype(mx.float32), use))
        return out


class FittedFrames:
    """Frames of one layer for keys at several places, fitted to the same text.

    Attributes:
        keys: At positions 0 to T - 1, `[B, H, T, D]`.
        use: Of the keys.
        rope: The layer's.
    """

    def __init__(self, keys: mx.array, use: KeyUse, rope: nn.Module):
        self.keys, self.use, self.rope, self.turn = keys, use, rope, turn_by(rope)

    def up_to(self, end: int) -> Frame:
        """For a context of so many tokens, as caches have it."""
        return self._fitted(self.keys, self.use, self.turn, end)

    def from_place(self, at: int) -> Frame:
        """For the tokens from a late position on, and the first ones at the beginning."""
        later = self.turn(self.keys[:, :, FIRST:], at)
        keys = mx.concatenate([self.keys[:, :, :FIRST], later], axis=2)
        return self._fitted(keys, replace(self.use, queries=self.turn(self.use.queries, at)))

    def before_rotation(self) -> Frame:
        """For keys without theirs, which queries meet at any angle."""
        turned = [self.turn(self.use.queries, angle) for angle in ANGLES]
        use = replace(self.use, queries=mx.concatenate(turned, axis=2))
        return self._fitted(turned_back(self.rope, 0, self.keys), use)

    def _fitted(
        self, keys: mx.array, use: KeyUse, turn: Turn | None = None, end: int | None = None
    ) -> Frame:
        end = end or keys.shape[2]
        centre, scale = frames_of_keys(keys, turn, (end,), use=use)[end]
        return Frame(mx.array(centre), mx.array(scale))


def positions(model: nn.Module, tokenizer: Any, samples: mx.array) -> None:
    """Packed keys, 16-bit values, at early and late positions, by what frames are fitted to."""
    T = samples.shape[1]
    seen: list[tuple[mx.array, KeyUse]] = []
    text = mx.concatenate(windows_of(frame_tokens(tokenizer), T))
    looked_through(model, text, Watcher(), lambda _: _Seeing(seen))
    ropes = [layer.self_attn.rope for layer in model.layers]
    layers = [FittedFrames(*rows, rope) for rows, rope in zip(seen, ropes, strict=True)]
    bare = [layer.before_rotation() for layer in layers]
    full = nats(model, samples, make_prompt_cache)
    report("full cache", full, full)
    for end in LATE_CONTEXTS:
        at = end - T
        ways: dict[str, list[Frame | None]] = {
            "plain": [None] * len(ropes),
            f"frame for 0 to {end}": [layer.up_to(end) for layer in layers],
            f"frame for {at} to {end}": [layer.from_place(at) for layer in layers],
            "frame before rotation": [*bare],
        }
        for (way, frames), bits in itertools.product(ways.items(), KEY_BITS):
            stored = before_rotation if way == "frame before rotation" else with_the_first_at_0
            stores = [
                stored(rope, at, RowFormat(bits, frame=frame).keys)
                for rope, frame in zip(ropes, frames, strict=True)
            ]
            nll = nats(model, samples, lambda _, of=stores, at=at: [LateRows(at, s) for s in of])
            report(f"positions {at} to {end}: {way}, {bits} bits", nll, full)


def parser() -> argparse.ArgumentParser:
    """What understands the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    made.add_argument("text", type=Path)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--samples", type=int, default=2)
    made.add_argument("--tokens", type=int, default=1024)
    return made


def main() -> None:
    """Print a table."""
    args = parser().parse_args()
    mlx_h2o.install()
    model, tokenizer = mlx_h2o.load(args.model)
    text = tokenizer.encode(args.text.read_text())
    print("| what | perplexity | loss |\n|---|---:|---:|")
    positions(model, tokenizer, samples_of(text, args.samples, args.tokens, None))


if __name__ == "__main__":
    main()
