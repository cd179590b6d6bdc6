"""Kept values, fitted so that attention to the kept rows gives what attention to all rows gave.

Source: the values' least squares of *Fast KV Compaction via Attention Matching* (arXiv 2602.16284,
section 3), here for rows as they are packed and with the remainder beside them. Nothing is added to
a cache: only the kept values change. With queries q_i of the second reading, a
head's kept keys k_j and values v_j, all keys and values k_t and v_t of the prompt, and the
remainder's logit r_i and value m,

    P = softmax over j and the remainder of (q_i.k_j, r_i),    o_i = sum_t softmax_t(q_i.k_t) v_t,

the new values are those of the least ||P [v'; m] - o||^2 + ridge ||v' - v||^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_h2o.attention.backends.reference import softcapped
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.layer.layer import Layer
from mlx_h2o.slots.packed import dense

#: The weight of a value as it was, relative to the mean diagonal of P'P. Of 1e-1 to 1e-6, smaller
#: ones diverged less on held-out text, and the last three alike (docs/results/experiments.md).
RIDGE = 1e-5
#: The most queries by which a KV head is fitted, those of its query heads together.
MOST_QUERIES = 4096
#: Queries whose weights over all rows are held at once.
BLOCK = 512


def fit_values(layer: Layer, keys: mx.array, values: mx.array, call: AttentionCall) -> None:
    """Fit the values that a layer keeps of a prompt.

    Args:
        layer: The layer, which holds some of the prompt's rows, and the others' remainder.
        keys: All of the prompt's keys, `[B, H, T, D]`, as they came.
        values: All of its values, `[B, H, T, Dv]`.
        asked: Queries of the second reading `[B, Hq, n, D]`, with the attention's scale and cap.
    """
    B, H = keys.shape[:2]
    frame, q = layer.settings.frame, call.q
    if frame is not None:  # a query's logits all move alike, so weights stay
        keys, q = frame.enter(keys), frame.enter_queries(q)
    columns = mx.full((B, H, q.shape[1] // H * q.shape[2], 1), -mx.inf)
    means = mx.zeros((B, H, 1, values.shape[-1]))
    if layer.settings.remainder:
        rest, orders = layer.remainder, layer.settings.saturations(H)
        columns = rest.column(q, call.scale, orders, call.softcap).reshape(columns.shape)
        means = rest.mean_value[:, :, None]
    queries = (q.astype(mx.float32) * call.scale).reshape(B, H, columns.shape[2], -1)
    fitted = []
    for run in layer.runs:
        fields = layer.store.views(run)
        stored = [
            dense(layer.packing.rows(name, fields)).astype(mx.float32)
            for name in ("keys", "values")
        ]
        new = [
            _head(
                (queries[at], columns[at], means[at]),
                (stored[0][b, h], stored[1][b, h]),
                (keys[at].astype(mx.float32), values[at].astype(mx.float32)),
                call.softcap,
            )
            for b in range(B)
            for h in range(run.heads)
            for at in ((b, run.first + h),)
        ]
        rows = mx.array(np.stack(new)).reshape(stored[1].shape)
        fitted.append(layer.packing.fields("values", rows.astype(layer.types["values"].dtype)))
    for name in fitted[0]:
        layer.store.write(name, [fields[name] for fields in fitted])


def _head(
    asking: Sequence[mx.array],
    stored: Sequence[mx.array],
    whole: Sequence[mx.array],
    softcap: float,
) -> npt.NDArray[np.float32]:
    """One head's values `[S, Dv]`.

    Args:
        asking: Scaled queries `[n, D]`, the remainder's logits `[n, 1]` and its value `[1, Dv]`.
        kept: Kept keys and values.
        whole: All keys and values.
        softcap: As in `AttentionCall`.
    """
    weights, wanted = [], []
    for first in range(0, len(asking[0]), BLOCK):
        some, rest = (part[first : first + BLOCK] for part in asking[:2])
        of_kept = mx.concatenate([softcapped(some @ stored[0].T, softcap), rest], axis=1)
        of_kept = mx.softmax(of_kept, axis=1)
        of_all = mx.softmax(softcapped(some @ whole[0].T, softcap), axis=1)
        weights.append(np.array(of_kept[:, :-1]))
        wanted.append(np.array(of_all @ whole[1] - of_kept[:, -1:] @ asking[2]))
    return least_squares(
        np.concatenate(weights), np.concatenate(wanted), np.array(stored[1]), RIDGE
    )


def least_squares(
    weights: npt.NDArray[Any], wanted: npt.NDArray[Any], start: npt.NDArray[Any], ridge: float
) -> npt.NDArray[np.float32]:
    """Values `[S, Dv]` whose weighted sums are nearest to what is wanted, drawn towards a start.

    Args:
        weights: `[n, S]`.
        wanted: `[n, Dv]`.
        start: `[S, Dv]`.
        ridge: The weight of the start, relative to the mean diagonal of weights' weights.
    """
    wide = weights.astype(np.float64)
    gram = wide.T @ wide
    # Rows that no query looks at stay as they are, since even then the matrix has an inverse.
    gram[np.diag_indices_from(gram)] += ridge * np.trace(gram) / len(gram) + np.finfo(float).tiny
    moved = np.linalg.solve(gram, wide.T @ (wanted - wide @ start))
    return (start + moved).astype(np.float32)
