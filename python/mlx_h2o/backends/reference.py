"""The definition, in plain mlx ops. Slow on purpose where clarity asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from mlx_h2o.masks import Mask, block_of, fast_mask
from mlx_h2o.packed import PackedRows, Rows, dense

#: One more softmax column, without a slot: logits `[B, Hq, L]` and values `[B, Hk, Dv]`, float32.
Seed = tuple[mx.array, mx.array]

#: First slot and number of slots of each KV head in flat keys and values.
Ranges = Sequence[tuple[int, int]]

# Queries whose logits are held at a time where only their sum is wanted: bounds [L, N].
QUERY_BLOCK = 256


def attention(
    q: mx.array,
    k: Rows,
    v: Rows,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    seed: Seed | None = None,
    ranges: Ranges | None = None,
) -> mx.array:
    """See `mlx_h2o.attention.scaled_dot_product_attention`."""
    packed = isinstance(k, PackedRows) or isinstance(v, PackedRows)
    k, v = dense(k), dense(v)
    if ranges is not None:
        parts = _heads(q, k, v, sinks, seed, ranges)
        return mx.concatenate([attention(**head, scale=scale, mask=mask) for head in parts], axis=1)
    if seed is None and not packed:
        sinks = None if sinks is None else sinks.astype(q.dtype)
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=fast_mask(mask, q.dtype), sinks=sinks
        )
    blocks = _blocks(q, k, v, scale, mask, sinks, seed)
    return mx.concatenate([out for out, _, _ in blocks], axis=2)


def attention_with_mass(
    q: mx.array,
    k: Rows,
    v: Rows,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    seed: Seed | None = None,
    ranges: Ranges | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """See `mlx_h2o.attention.scaled_dot_product_attention_with_mass`."""
    k, v = dense(k), dense(v)
    if ranges is not None:
        parts = _heads(q, k, v, sinks, seed, ranges)
        of_heads = [attention_with_mass(**head, scale=scale, mask=mask) for head in parts]
        flat = [mass[:, 0] for _, mass, _ in of_heads]
        return (
            mx.concatenate([out for out, _, _ in of_heads], axis=1),
            placed(flat, ranges, k.shape[1], 0.0),
            mx.concatenate([lse for _, _, lse in of_heads], axis=1),
        )
    outs, lses = [], []
    mass = mx.zeros(k.shape[:3])
    for out, scores, lse in _blocks(q, k, v, scale, mask, sinks, seed):
        outs.append(out)
        lses.append(lse)
        part = attention_mass(scores, lse, k.shape[1])
        mass = mass + mx.pad(part, [(0, 0), (0, 0), (0, k.shape[2] - part.shape[2])])
    return mx.concatenate(outs, axis=2), mass, mx.concatenate(lses, axis=2)


def _heads(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    sinks: mx.array | None,
    seed: Seed | None,
    ranges: Ranges,
) -> Iterator[dict[str, Any]]:
    """The operands of each KV head of a flat store, as an attention of one head."""
    group = q.shape[1] // len(ranges)
    for h, (start, length) in enumerate(ranges):
        heads = slice(h * group, (h + 1) * group)
        yield {
            "q": q[:, heads],
            "k": k[:, None, start : start + length],
            "v": v[:, None, start : start + length],
            "sinks": None if sinks is None else sinks[heads],
            "seed": None if seed is None else (seed[0][:, heads], seed[1][:, h : h + 1]),
        }


def placed(parts: list[mx.array], ranges: Ranges, slots: int, filler: float) -> mx.array:
    """Each head's columns `[..., N]` at its range of `[..., S]`."""
    whole = mx.full((*parts[0].shape[:-1], slots), filler)
    for part, (start, length) in zip(parts, ranges, strict=True):
        whole[..., start : start + length] = part
    return whole


def _blocks(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
    seed: Seed | None,
) -> Iterator[tuple[mx.array, mx.array, mx.array]]:
    """`attention_with_scores` of a few queries at a time, over the keys that they can see."""
    L, N = q.shape[2], k.shape[2]
    for start in range(0, L, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, L)
        block = block_of(mask, start, end, L, N, own=False)
        yield attention_with_scores(
            q[:, :, start:end],
            k[:, :, : block.keys],
            v[:, :, : block.keys],
            scale=scale,
            mask=block.mask,
            sinks=sinks,
            seed=None if seed is None else (seed[0][:, :, start:end], seed[1]),
        )


def attention_with_scores(
    q: mx.array,
    k: Rows,
    v: Rows,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    seed: Seed | None = None,
    ranges: Ranges | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """See `mlx_h2o.attention.scaled_dot_product_attention_with_scores`."""
    k, v = dense(k), dense(v)
    if ranges is not None:
        parts = _heads(q, k, v, sinks, seed, ranges)
        of_heads = [attention_with_scores(**head, scale=scale, mask=mask) for head in parts]
        return (
            mx.concatenate([out for out, _, _ in of_heads], axis=1),
            placed([scores for _, scores, _ in of_heads], ranges, k.shape[1], -mx.inf),
            mx.concatenate([lse for _, _, lse in of_heads], axis=1),
        )
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
    if seed is not None:
        out, lse = join(out, lse, *seed)
    return out.astype(q.dtype), scores, lse


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
    """See `mlx_h2o.attention.attention_mass`."""
    B, Hq, L, N = scores.shape
    weights = softmax_weights(scores, lse).reshape(B, n_kv_heads, -1, N)
    return weights.sum(axis=2) * (n_kv_heads / Hq)


def softmax_weights(scores: mx.array, lse: mx.array) -> mx.array:
    """exp(scores - lse) `[..., N]`, zero in rows that see nothing (lse minus infinity)."""
    finite = mx.where(lse == -mx.inf, 0.0, lse)
    return mx.exp(scores - finite[..., None])


def apply_mask(scores: mx.array, mask: Mask) -> mx.array:
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
