"""Positions of slots: 16 bits each while a conversation has no more of them, then 32.

Signed, since a pinned token's position is stored as its complement (`pins.py`). Only what a store
keeps is narrow; views of it, and everything that reckons with positions, are int32.
"""

from __future__ import annotations

import mlx.core as mx

#: Tokens of a conversation whose positions fit into 16 bits.
FEW = 2**15
NARROW, WIDE = mx.int16, mx.int32


def position_dtype(tokens: int) -> mx.Dtype:
    """In what a store keeps the positions of so many tokens."""
    return NARROW if tokens <= FEW else WIDE
