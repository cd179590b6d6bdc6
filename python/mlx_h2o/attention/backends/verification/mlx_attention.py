"""MLX's own attention of few queries over many keys, beside the definition.

Where nothing but the output is asked for, MLX's attention over plain rows is the best there is. On
Apple's GPUs it takes two passes from 1,024 keys (4,096 on small ones), and other kernels from 8,192
keys where eight query heads share a KV head. Both have been wrong: from 1,024 keys with grouped
queries on an M3 Max (mlx#4022, with MLX 0.31.1, closed without a cause), and in batches with the
other (mlx#4431: MLX 0.32.2, mended in 0.32.3). So these are checked as our own are.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_h2o.attention.backends import reference
from mlx_h2o.attention.backends.tiling import MOST_QUERIES
from mlx_h2o.attention.backends.verification.compared import OUT, Error, Pair, Tolerance, worst

#: Keys from which a large Apple GPU takes two passes.
TWO_PASSES = 1024
#: Query heads of a KV head, and keys, from which there is a kernel for them alone.
EIGHT, KEYS_OF_EIGHT = 8, 8192
# Neither is a multiple of what a block of keys holds.
_CASES = TWO_PASSES + 27, KEYS_OF_EIGHT + 13
# A second sequence and a second KV head, which read with the strides of theirs.
_BATCH, _HEADS = 2, 2
# So that few keys have most of the weight.
_SHARPNESS = 3.0
# MLX rounds weights to the model's dtype; over what is tolerated of ours.
_OVER_OURS = 4


@dataclass(frozen=True)
class MLXVariant:
    """What decides which of MLX's kernels attends.

    Attributes:
        dtype: The dtype of queries, keys and values.
        widths: D and Dv.
        group: Query heads for each KV head.
        queries: Their number, L.
        masked: Whether a mask is given; none of one query is causal.
        sinks: Whether there are attention sinks.
    """

    dtype: mx.Dtype
    widths: tuple[int, int]
    group: int
    queries: int
    masked: bool
    sinks: bool

    @classmethod
    def of(
        cls,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> MLXVariant | None:
        """That of a call, or None where MLX takes one pass.

        Args:
            q: `[B, Hq, L, D]`.
            k: `[B, Hk, N, D]`.
            v: `[B, Hk, N, Dv]`.
            mask: As in `mlx_h2o.attention.ops`.
            sinks: `[Hq]`.
        """
        if q.shape[2] > MOST_QUERIES or k.shape[2] < TWO_PASSES:
            return None
        widths, group = (k.shape[3], v.shape[3]), q.shape[1] // k.shape[1]
        masked = isinstance(mask, mx.array) or (mask is not None and q.shape[2] > 1)
        return cls(k.dtype, widths, group, q.shape[2], masked, sinks is not None)

    def __str__(self) -> str:
        parts = [f"MLX's attention of {str(self.dtype).rpartition('.')[2]} over many keys"]
        parts += ["{} and {} wide".format(*self.widths), f"{self.group} query heads a KV head"]
        parts += [f"{self.queries} queries"] + ["a mask"] * self.masked + ["sinks"] * self.sinks
        return ", ".join(parts)


def check(variant: MLXVariant) -> Error:
    """Run MLX's attention on the default device, beside the definition on the CPU."""
    counts = _CASES if variant.group == EIGHT else _CASES[:1]
    return max((_check(variant, keys) for keys in counts), key=lambda error: error.size)


def _check(variant: MLXVariant, keys: int) -> Error:
    rng = np.random.default_rng(keys)
    (D, Dv), heads, L = variant.widths, _HEADS * variant.group, variant.queries

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, np.float32))

    with mx.stream(mx.cpu):
        q = (_SHARPNESS * normal(_BATCH, heads, L, D)).astype(variant.dtype)
        k = normal(_BATCH, _HEADS, keys, D).astype(variant.dtype)
        v = normal(_BATCH, _HEADS, keys, Dv).astype(variant.dtype)
        sinks = normal(heads).astype(variant.dtype) if variant.sinks else None
        mask = mx.array(rng.random((1, 1, L, keys)) > 1 / 3) if variant.masked else None
        mx.eval(q, k, v)
    found = reference.attention(q, k, v, scale=D**-0.5, mask=mask, sinks=sinks)
    mx.eval(found)
    with mx.stream(mx.cpu):
        rows = (x.astype(mx.float32) for x in (q, k, v))
        own = None if sinks is None else sinks.astype(mx.float32)
        expected, _, _ = reference.attention_with_scores(*rows, scale=D**-0.5, mask=mask, sinks=own)
        mx.eval(expected)
    ours = OUT[variant.dtype]
    tolerance = Tolerance(_OVER_OURS * ours.absolute, _OVER_OURS * ours.relative)
    return worst({f"output of {keys} keys": Pair(found, expected, tolerance)})
