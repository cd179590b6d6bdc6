"""The definition, in plain mlx ops. Slow on purpose where clarity asks for it."""

from __future__ import annotations

import mlx.core as mx


def attention_with_scores(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """See `mlx_h2o.attention.scaled_dot_product_attention_with_scores`."""
    B, Hq, L, D = q.shape
    Hk, N = k.shape[1], k.shape[2]
    # The G query heads of a KV head are stacked along the queries: one matmul, no repeated keys.
    grouped = (q.astype(mx.float32) * scale).reshape(B, Hk, -1, D)
    scores = (grouped @ k.astype(mx.float32).swapaxes(-1, -2)).reshape(B, Hq, L, N)
    scores = apply_mask(scores, mask)
    lse = mx.logsumexp(scores, axis=-1)
    if sinks is not None:
        lse = mx.logaddexp(lse, sinks.astype(mx.float32)[:, None])
    weights = softmax_weights(scores, lse).reshape(B, Hk, -1, N)
    out = (weights @ v.astype(mx.float32)).reshape(B, Hq, L, -1)
    return out.astype(q.dtype), scores, lse


def attention_mass(scores: mx.array, lse: mx.array, n_kv_heads: int) -> mx.array:
    """See `mlx_h2o.attention.attention_mass`."""
    B, Hq, L, N = scores.shape
    weights = softmax_weights(scores, lse).reshape(B, n_kv_heads, -1, N)
    return weights.sum(axis=2) * (n_kv_heads / Hq)


def softmax_weights(scores: mx.array, lse: mx.array) -> mx.array:
    """exp(scores - lse) `[..., N]`, zero in rows that see nothing (lse minus infinity)."""
    finite = mx.where(lse == -mx.inf, 0.0, lse)
    return mx.exp(scores - finite[..., None])


def apply_mask(scores: mx.array, mask: mx.array | str | None) -> mx.array:
    """Logits `[B, Hq, L, N]` with minus infinity where masked."""
    if mask is None:
        return scores
    if isinstance(mask, str):
        L, N = scores.shape[-2:]
        mask = mx.arange(N) <= mx.arange(N - L, N)[:, None]
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, -mx.inf)
    # Models write the lowest number of their dtype for "masked"; as a sum it would poison scores.
    hidden = mask <= mx.finfo(mask.dtype).min
    return mx.where(hidden, -mx.inf, scores + mask.astype(mx.float32))
