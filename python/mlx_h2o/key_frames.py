"""Frames for packed keys, made of one short text for contexts of any length.

A frame belongs to a range of positions: a slow rotary channel that hardly moves over a thousand
tokens takes every value over ten thousand, and a frame made of the thousand would clip it or leave
it no levels. RoPE only turns each pair of channels by an angle, so the text's keys can be turned on
to later positions by the model's own RoPE, without reading a longer text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o import routing
from mlx_h2o.attention_call import AttentionCall
from mlx_h2o.builtin import CALIBRATION_TEXT, MIXED_TEXT
from mlx_h2o.frame import LEAST_SCALE
from mlx_h2o.watching import (
    LookingCache,
    Watcher,
    full_attention,
    looked_through,
    trained_context,
    windows_of,
)

#: Contexts for which frames are made; beyond the last its frame serves.
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
# Texts that short are turned to many places; more tell nothing new.
MOST_TURNS = 64
# Where keys are turned to so many places or more, each turn takes a part of the tokens.
PARTS = 4
ROPE_NAMES = ("rope", "rotary_emb", "rotary", "rope_emb")

#: What is read of the bundled texts.
FRAME_PASSES, FRAME_LENGTH = 4, 1024

#: Adds an angle to keys `[B, H, L, D]`: that of so many positions.
Turn = Callable[[mx.array, int], mx.array]


def frame_tokens(tokenizer: Any) -> list[int]:
    """Tokens of the bundled texts for frames, the mixed one first."""
    text = MIXED_TEXT.read_text(encoding="utf-8") + CALIBRATION_TEXT.read_text(encoding="utf-8")
    tokens: list[int] = tokenizer.encode(text)[: FRAME_PASSES * FRAME_LENGTH]
    return tokens


def frame_passes(model: nn.Module, tokens: Sequence[int]) -> mx.array:
    """A text for frames as passes `[B, T]` of the model, all from position 0.

    Raises:
        ValueError: It is too short.
    """
    return mx.concatenate(windows_of(tokens, min(FRAME_LENGTH, trained_context(model))))


def frames_of_text(
    model: nn.Module, passes: mx.array, contexts: Sequence[int] = CONTEXTS
) -> dict[int, tuple[np.ndarray, ...]]:
    """Every layer's frame for each context.

    Args:
        model: An mlx-lm model that mlx_h2o can route.
        passes: Token ids `[B, T]`, all at positions 0 to T - 1.
        contexts: Positions from 0 to below each.

    Returns:
        By context, one array a layer: centre and scale `[2, H, D]`.
    """
    routing.install()
    watcher = Watcher()
    layers: list[dict[int, np.ndarray]] = []
    looked_through(model, passes, watcher, lambda _: _Framing(watcher, contexts, layers))
    return {context: tuple(layer[context] for layer in layers) for context in contexts}


class _Framing(LookingCache):
    """A looking cache that makes its layer's frames of the keys that it sees."""

    knows_softcap = True

    def __init__(
        self, watcher: Watcher, contexts: Sequence[int], layers: list[dict[int, np.ndarray]]
    ):
        self.watcher, self.contexts, self.layers = watcher, contexts, layers

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        mx.eval(keys)
        turn = turning(self.watcher.layer, keys[:1, :, :1])
        # Attention sinks and capped logits do not move with the centre, so there can be none.
        centred = call.sinks is None and not call.softcap
        frames = frames_of_keys(keys, turn, self.contexts, centred)
        self.layers.append(frames)
        return full_attention(call.q, keys, values, call.scale, call.sinks, call.softcap)


def frames_of_keys(
    keys: mx.array, turn: Turn | None, contexts: Sequence[int], centred: bool = True
) -> dict[int, np.ndarray]:
    """One layer's frame for each context.

    Args:
        keys: As they are cached at positions 0 to T - 1, `[B, H, T, D]`.
        turn: To later positions; None: they serve as they are.
        contexts: Positions from 0 to below each.
        centred: Whether the frame has a centre.

    Returns:
        By context: centre and scale `[2, H, D]`.
    """
    T = keys.shape[2]
    keys = keys.astype(mx.float32)
    frames = {}
    for context in contexts:
        if context <= T or turn is None:
            parts = [keys[:, :, :context]]
        else:
            parts = _turned(keys, turn, context)
        frames[context] = _frame(parts, centred)
    return frames


def _turned(keys: mx.array, turn: Turn, context: int) -> list[mx.array]:
    """The keys at places spread evenly over a context."""
    T = keys.shape[2]
    places = min(-(-context // T), MOST_TURNS)
    stride = min(places, PARTS)
    parts = []
    for i in range(places):
        delta = round(i * (context - T) / (places - 1))
        parts.append(turn(keys[:, :, i % stride :: stride], delta))
    return parts


def _frame(parts: Sequence[mx.array], centred: bool) -> np.ndarray:
    """Centre and scale `[2, H, D]` of keys `[B, H, n, D]`."""
    count = sum(part.shape[0] * part.shape[2] for part in parts)
    seen = []
    for part in parts:
        seen.append([part.sum(axis=(0, 2)), part.min(axis=(0, 2)), part.max(axis=(0, 2))])
        mx.eval(seen[-1])
    sums, lows, highs = (mx.stack(list(of)) for of in zip(*seen, strict=True))
    centre = sums.sum(axis=0) / count if centred else mx.zeros(sums.shape[1:])
    least, greatest = lows.min(axis=0), highs.max(axis=0)
    scale = mx.maximum(mx.maximum(greatest - centre, centre - least), LEAST_SCALE)
    return np.array(mx.stack([centre, scale]))


def turning(layer: nn.Module | None, keys: mx.array) -> Turn | None:
    """A block's own RoPE as a turn of keys that have theirs already; None where it cannot serve.

    It must do nothing for no positions, and two turns must add up: a RoPE that scales what it
    turns, or takes other angles for longer texts, does not.

    Args:
        layer: A transformer block.
        keys: A few of it, `[B, H, 1, D]`.
    """
    for name, module in layer.named_modules() if layer is not None else ():
        if name.split(".")[-1] in ROPE_NAMES and callable(module):
            turn = turn_by(module)
            try:
                here, there = turn(keys, 0), turn(turn(keys, 300), 700)
                close = mx.allclose(here, keys, rtol=1e-3, atol=1e-3)
                adds = mx.allclose(there, turn(keys, 1000), rtol=1e-2, atol=1e-2)
                moves = mx.abs(there - keys).max() > 0
                if (close & adds & moves).item():
                    return turn
            except (TypeError, ValueError):  # it is called in another way
                continue
    return None


def turn_by(rope: Callable[..., mx.array]) -> Turn:
    """A RoPE that only adds an angle, as a turn of keys that have theirs already."""

    def turn(keys: mx.array, delta: int) -> mx.array:
        B, H, L, D = keys.shape
        # One token a sequence: all are turned by the same angle.
        rows = keys.astype(mx.float32).transpose(0, 2, 1, 3).reshape(B * L, H, 1, D)
        turned = rope(rows, offset=delta)
        return turned.reshape(B, L, H, D).transpose(0, 2, 1, 3)

    return turn
