"""A run's rows as attention and policies see them: slots, then the recent window."""

from __future__ import annotations

import mlx.core as mx

from mlx_h2o.layer.layer import Layer
from mlx_h2o.policies import Slots, selection
from mlx_h2o.slots.packed import AnyRows, dense, value_lengths
from mlx_h2o.slots.pins import true_positions
from mlx_h2o.slots.slot_store import Fields, Run


def rows_of(layer: Layer, run: Run, fields: Fields) -> tuple[AnyRows, AnyRows]:
    """Keys and values of a run.

    Args:
        layer: The layer that holds them.
        run: One of its runs.
        fields: The fields of the run's slots, `[B, heads, N, ...]`.

    Returns:
        `[B, heads, M, D]` and `[B, heads, M, Dv]`; M is N plus the tokens in the recent window.
    """
    keys, values = (layer.packing.rows(name, fields) for name in ("keys", "values"))
    window = layer.window
    if window is None:
        return keys, values
    views = window.views(run.first, run.last, layer.offset)
    return window.rows("keys", keys, views), window.rows("values", values, views)


def ranked_of(layer: Layer, run: Run, fields: Fields) -> Fields:
    """Positions, scores and value lengths (where kept) of the rows of `rows_of`: `[B, heads, M]`.

    Args:
        layer: The layer that holds the rows.
        run: One of its runs.
        fields: The fields of all rows attended to, `[B, heads, N, ...]`.
    """
    if layer.window is None:
        return fields
    views = layer.window.views(run.first, run.last, layer.offset)
    return {
        name: mx.concatenate([fields[name], views[name]], axis=2)
        for name in ("positions", "scores", "value_lengths")
        if name in fields
    }


def evictable_of(layer: Layer, run: Run, positions: mx.array) -> mx.array:
    """Which of a run's rows are not protected.

    Args:
        layer: The layer that holds the rows.
        run: One of its runs.
        positions: The rows' positions as stored, `[B, heads, M]`.
    """
    recent = layer.policy.recent_slots(layer.budget_of(run))
    return selection.evictable_slots(positions, layer.offset, layer.policy.sink, recent)


def slots_of(layer: Layer, run: Run, fields: Fields, evicted: int) -> Slots:
    """A run's rows as a policy sees them.

    Args:
        layer: The layer that holds the rows.
        run: One of its runs.
        fields: The fields of its slots, `[B, heads, N, ...]`.
        evicted: Tokens that each head has evicted.
    """
    ranked = ranked_of(layer, run, fields)
    stored, scores = ranked["positions"], ranked.get("scores")
    positions = true_positions(stored)
    of_keys, of_values = rows_of(layer, run, fields)
    lengths = ranked.get("value_lengths")
    if lengths is None and layer.policy.uses_value_lengths:
        lengths = value_lengths(of_values)
    return Slots(
        keys=dense(of_keys),
        values=dense(of_values),
        positions=positions,
        scores=mx.zeros(positions.shape) if scores is None else scores,
        offset=layer.offset,
        evictable=evictable_of(layer, run, stored),
        evicted=evicted,
        evicted_mean_key=layer.remainder.mean_key[:, run.first : run.last],
        value_lengths=lengths,
        aged_from=layer.aged_from,
    )
