"""How a text's queries use its keys: how strong they are, and what an error of a logit costs."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.attention import scaled_dot_product_attention_with_scores
from mlx_h2o.attention_call import AttentionCall

#: Queries whose masses are held at a time, `[B, Hq, block, T]`.
QUERY_BLOCK = 128
#: A part of the queries tells how strong all are.
QUERY_STEP = 4


@dataclass(frozen=True)
class KeyUse:
    """What queries make of the keys of the same tokens.

    Attributes:
        queries: Each fourth, as they meet keys, `[B, Hq, T / 4, D]`.
        weights: What an error of each key's logit costs, `[B, H, T]` float32: with p_n the
            softmax, a logit moves the output by p_n (v_n - o), so it is sum_q p_qn^2 |v_n - o_q|^2,
            summed over a KV head's queries.
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
        by_query_head = mx.repeat(values.astype(mx.float32), group, axis=1)
        total, outs = mx.zeros((B, H * group, T)), []
        for start in range(0, T, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, T)
            seen = by_query_head[:, :, :end]
            out, logits, lse = scaled_dot_product_attention_with_scores(
                call.q[:, :, start:end],
                keys[:, :, :end],
                values[:, :, :end],
                scale=call.scale,
                mask="causal",
                sinks=call.sinks,
                softcap=call.softcap,
            )
            outs.append(out)
            out = out.astype(mx.float32)
            squares = mx.exp(2 * (logits - lse[..., None]))
            # |v - o|^2 = |v|^2 - 2 v.o + |o|^2, summed over the queries.
            cost = (seen**2).sum(axis=-1) * squares.sum(axis=-2)
            cost = cost - 2 * (seen * (squares.swapaxes(-1, -2) @ out)).sum(axis=-1)
            cost = cost + (squares * (out**2).sum(axis=-1, keepdims=True)).sum(axis=-2)
            total[:, :, :end] += cost
            mx.eval(total, outs[-1])
        weights = total.reshape(B, H, group, T).sum(axis=2)
        use = cls(call.q[:, :, ::QUERY_STEP], mx.maximum(weights, 0))
        return mx.concatenate(outs, axis=2), use
