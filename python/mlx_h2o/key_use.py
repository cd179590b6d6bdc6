"""How a text's queries use its keys: how strong they are, and what an error of a logit costs."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.attention import scaled_dot_product_attention_with_scores
from mlx_h2o.attention_call import AttentionCall
from mlx_h2o.watching import full_attention

#: Queries whose masses are held at a time, `[B, Hq, block, T]`.
QUERY_BLOCK = 128
#: A part of the queries tells how strong all are, and which keys they look at: rows are drawn by
#: that, and other draws change a frame as much.
QUERY_STEP = 4


@dataclass(frozen=True)
class KeyUse:
    """What queries make of the keys of the same tokens.

    Attributes:
        queries: Each fourth, as they meet keys, `[B, Hq, T / 4, D]`.
        weights: What an error of each key's logit costs, `[B, H, T]` float32: with p_n the
            softmax, a logit moves the output by p_n (v_n - o), so it is sum_q p_qn^2 |v_n - o_q|^2,
            summed over those queries of a KV head.
    """

    queries: mx.array
    weights: mx.array

    @classmethod
    def attended(
        cls, call: AttentionCall, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, KeyUse]:
        """The output `[B, Hq, T, Dv]` of a causal call over a whole text, and its use of the keys.

        Args:
            call: Queries `[B, Hq, T, D]`.
            keys: `[B, H, T, D]`.
            values: `[B, H, T, Dv]`.
        """
        B, H, T, _ = keys.shape
        group = call.q.shape[1] // H
        out = full_attention(call.q, keys, values, call.scale, call.sinks, call.softcap)
        queries, outs = call.q[:, :, ::QUERY_STEP], out[:, :, ::QUERY_STEP].astype(mx.float32)
        by_query_head = mx.repeat(values.astype(mx.float32), group, axis=1)
        total = mx.zeros((B, H * group, T))
        for first in range(0, queries.shape[2], QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, queries.shape[2])
            end = (last - 1) * QUERY_STEP + 1
            seen = by_query_head[:, :, :end]
            at = mx.arange(first, last)[:, None] * QUERY_STEP
            _, logits, lse = scaled_dot_product_attention_with_scores(
                queries[:, :, first:last],
                keys[:, :, :end],
                values[:, :, :end],
                scale=call.scale,
                mask=mx.arange(end) <= at,
                sinks=call.sinks,
                softcap=call.softcap,
            )
            squares = mx.exp(2 * (logits - lse[..., None])).swapaxes(-1, -2)
            # |v - o|^2 = |v|^2 - 2 v.o + |o|^2, summed over the queries.
            o = outs[:, :, first:last]
            of_queries = mx.square(o).sum(axis=-1, keepdims=True)
            sums = squares @ mx.concatenate([o, of_queries, mx.ones_like(of_queries)], axis=-1)
            cost = mx.square(seen).sum(axis=-1) * sums[..., -1] + sums[..., -2]
            total[:, :, :end] += cost - 2 * (seen * sums[..., :-2]).sum(axis=-1)
            mx.eval(total)
        weights = total.reshape(B, H, group, T).sum(axis=2)
        return out, cls(queries, mx.maximum(weights, 0))
