"""Attention over rows of different kinds: each kind by itself, joined by their lse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from mlx_h2o.backends.reference import Seed, attention_mass, softmax_weights
from mlx_h2o.masks import Mask, block_of, columns_of
from mlx_h2o.packed import AnyRows, JoinedRows, first_rows

# Queries that are joined at a time: what is held of each part, in float32, stays small.
BLOCK = 32


class Joined:
    """Another backend's attention, over each kind of rows by itself.

    Its methods are those of `mlx_h2o.attention`; calls are (q, k, v) and, by name, scale, mask,
    sinks and seed. Ranges are refused before.
    """

    def __init__(self, backend: Any):
        self._backend = backend

    def attention_with_scores(
        self, q: mx.array, k: AnyRows, v: AnyRows, *, ranges: None = None, **call: Any
    ) -> tuple[mx.array, mx.array, mx.array]:
        """See `mlx_h2o.attention.scaled_dot_product_attention_with_scores`."""
        parts = _parts(self._backend.attention_with_scores, q, k, v, **call)
        out, lse = _joined(parts)
        return out.astype(q.dtype), mx.concatenate([scores for _, scores, _ in parts], axis=-1), lse

    def attention(
        self,
        q: mx.array,
        k: AnyRows,
        v: AnyRows,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
        seed: Seed | None,
        ranges: None = None,
    ) -> mx.array:
        """See `mlx_h2o.attention.scaled_dot_product_attention`."""
        outs = []
        for block in _blocks(q, k, v, mask, seed):
            # The form with masses hands out lse and writes no logits.
            parts = _parts(self._backend.attention_with_mass, **block, scale=scale, sinks=sinks)
            outs.append(_joined(parts)[0].astype(q.dtype))
        return mx.concatenate(outs, axis=2)

    def attention_with_mass(
        self,
        q: mx.array,
        k: AnyRows,
        v: AnyRows,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
        seed: Seed | None,
        ranges: None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """See `mlx_h2o.attention.scaled_dot_product_attention_with_mass`."""
        outs, lses = [], []
        mass = mx.zeros(k.shape[:3])
        for block in _blocks(q, k, v, mask, seed):
            out, scores, lse = self.attention_with_scores(**block, scale=scale, sinks=sinks)
            outs.append(out)
            lses.append(lse)
            part = attention_mass(scores, lse, k.shape[1])
            mass = mass + mx.pad(part, [(0, 0), (0, 0), (0, k.shape[2] - part.shape[2])])
        return mx.concatenate(outs, axis=2), mass, mx.concatenate(lses, axis=2)


def _parts(
    attend: Callable[..., tuple[mx.array, mx.array, mx.array]],
    q: mx.array,
    k: AnyRows,
    v: AnyRows,
    *,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
    seed: Seed | None,
) -> list[tuple[mx.array, mx.array, mx.array]]:
    """What `attend` returns (out first, lse last) over each kind of rows."""
    assert isinstance(k, JoinedRows)
    assert isinstance(v, JoinedRows)
    parts: list[tuple[mx.array, mx.array, mx.array]] = []
    start = 0
    for keys, values in zip(k.parts, v.parts, strict=True):
        end = start + keys.shape[2]
        if start == end:
            continue
        parts.append(
            attend(
                q,
                keys,
                values,
                scale=scale,
                mask=columns_of(mask, start, end, q.shape[2], k.shape[2]),
                # Once: they are columns of the whole.
                sinks=None if parts else sinks,
                seed=None if parts else seed,
            )
        )
        start = end
    return parts


def _joined(parts: list[tuple[mx.array, mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Out, float32, and lse over the columns of all parts."""
    lse = parts[0][2]
    for _, _, other in parts[1:]:
        lse = mx.logaddexp(lse, other)
    out = mx.zeros(parts[0][0].shape)
    for of_part, _, part_lse in parts:
        out = out + of_part.astype(mx.float32) * softmax_weights(part_lse[..., None], lse)
    return out, lse


def _blocks(
    q: mx.array, k: AnyRows, v: AnyRows, mask: Mask, seed: Seed | None
) -> Iterator[dict[str, Any]]:
    """The operands of a few queries at a time, over the keys that they can see."""
    L, N = q.shape[2], k.shape[2]
    for start in range(0, L, BLOCK):
        end = min(start + BLOCK, L)
        block = block_of(mask, start, end, L, N, own=False)
        yield {
            "q": q[:, :, start:end],
            "k": first_rows(k, block.keys),
            "v": first_rows(v, block.keys),
            "mask": block.mask,
            "seed": None if seed is None else (seed[0][:, :, start:end], seed[1]),
        }
