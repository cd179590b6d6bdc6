"""A model's own RoPE as a turn: keys that have their rotation are moved on to later positions."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

ROPE_NAMES = ("rope", "rotary_emb", "rotary", "rope_emb")

#: Adds an angle to keys `[B, H, L, D]`: that of so many positions.
Turn = Callable[[mx.array, int], mx.array]


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
