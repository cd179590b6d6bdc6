"""Operations on a softmax with a known log-sum-exp (weigh, add a column, merge), and its masks.

The masks here are those of prompt chunks, cut to blocks of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


def softmax_weights(scores: mx.array, lse: mx.array) -> mx.array:
    """exp(scores - lse) `[..., N]`; zero in rows that attend to no key (lse minus infinity)."""
    finite = mx.where(lse == -mx.inf, 0.0, lse)
    return mx.exp(scores - finite[..., None])


def join(
    out: mx.array, lse: mx.array, logits: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    """Attention joined with one more column: out `[B, Hq, L, Dv]` and lse `[B, Hq, L]`.

    Args:
        out: Attention without the column `[B, Hq, L, Dv]`.
        lse: The log-sum-exp of `out`, `[B, Hq, L]`.
        logits: The column's logits `[B, Hq, L]`.
        values: The column's values `[B, Hk, Dv]`.
    """
    joint = mx.logaddexp(lse, logits)
    finite = mx.where(joint == -mx.inf, 0.0, joint)
    before, added = mx.exp(lse - finite)[..., None], mx.exp(logits - finite)[..., None]
    value = mx.repeat(values, out.shape[1] // values.shape[1], axis=1)[:, :, None]
    return (out.astype(mx.float32) * before + value * added).astype(out.dtype), joint


def attention_mass(scores: mx.array, lse: mx.array, n_kv_heads: int) -> mx.array:
    """Attention that each key received; see `mlx_h2o.attention.ops.attention_mass`."""
    B, Hq, L, N = scores.shape
    weights = softmax_weights(scores, lse).reshape(B, n_kv_heads, -1, N)
    return weights.sum(axis=2) * (n_kv_heads / Hq)


#: A mask: none, "causal" (aligned at the end), booleans, or numbers to add.
Mask = mx.array | str | None


@dataclass
class Block:
    """The mask for a block of queries, and how many keys, from the first, they attend to."""

    keys: int
    mask: Mask


def block_of(mask: Mask, start: int, end: int, L: int, N: int, own: bool) -> Block:
    """Cut a mask over L queries and N keys to the queries start to end - 1.

    Args:
        mask: As in `attend`.
        start: First query.
        end: One past the last query.
        L: Queries of the whole call.
        N: Keys of the whole call.
        own: Whether to read only the last L columns of an array mask. The columns before them are
            for the slots of the cache that made the mask; in a batch of caches that is one of them,
            and the others hold more or fewer.
    """
    if mask is None:
        return Block(N, None)
    if isinstance(mask, str):
        return Block(N - L + end, "causal")
    if mask.shape[-2] > 1:
        mask = mask[..., start:end, :]
    if own and mask.shape[-1] > 1:
        mask = mask[..., -L:]
        if N > L:
            visible = mx.ones if mask.dtype == mx.bool_ else mx.zeros
            slots = visible((*mask.shape[:-1], N - L), mask.dtype)
            mask = mx.concatenate([slots, mask], axis=-1)
    return Block(N, mask)


def columns_of(mask: Mask, start: int, end: int, L: int, N: int) -> Mask:
    """The mask of L queries over the keys start to end - 1 of N.

    Args:
        mask: None, "causal" or an array.
        start: The first key.
        end: One past the last key.
        L: Queries.
        N: Keys in all.
    """
    if isinstance(mask, mx.array):
        return mask[..., start:end] if mask.shape[-1] > 1 else mask
    if mask is None or end <= N - L + 1:  # the first query attends to all of them
        return None
    if end == N and end - start >= L:
        return "causal"
    return mx.arange(start, end) <= mx.arange(N - L, N)[:, None]


def fast_mask(mask: Mask, dtype: mx.Dtype) -> Mask:
    """A mask as mx.fast takes it: additive masks in the queries' dtype."""
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        return mask.astype(dtype)
    return mask
