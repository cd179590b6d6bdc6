"""Kept values, fitted so that attention to the kept rows gives what attention to all rows gave.

Source: the values' least squares of *Fast KV Compaction via Attention Matching* (arXiv 2602.16284,
section 3), here for rows as they are packed and with the remainder beside them. Nothing is added to
a cache: only the kept values change. With queries q_i of the second reading, a head's kept keys k_j
and values v_j, all keys and values k_t and v_t before rows were evicted, and the remainder's logit
r_i and value m, before and after,

    P = softmax over j and the remainder of (q_i.k_j, r_i),
    o_i = attention over t and the remainder of before,

the new values are those of the least

    ||P [v'; m] - o||^2 + sum over j of (ridge + a_j) ||v'_j - v_j||^2.

a_j is the square of the greatest weight that any query of the second reading gave row j, as if one
more query gave it that and wanted its value as it was. Of many queries a part is kept for the fit,
and a row that only others attend to would move freely without it: with a third of the queries
SmolLM2 diverges by 0.29 for 0.04 nats (docs/results/experiments.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_h2o.attention.backends.reference import softcapped
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.layer.layer import Layer
from mlx_h2o.slots.packed import dense
from mlx_h2o.slots.remainder import Remainder
from mlx_h2o.slots.slot_store import Fields, Run

#: The weight of a value as it was, relative to the mean diagonal of P'P. Of 1e-1 to 1e-6, smaller
#: ones diverged less on held-out text, and the last three alike (docs/results/experiments.md).
RIDGE = 1e-5
#: The most queries by which a KV head is fitted, those of its query heads together. All layers'
#: wait in memory until rows were chosen; three times as many diverge hardly less.
MOST_QUERIES = 1024
#: Queries whose weights over all rows are computed at once: these take less memory than the rows.
BLOCK = 128

#: Numbers of a head's rows, `[B, N]`.
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AllRows:
    """The rows of a layer before some are evicted, as they are stored, and the remainder then.

    Attributes:
        heads: The fields of each KV head's rows, `[B, 1, N, ...]`.
        remainder: The remainder; None if no row was evicted before, or the layer keeps none.
    """

    heads: list[Fields]
    remainder: Remainder | None

    @classmethod
    def of(cls, layer: Layer) -> AllRows:
        """The rows that a layer has now."""
        heads = [fields for run in layer.runs for fields in _by_head(layer, run)]
        lost = layer.settings.remainder and any(layer.lost(run) for run in layer.runs)
        return cls(heads, layer.remainder if lost else None)


def fit_values(layer: Layer, before: AllRows, call: AttentionCall, anchors: Sequence[Rows]) -> None:
    """Fit the values that a layer has kept.

    Args:
        layer: The layer, which has evicted some rows.
        before: Its rows before that.
        call: Queries of the second reading `[B, Hq, n, D]`, as the model gives them, with the
            attention's scale and cap.
        anchors: a_j of each KV head's kept rows, `[B, S]`.
    """
    frame = layer.settings.frame
    if frame is not None:  # a query's logits all move alike, so weights stay
        call = call.with_queries(frame.enter_queries(call.q))
    after = layer.remainder if layer.settings.remainder else None
    rests = [_Rest.of(layer, part, call) for part in (before.remainder, after)]
    B, H = call.q.shape[0], layer.store.heads
    queries = (call.q.astype(mx.float32) * call.scale).reshape(B, H, -1, call.q.shape[3])
    fitted = []
    for run in layer.runs:
        values = []
        for head, kept_rows in zip(range(run.first, run.last), _by_head(layer, run), strict=True):
            whole = _dense(layer, before.heads[head])
            own = _dense(layer, kept_rows)
            fits = [
                _fitted(
                    queries[b, head],
                    [rest.at(b, head) for rest in rests],
                    [rows[b, 0] for rows in whole],
                    [rows[b, 0] for rows in own],
                    anchors[head][b],
                    call.softcap,
                )
                for b in range(B)
            ]
            values.append(fits)
        rows = mx.array(np.array(values)).swapaxes(0, 1).astype(layer.types["values"].dtype)
        fitted.append(layer.packing.fields("values", rows))
    for name in fitted[0]:
        layer.store.write(name, [fields[name] for fields in fitted])
    mx.eval(layer.arrays())


def _by_head(layer: Layer, run: Run) -> list[Fields]:
    """The fields of each of a run's heads, `[B, 1, N, ...]`."""
    views = layer.store.views(run)
    return [{name: view[:, i : i + 1] for name, view in views.items()} for i in range(run.heads)]


def _dense(layer: Layer, fields: Fields) -> tuple[mx.array, mx.array]:
    """Dense keys and values, in float32."""
    keys, values = (dense(layer.packing.rows(name, fields)) for name in ("keys", "values"))
    return keys.astype(mx.float32), values.astype(mx.float32)


@dataclass(frozen=True)
class _Rest:
    """A remainder as some queries see it: logits `[B, H, n, 1]` and mean values `[B, H, 1, Dv]`."""

    logits: mx.array
    values: mx.array

    @classmethod
    def of(cls, layer: Layer, remainder: Remainder | None, call: AttentionCall) -> _Rest:
        B, H = call.q.shape[0], layer.store.heads
        shape = B, H, call.q.shape[1] // H * call.q.shape[2], 1
        if remainder is None:
            return cls(mx.full(shape, -mx.inf), mx.zeros((B, H, 1, layer.types["values"].width)))
        orders = layer.settings.saturations(H)
        logits = remainder.column(call.q, call.scale, orders, call.softcap).reshape(shape)
        return cls(logits, remainder.mean_value[:, :, None])

    def at(self, sequence: int, head: int) -> tuple[mx.array, mx.array]:
        """Those of one head of one sequence."""
        return self.logits[sequence, head], self.values[sequence, head]


def _fitted(
    queries: mx.array,
    rests: list[tuple[mx.array, mx.array]],
    whole: list[mx.array],
    kept_rows: list[mx.array],
    anchors: Rows,
    softcap: float,
) -> Rows:
    """One head's values `[S, Dv]`.

    Args:
        queries: Scaled queries `[n, D]`.
        rests: The remainder before and after: logits `[n, 1]`, mean value `[1, Dv]`.
        whole: All keys and values.
        kept_rows: Kept keys and values.
        anchors: a_j, `[S]`.
        softcap: As in `AttentionCall`.
    """
    weights, targets = [], []
    for first in range(0, len(queries), BLOCK):
        some = queries[first : first + BLOCK]
        of_all, of_kept = (
            mx.softmax(
                mx.concatenate(
                    [softcapped(some @ rows[0].T, softcap), rest[0][first : first + BLOCK]], axis=1
                ),
                axis=1,
            )
            for rows, rest in ((whole, rests[0]), (kept_rows, rests[1]))
        )
        out = of_all[:, :-1] @ whole[1] + of_all[:, -1:] @ rests[0][1]
        weights.append(np.array(of_kept[:, :-1]))
        targets.append(np.array(out - of_kept[:, -1:] @ rests[1][1]))
    P, o = np.concatenate(weights), np.concatenate(targets)
    return least_squares(P, o, np.array(kept_rows[1]), RIDGE, anchors)


def least_squares(
    weights: npt.NDArray[Any],
    targets: npt.NDArray[Any],
    start: npt.NDArray[Any],
    ridge: float,
    anchors: npt.NDArray[Any],
) -> npt.NDArray[np.float32]:
    """Values `[S, Dv]` whose weighted sums are nearest to what is wanted, drawn towards a start.

    Args:
        weights: `[n, S]`.
        targets: `[n, Dv]`.
        start: `[S, Dv]`.
        ridge: The weight of the start, relative to the mean diagonal of weights' weights.
        anchors: Further weights of each value's start, `[S]`.
    """
    wide = weights.astype(np.float64)
    gram = wide.T @ wide
    # Rows that no query looks at stay as they are, since even then the matrix has an inverse.
    drawn = ridge * np.trace(gram) / len(gram) + np.finfo(float).tiny + anchors
    moved = np.linalg.solve(gram + np.diag(drawn), wide.T @ (targets - wide @ start))
    return (start + moved).astype(np.float32)
