"""Turns: how much of what was attended to before still counts.

Scores, positions and ages go on from turn to turn by themselves. `new_turn` shortens the memory of
the scores: they then speak of the last `carry` times as many steps as before, at the mean mass that
a step gave, and older tokens count as no older than that. So masses and ages shrink together, and
mass per step still ranks an old token fairly beside a new one. With 1 nothing changes; with 0 all
that is held is as if it had come just now.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_h2o import checks
from mlx_h2o.layer import Layer
from mlx_h2o.pins import true_positions

#: What `carry` may be called where nothing of the past is to count.
RESET = "reset"


def checked_carry(carry: float | str) -> float:
    """A part of the past, from 0 to 1.

    Raises:
        ValueError: It is none.
    """
    part = 0.0 if isinstance(carry, str) and carry == RESET else carry
    try:
        number = checks.finite("carry", float(part) if isinstance(part, str) else part)
    except ValueError:
        number = -1
    if not 0 <= number <= 1:
        raise ValueError(f'carry must be a number from 0 to 1, or "{RESET}"; got {carry!r}.')
    return number


def new_turn(layer: Layer, carry: float) -> None:
    """Begin a turn; steps before it cannot be taken back any more.

    Args:
        layer: That has tokens.
        carry: How much of the past counts, from 0 to 1.
    """
    if carry == 1 or not layer.offset:
        return
    before = layer.aged_from
    after = layer.offset - int(carry * (layer.offset - before))
    # Some step is always spoken of, or masses per step would be none.
    layer.begin_turn(min(after, layer.offset - 1))
    if not layer.policy.needs_attention:
        return

    def carried(scores: mx.array, positions: mx.array) -> mx.array:
        ages, ages_after = (
            (layer.offset - mx.maximum(positions, begun)).astype(mx.float32)
            for begun in (before, after)
        )
        return layer.policy.carried(scores, ages, ages_after, carry)

    store, window = layer.store, layer.window
    views = [(store.view(run, "scores"), store.view(run, "positions")) for run in layer.runs]
    layer.write_scores([carried(scores, true_positions(at)) for scores, at in views])
    if window is not None and window.length:
        newest = window.views(0, layer.runs[-1].last, layer.offset)
        layer.write_newest_scores(carried(newest["scores"], newest["positions"]))
