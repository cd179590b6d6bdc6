"""Attention over rows of different kinds: each kind by itself, joined by their lse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from mlx_h2o.backends.reference import QUERY_BLOCK, Seed, attention_mass, softmax_weights
from mlx_h2o.masks import Mask, block_of, columns_of
from mlx_h2o.packed import AnyRows, JoinedRows, first_rows


def attention_with_scores(
    backend: Any,
    q: mx.array,
    k: AnyRows,
    v: AnyRows,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    seed: Seed | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """See `mlx_h2o.attention.scaled_dot_product_attention_with_scores`; `backend` attends."""
    L, N = q.shape[2], k.shape[2]
    assert isinstance(k, JoinedRows)
    assert isinstance(v, JoinedRows)
    outs: list[mx.array] = []
    scores, lses, start = [], [], 0
    for keys, values in zip(k.parts, v.parts, strict=True):
        end = start + keys.shape[2]
        if start == end:
            continue
        out, part, lse = backend.attention_with_scores(
            q,
            keys,
            values,
            scale=scale,
            mask=columns_of(mask, start, end, L, N),
            # Once: they are columns of the whole.
            sinks=None if outs else sinks,
            seed=None if outs else seed,
        )
        outs.append(out.astype(mx.float32))
        scores.append(part)
        lses.append(lse)
        start = end
    lse = lses[0]
    for other in lses[1:]:
        lse = mx.logaddexp(lse, other)
    whole = mx.zeros(outs[0].shape)
    for out, part_lse in zip(outs, lses, strict=True):
        whole = whole + out * softmax_weights(part_lse[..., None], lse)
    return whole.astype(q.dtype), mx.concatenate(scores, axis=-1), lse


def attention(
    backend: Any,
    q: mx.array,
    k: AnyRows,
    v: AnyRows,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    seed: Seed | None = None,
) -> mx.array:
    """See `mlx_h2o.attention.scaled_dot_product_attention`."""
    blocks = _blocks(backend, q, k, v, scale, mask, sinks, seed)
    return mx.concatenate([out for out, _, _ in blocks], axis=2)


def attention_with_mass(
    backend: Any,
    q: mx.array,
    k: AnyRows,
    v: AnyRows,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    seed: Seed | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """See `mlx_h2o.attention.scaled_dot_product_attention_with_mass`."""
    outs, lses = [], []
    mass = mx.zeros(k.shape[:3])
    for out, scores, lse in _blocks(backend, q, k, v, scale, mask, sinks, seed):
        outs.append(out)
        lses.append(lse)
        part = attention_mass(scores, lse, k.shape[1])
        mass = mass + mx.pad(part, [(0, 0), (0, 0), (0, k.shape[2] - part.shape[2])])
    return mx.concatenate(outs, axis=2), mass, mx.concatenate(lses, axis=2)


def _blocks(
    backend: Any,
    q: mx.array,
    k: AnyRows,
    v: AnyRows,
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
            backend,
            q[:, :, start:end],
            first_rows(k, block.keys),
            first_rows(v, block.keys),
            scale=scale,
            mask=block.mask,
            sinks=sinks,
            seed=None if seed is None else (seed[0][:, :, start:end], seed[1]),
        )
