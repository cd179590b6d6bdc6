"""Attention Matching: fewer keys, a bias for each, and new values, fitted to the attention.

Source: *Fast KV Compaction via Attention Matching*, https://arxiv.org/abs/2602.16284, and
https://github.com/adamzweiger/compaction (AM-HighestAttnKeys). A prompt is read, and read again as
if to repeat it, which gives reference queries. Each KV head keeps the keys with the greatest root
mean square of attention. Their biases let the kept keys' mass match the whole cache's, by
non-negative least squares; their values let the outputs match, by least squares. Heads have even
slots here; the paper also has uneven ones, computed for each model.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache

from benchmarks.board.column_cache import ELEMENT, ColumnCache, kinds_of
from benchmarks.board.reading import plain, through
from benchmarks.board.rivals import Rival
from benchmarks.board.tasks import Task
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.compression.twice import REPEAT
from mlx_h2o.evaluate.reader import Reader, no_progress
from mlx_h2o.hosts.stock_caches import stock_caches

Array = npt.NDArray[np.float32]

#: Steps of the non-negative least squares, and the least and the greatest weight of a key.
STEPS, LEAST, MOST = 400, 1e-6, 1e4
#: Ridge of the values' least squares, relative to the mean diagonal.
RIDGE = 1e-4


class MatchedCache(ColumnCache):
    """One layer: matched rows, then all later ones."""

    @property
    def counted(self) -> int:
        return super().counted + (0 if self.bias is None else self.bias.size * ELEMENT)


class QueryRecorder(ColumnCache):
    """One layer in the second reading: it keeps the queries.

    Args:
        first: The layer's full cache.
    """

    def __init__(self, first: KVCache):
        super().__init__()
        assert first.keys is not None
        assert first.values is not None
        keys, values = (x[:, :, : first.offset] for x in (first.keys, first.values))
        self.hold(keys, values, mx.zeros(keys.shape[:3]), first.offset)
        self.queries: list[mx.array] = []
        self.scale = 1.0

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        self.queries.append(call.q)
        self.scale = call.scale
        return super().look(call, keys, values)


def matched(queries: Array, keys: Array, values: Array, slots: int) -> tuple[Array, Array, Array]:
    """One head's fewer rows.

    Args:
        queries: Reference queries, scaled, `[n, D]`.
        keys: `[T, D]`.
        values: `[T, Dv]`.
        slots: How many rows stay.

    Returns:
        Keys `[slots, D]`, values `[slots, Dv]` and biases `[slots]`.
    """
    logits = queries @ keys.T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)  # so the mass to be met is 1 for each query
    best = np.sort(np.argsort(-np.square(weights).mean(axis=0))[:slots])
    chosen = weights[:, best]
    factors = nonnegative(chosen, np.ones(len(chosen), np.float32))
    mixed = chosen * factors
    mixed /= mixed.sum(axis=1, keepdims=True)
    gram = mixed.T @ mixed
    gram += RIDGE * np.trace(gram) / slots * np.eye(slots, dtype=np.float32)
    # The ridge draws towards the values as they are, not towards nothing.
    error = weights @ values - mixed @ values[best]
    fitted = values[best] + np.linalg.solve(gram, mixed.T @ error)
    return keys[best], fitted.astype(np.float32), np.log(factors)


def nonnegative(matrix: Array, target: Array) -> Array:
    """Weights within bounds whose product with a matrix is nearest to a target.

    Accelerated projected gradient (Nesterov), from 1.

    Args:
        matrix: `[n, slots]`.
        target: `[n]`.
    """
    gram, aim = matrix.T @ matrix, matrix.T @ target
    rate = 1 / max(float(np.linalg.norm(gram, 2)), LEAST)
    weights = ahead = np.ones(len(aim), np.float32)
    for step in range(STEPS):
        new = np.clip(ahead - rate * (gram @ ahead - aim), LEAST, MOST).astype(np.float32)
        ahead = new + step / (step + 3) * (new - weights)
        weights = new
    return weights


def compacted(reader: Reader, task: Task, share: float) -> list[Any]:
    """Caches of a prompt's matched rows; the task has one row.

    Args:
        reader: The model.
        task: One row.
        share: The part of the bytes.

    Raises:
        ValueError: The bytes are too few, or the model has other layers.
    """
    kinds = kinds_of(reader.model)
    tokens = mx.array(task.prompts)
    full = stock_caches(reader.model)
    reader.model(tokens, cache=full)
    recorders = [QueryRecorder(entry) for entry in full]
    repeat = mx.array([reader.encode(REPEAT)])
    mx.eval(reader.model(mx.concatenate([repeat, tokens], axis=1), cache=recorders)[:, -1])
    rows_per_head = int(share * plain(reader.model, tokens.shape[1])) // sum(
        kind.heads for kind in kinds
    )
    made = []
    for kind, entry in zip(kinds, recorders, strict=True):
        slots = rows_per_head // ((kind.widths.key + kind.widths.value + 1) * ELEMENT)
        made.append(_layer(entry, slots, tokens.shape[1]))
    no_progress(tokens.size)
    return made


def _layer(entry: QueryRecorder, slots: int, T: int) -> MatchedCache:
    """A layer's matched rows."""
    if slots < 1:
        raise ValueError("not one slot fits into the bytes")
    assert entry.keys is not None
    assert entry.values is not None
    (keys, values) = (np.array(x[0, :, :T]) for x in (entry.keys, entry.values))
    reference_queries = mx.concatenate(entry.queries, axis=2)[0].astype(mx.float32) * entry.scale
    H = len(keys)
    queries = np.array(reference_queries).reshape(H, -1, reference_queries.shape[-1])
    rows = [matched(queries[h], keys[h], values[h], slots) for h in range(H)]
    layer = MatchedCache()
    k, v, bias = (mx.array(np.stack(part))[None] for part in zip(*rows, strict=True))
    layer.hold(k, v, bias, T)
    return layer


def rival() -> Rival:
    """Attention Matching on the board."""
    return Rival(
        "Attention Matching (from the paper)",
        "https://github.com/adamzweiger/compaction",
        "keys of greatest attention, queries of a repetition, even slots, a bias of 2 bytes",
        through(compacted, one_by_one=True),
        prompts_only=True,
    )
