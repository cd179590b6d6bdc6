"""How long values are: what a policy may weigh tokens by.

A dense value is measured as it came, and its length is kept beside its row, since reading all
values once more would cost a step what attention costs; a logarithm, so that 16 bits hold any
length within a thousandth of its size. Of a packed value nothing is kept: its scales tell how far
its elements reach, which ranks values as their lengths do (SmolLM2, an eighth of the bytes: the
same perplexity within its error, docs/results.md).
"""

from __future__ import annotations

import mlx.core as mx

from mlx_h2o.packed import AnyRows, JoinedRows, PackedRows

#: Of a squared length: keeps the logarithm of a zero vector from stretching the scale of all.
LEAST_SQUARE = 1e-12


def value_lengths(values: AnyRows) -> mx.array:
    """Logarithms of the values' squared lengths `[...]`: what a policy ranks values by.

    Args:
        values: `[..., Dv]`. Of dense ones it is log ||v||^2, float16. Of packed ones
            log sum_g (max_g - min_g)^2 over the groups g of a row, float32: a group's range is its
            scale times the highest level. Of joined rows each part has its own.
    """
    if isinstance(values, JoinedRows):
        return mx.concatenate([value_lengths(part).astype(mx.float32) for part in values.parts], -1)
    if isinstance(values, PackedRows):
        ranges = values.scales.astype(mx.float32) * float(2**values.bits - 1)
        return logarithm(ranges)
    return logarithm(values.astype(mx.float32)).astype(mx.float16)


def logarithm(elements: mx.array) -> mx.array:
    """Log of the sum of squares of `[..., n]` float32: `[...]`."""
    return mx.log(mx.maximum(mx.square(elements).sum(axis=-1), LEAST_SQUARE))
