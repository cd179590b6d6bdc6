"""How long values are: what a policy may weigh tokens by, kept beside their rows.

Measured on the value as it came, before it is packed, so that a row's worth does not change with
how it is stored; a logarithm, so that 16 bits hold any length within a thousandth of its size.
"""

from __future__ import annotations

import mlx.core as mx

#: Of a squared length: keeps the logarithm of a zero vector from stretching the scale of all.
LEAST_SQUARE = 1e-12


def value_lengths(values: mx.array) -> mx.array:
    """log ||v||^2 of values `[..., Dv]`: `[...]` float16."""
    square = mx.square(values.astype(mx.float32)).sum(axis=-1)
    return mx.log(mx.maximum(square, LEAST_SQUARE)).astype(mx.float16)
