"""The definition, in plain mlx ops. Slow where clarity needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Unpack

import mlx.core as mx

from mlx_h2o.attention.backends.operands import Operands, Options, Ranges
from mlx_h2o.slots.packed import AnyRows, PackedRows, dense
from mlx_h2o.slots.softmax import Mask, attention_mass, fast_mask, join, softmax_weights

# Queries whose logits are held at a time where only their sums are needed: bounds [L, N].
QUERY_BLOCK = 256


def pack(rows: mx.array, bits: int, group_size: int) -> PackedRows:
    """See `PackedRows.of`."""
    return PackedRows.of(rows, bits, group_size)


def attention(q: mx.array, k: AnyRows, v: AnyRows, **options: Unpack[Options]) -> mx.array:
    """See `mlx_h2o.attention.ops.scaled_dot_product_attention`."""
    packed = Operands(q, k, v, **options).packed
    call = Operands(q, dense(k), dense(v), **options)
    if call.ranges is not None:
        heads = [attention(h.q, h.k, h.v, **h.options) for h in call.of_heads()]
        return mx.concatenate(heads, axis=1)
    if call.seed is None and not packed and not call.softcap:
        sinks = None if call.sinks is None else call.sinks.astype(q.dtype)
        mask = fast_mask(call.mask, q.dtype)
        return mx.fast.scaled_dot_product_attention(
            q, call.k, call.v, scale=call.scale, mask=mask, sinks=sinks
        )
    return mx.concatenate([out for out, _, _ in _blocks(call)], axis=2)


def attention_with_mass(
    q: mx.array, k: AnyRows, v: AnyRows, **options: Unpack[Options]
) -> tuple[mx.array, mx.array, mx.array]:
    """See `mlx_h2o.attention.ops.scaled_dot_product_attention_with_mass`."""
    call = Operands(q, dense(k), dense(v), **options)
    if call.ranges is not None:
        heads = [attention_with_mass(h.q, h.k, h.v, **h.options) for h in call.of_heads()]
        return (
            mx.concatenate([out for out, _, _ in heads], axis=1),
            placed([mass[:, 0] for _, mass, _ in heads], call.ranges, k.shape[1], 0.0),
            mx.concatenate([lse for _, _, lse in heads], axis=1),
        )
    return mass_of_blocks(_blocks(call), k)


def mass_of_blocks(
    blocks: Iterable[tuple[mx.array, mx.array, mx.array]], k: AnyRows
) -> tuple[mx.array, mx.array, mx.array]:
    """`attention_with_mass` from the outputs, logits and lse of blocks of queries.

    A block has the logits of the first keys, which its queries can attend to.
    """
    outs, lses = [], []
    mass = mx.zeros(k.shape[:3])
    for out, scores, lse in blocks:
        outs.append(out)
        lses.append(lse)
        part = attention_mass(scores, lse, k.shape[1])
        mass = mass + mx.pad(part, [(0, 0), (0, 0), (0, k.shape[2] - part.shape[2])])
    return mx.concatenate(outs, axis=2), mass, mx.concatenate(lses, axis=2)


def placed(parts: list[mx.array], ranges: Ranges, slots: int, filler: float) -> mx.array:
    """Each head's columns `[..., N]` at its range of `[..., S]`.

    Args:
        parts: One array for each KV head.
        ranges: First slot and number of slots of each head.
        slots: The number of slots S.
        filler: The value of slots in no range.
    """
    whole = mx.full((*parts[0].shape[:-1], slots), filler)
    for part, (start, length) in zip(parts, ranges, strict=True):
        whole[..., start : start + length] = part
    return whole


def _blocks(call: Operands[mx.array]) -> Iterator[tuple[mx.array, mx.array, mx.array]]:
    """`attention_with_scores` for a block of queries at a time."""
    for block in call.of_queries(QUERY_BLOCK):
        yield attention_with_scores(block.q, block.k, block.v, **block.options)


def attention_with_scores(
    q: mx.array, k: AnyRows, v: AnyRows, **options: Unpack[Options]
) -> tuple[mx.array, mx.array, mx.array]:
    """See `mlx_h2o.attention.ops.scaled_dot_product_attention_with_scores`."""
    keys, values = dense(k), dense(v)
    call = Operands(q, keys, values, **options)
    if call.ranges is not None:
        heads = [attention_with_scores(h.q, h.k, h.v, **h.options) for h in call.of_heads()]
        return (
            mx.concatenate([out for out, _, _ in heads], axis=1),
            placed([scores for _, scores, _ in heads], call.ranges, k.shape[1], -mx.inf),
            mx.concatenate([lse for _, _, lse in heads], axis=1),
        )
    B, Hq, L, D = q.shape
    Hk, N = keys.shape[1], keys.shape[2]
    # The G query heads of a KV head are stacked along the queries: one matmul, no repeated keys.
    grouped = (q.astype(mx.float32) * call.scale).reshape(B, Hk, -1, D)
    scores = (grouped @ keys.astype(mx.float32).swapaxes(-1, -2)).reshape(B, Hq, L, N)
    scores = apply_mask(softcapped(scores, call.softcap), call.mask)
    lse = mx.logsumexp(scores, axis=-1)
    if call.sinks is not None:
        lse = mx.logaddexp(lse, call.sinks.astype(mx.float32)[:, None])
    weights = softmax_weights(scores, lse).reshape(B, Hk, -1, N)
    out = (weights @ values.astype(mx.float32)).reshape(B, Hq, L, -1)
    if call.seed is not None:
        out, lse = join(out, lse, *call.seed)
    return out.astype(q.dtype), scores, lse


def softcapped(scores: mx.array, softcap: float) -> mx.array:
    """Logits capped softly, c tanh(logits / c), as in Gemma 2; 0 leaves them unchanged."""
    return softcap * mx.tanh(scores / softcap) if softcap else scores


def apply_mask(scores: mx.array, mask: Mask) -> mx.array:
    """Logits `[B, Hq, L, N]` with minus infinity where masked."""
    if mask is None:
        return scores
    if isinstance(mask, str):
        L, N = scores.shape[-2:]
        mask = mx.arange(N) <= mx.arange(N - L, N)[:, None]
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, -mx.inf)
    # Models use the lowest number of their dtype for "masked"; as a summand it would spoil scores.
    hidden = mask <= mx.finfo(mask.dtype).min
    return mx.where(hidden, -mx.inf, scores + mask.astype(mx.float32))
