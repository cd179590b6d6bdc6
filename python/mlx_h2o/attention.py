"""Attention that hands out its scores: the public ops.

They check their arguments and then ask a backend; `backends/reference.py` is the definition that
every other backend is held against.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_h2o.backends import reference

#: What `mask` may be: nothing, "causal" (aligned at the end), booleans, or numbers to add.
Mask = mx.array | str | None

FLOAT_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def scaled_dot_product_attention_with_scores(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Softmax attention, its logits and their log-sum-exp.

    Args:
        q: Queries `[B, Hq, L, D]`.
        k: Keys `[B, Hk, N, D]`; Hq is a multiple of Hk (GQA).
        v: Values `[B, Hk, N, Dv]`; Dv may differ from D.
        scale: Factor on q.k, usually `D ** -0.5`.
        mask: None, `"causal"` (the last query sees all N keys), a boolean array (True is visible)
            or an additive array, broadcastable to `[B, Hq, L, N]`.
        sinks: One logit per query head `[Hq]` of an extra softmax column without a value
            (gpt-oss).
        stream: Where to compute.

    Returns:
        out `[B, Hq, L, Dv]` in q's dtype; scores `[B, Hq, L, N]` float32, pre-softmax, minus
        infinity where masked; lse `[B, Hq, L]` float32, minus infinity in rows that see nothing
        (whose out is zero).

    Raises:
        ValueError: Shapes, dtypes or the mask do not fit together.
    """
    check_attention(q, k, v, mask, sinks)
    with mx.stream(stream) if stream is not None else mx.stream(mx.default_device()):
        return reference.attention_with_scores(q, k, v, scale=scale, mask=mask, sinks=sinks)


def attention_mass(scores: mx.array, lse: mx.array, n_kv_heads: int) -> mx.array:
    """The attention that each key received (DESIGN 1: mass).

    Args:
        scores: Logits `[B, Hq, L, N]`, float32.
        lse: Their log-sum-exp `[B, Hq, L]`; one that covers more columns than `scores` shows
            (attention sinks, the remainder) makes the mass smaller, as it should.
        n_kv_heads: Hk.

    Returns:
        `[B, Hk, N]` float32: sum over queries, mean over the G query heads of each KV head, of
        exp(score - lse). Over N it sums to L, less what other columns took.

    Raises:
        ValueError: Hq is no multiple of n_kv_heads, or lse does not match scores.
    """
    if scores.ndim != 4 or lse.shape != scores.shape[:3]:
        raise ValueError(
            f"scores must be [B, Hq, L, N] and lse [B, Hq, L]; got {scores.shape} and {lse.shape}."
        )
    if n_kv_heads < 1 or scores.shape[1] % n_kv_heads:
        raise ValueError(
            f"{scores.shape[1]} query heads cannot be grouped over {n_kv_heads} KV heads."
        )
    return reference.attention_mass(scores, lse, n_kv_heads)


def check_attention(
    q: mx.array, k: mx.array, v: mx.array, mask: Mask, sinks: mx.array | None
) -> None:
    """Raise ValueError unless the operands of an attention fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, tokens, width]; got {x.shape}.")
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} must be float32, float16 or bfloat16; got {x.dtype}.")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k {k.shape} and v {v.shape} must agree in batch, heads and tokens.")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in batch and width.")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} KV heads.")
    if isinstance(mask, mx.array):
        whole = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if mask.dtype not in (mx.bool_, *FLOAT_DTYPES):
            raise ValueError(f"An array mask must be boolean or floating; got {mask.dtype}.")
        if mask.ndim > 4 or any(
            size not in (1, full) for size, full in zip(mask.shape[::-1], whole[::-1], strict=False)
        ):
            raise ValueError(f"The mask {mask.shape} does not broadcast to {whole}.")
    elif mask is not None and mask != "causal":
        raise ValueError(f'mask must be None, "causal" or an array; got {mask!r}.')
    if isinstance(mask, str) and q.shape[2] > k.shape[2]:
        raise ValueError(
            f"A causal mask needs at least as many keys as queries; got {k.shape[2]} keys for "
            f"{q.shape[2]} queries."
        )
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be [{q.shape[1]}], one per query head; got {sinks.shape}.")
