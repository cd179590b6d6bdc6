"""Attention over rows of several kinds: each kind by itself, joined by their lse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import mlx.core as mx

from mlx_h2o.attention.backends.operands import Operands, Options
from mlx_h2o.attention.backends.reference import mass_of_blocks
from mlx_h2o.slots.packed import AnyRows, JoinedRows
from mlx_h2o.slots.softmax import columns_of, softmax_weights

# Queries joined at a time, so that each part's float32 output stays small.
BLOCK = 32


class Joined:
    """Another backend's attention, applied to each kind of rows and joined.

    Its methods are those of `mlx_h2o.attention.ops`; calls are (q, k, v) and, by name, scale, mask,
    sinks and seed. Ranges are refused earlier.
    """

    def __init__(self, backend: Any):
        self._backend = backend

    def attention_with_scores(
        self, q: mx.array, k: AnyRows, v: AnyRows, **options: Unpack[Options]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """See `mlx_h2o.attention.ops.scaled_dot_product_attention_with_scores`."""
        parts = _parts(self._backend.attention_with_scores, Operands(q, k, v, **options))
        out, lse = _joined(parts)
        return out.astype(q.dtype), mx.concatenate([scores for _, scores, _ in parts], axis=-1), lse

    def attention(
        self, q: mx.array, k: AnyRows, v: AnyRows, **options: Unpack[Options]
    ) -> mx.array:
        """See `mlx_h2o.attention.ops.scaled_dot_product_attention`."""
        outs = []
        for block in Operands(q, k, v, **options).of_queries(BLOCK):
            # `attention_with_mass` returns lse without writing logits.
            parts = _parts(self._backend.attention_with_mass, block)
            outs.append(_joined(parts)[0].astype(q.dtype))
        return mx.concatenate(outs, axis=2)

    def attention_with_mass(
        self, q: mx.array, k: AnyRows, v: AnyRows, **options: Unpack[Options]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """See `mlx_h2o.attention.ops.scaled_dot_product_attention_with_mass`."""
        blocks = Operands(q, k, v, **options).of_queries(BLOCK)
        each = (self.attention_with_scores(b.q, b.k, b.v, **b.options) for b in blocks)
        return mass_of_blocks(each, k)


def _parts(
    attend: Callable[..., tuple[mx.array, mx.array, mx.array]], call: Operands[AnyRows]
) -> list[tuple[mx.array, mx.array, mx.array]]:
    """The results of `attend` (out first, lse last) over each kind of rows."""
    assert isinstance(call.k, JoinedRows)
    assert isinstance(call.v, JoinedRows)
    parts: list[tuple[mx.array, mx.array, mx.array]] = []
    start = 0
    for keys, values in zip(call.k.parts, call.v.parts, strict=True):
        end = start + keys.shape[2]
        if start == end:
            continue
        options: Options = {
            "scale": call.scale,
            "mask": columns_of(call.mask, start, end, call.q.shape[2], call.k.shape[2]),
        }
        if call.softcap:  # which no kernel supports
            options["softcap"] = call.softcap
        if not parts:  # only once, since they are columns of the whole softmax
            options |= {"sinks": call.sinks, "seed": call.seed}
        parts.append(attend(call.q, keys, values, **options))
        start = end
    return parts


def _joined(parts: list[tuple[mx.array, mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Output (float32) and lse over the columns of all parts."""
    lse = parts[0][2]
    for _, _, other in parts[1:]:
        lse = mx.logaddexp(lse, other)
    out = mx.zeros(parts[0][0].shape)
    for of_part, _, part_lse in parts:
        out = out + of_part.astype(mx.float32) * softmax_weights(part_lse[..., None], lse)
    return out, lse
