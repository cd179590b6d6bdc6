"""Trials: many settings of a layer's KV heads side by side, token by token, by decode steps.

One bounded layer has a "KV head" for each number of slots, order of the remainder and real KV head.
Budgets may differ from head to head anyway, so the kernels that users run try all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.layer.layer import Layer
from mlx_h2o.layer.layer_factory import open_layer
from mlx_h2o.layer.step import update_and_attend
from mlx_h2o.policies import Policy
from mlx_h2o.slots.remainder import SATURATION

# Tokens whose outputs are held before they are evaluated.
BLOCK = 64
#: Saturations to try: first order, and second order with the usual saturation.
ORDERS = (0.0, SATURATION)


@dataclass(frozen=True)
class Rows:
    """A layer's attention over a text.

    Attributes:
        q: `[B, Hq, T, D]`.
        keys: `[B, H, T, D]`.
        values: `[B, H, T, Dv]`.
        scale: Factor on q.k.
        sinks: Attention-sink logits `[Hq]`, or None.
        softcap: c of logits capped softly, or 0.
    """

    q: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    sinks: mx.array | None = None
    softcap: float = 0.0

    @property
    def length(self) -> int:
        """Number of tokens T."""
        return self.q.shape[2]


def tried(
    rows: Rows, policy: Policy, slots: Sequence[int], orders: Sequence[float], cuts: Sequence[int]
) -> Iterator[tuple[int, mx.array]]:
    """The outputs of every setting, in blocks of tokens.

    Args:
        rows: The layer's attention.
        policy: The eviction policy.
        slots: Numbers of slots to try.
        orders: Saturations of the remainder to try.
        cuts: Positions at which blocks must end.

    Yields:
        The block's first position, and its outputs `[B, slots * orders, Hq, n, Dv]`, evaluated.
    """
    settings = len(slots) * len(orders)
    layer = _layer(rows, policy, slots, orders)
    sinks = None if rows.sinks is None else mx.tile(rows.sinks, settings)
    B, Hq, T, _ = rows.q.shape
    edges = sorted({*range(0, T, BLOCK), *cuts, T})
    for start, end in pairwise(edges):
        q, k, v = (
            _repeated(x[:, :, start:end], settings) for x in (rows.q, rows.keys, rows.values)
        )
        outs = []
        for i in range(end - start):
            one = slice(i, i + 1)
            call = AttentionCall(q[:, :, one], rows.scale, None, sinks, rows.softcap)
            outs.append(update_and_attend(layer, call, k[:, :, one], v[:, :, one]))
        out = mx.concatenate(outs, axis=2).reshape(B, settings, Hq, end - start, -1)
        mx.eval(out, layer.side_state() if layer.decoder is None else [])
        yield start, out


def _layer(rows: Rows, policy: Policy, slots: Sequence[int], orders: Sequence[float]) -> Layer:
    """An empty layer with a head for each setting of each real head, a setting's together."""
    H = rows.keys.shape[1]
    settings = CacheSettings(
        budgets=tuple(b for b in slots for _ in orders for _ in range(H)),
        saturation=tuple(t for _ in slots for t in orders for _ in range(H)),
        policy=policy,
    )
    first = [_repeated(x[:, :, :1], len(slots) * len(orders)) for x in (rows.keys, rows.values)]
    return open_layer(settings, *first)[0]


def _repeated(x: mx.array, count: int) -> mx.array:
    """Heads `[B, H, n, D]` repeated, `[B, count * H, n, D]`."""
    B, H, n, D = x.shape
    return mx.broadcast_to(x[:, None], (B, count, H, n, D)).reshape(B, count * H, n, D)
