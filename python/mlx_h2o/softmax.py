"""What can be done with a softmax whose log-sum-exp is known: weigh, add a column, add up."""

from __future__ import annotations

import mlx.core as mx


def softmax_weights(scores: mx.array, lse: mx.array) -> mx.array:
    """exp(scores - lse) `[..., N]`, zero in rows that see nothing (lse minus infinity)."""
    finite = mx.where(lse == -mx.inf, 0.0, lse)
    return mx.exp(scores - finite[..., None])


def join(
    out: mx.array, lse: mx.array, logits: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    """Attention and one more column together: out `[B, Hq, L, Dv]` and lse `[B, Hq, L]`.

    Args:
        out: Attention without the column `[B, Hq, L, Dv]`.
        lse: Its log-sum-exp `[B, Hq, L]`.
        logits: The column's `[B, Hq, L]`.
        values: The column's `[B, Hk, Dv]`.
    """
    joint = mx.logaddexp(lse, logits)
    finite = mx.where(joint == -mx.inf, 0.0, joint)
    kept, added = mx.exp(lse - finite)[..., None], mx.exp(logits - finite)[..., None]
    value = mx.repeat(values, out.shape[1] // values.shape[1], axis=1)[:, :, None]
    return (out.astype(mx.float32) * kept + value * added).astype(out.dtype), joint


def attention_mass(scores: mx.array, lse: mx.array, n_kv_heads: int) -> mx.array:
    """Attention that each key received; see `mlx_h2o.attention.attention_mass`."""
    B, Hq, L, N = scores.shape
    weights = softmax_weights(scores, lse).reshape(B, n_kv_heads, -1, N)
    return weights.sum(axis=2) * (n_kv_heads / Hq)
