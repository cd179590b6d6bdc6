"""How spread out each layer's attention is: its entropy, and the mass of its strongest tenth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.evaluate.reader import Reader
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.recorder import LookingCache, Watcher, full_attention, looked_through

#: The part of the keys whose mass is the concentration.
STRONGEST = 0.1
# Earlier queries see too few keys to tell whether attention is spread out.
FIRST_QUERY = 32


@dataclass(frozen=True)
class Shape:
    """The shape of one layer's attention, means over queries and heads.

    Attributes:
        entropy: Entropy in nats, divided by that of even attention to as many keys: 0 to 1.
        concentration: The share of the mass that the strongest tenth of the keys gets.
    """

    entropy: float
    concentration: float


class _Shaping(LookingCache):
    """A cache that sees one layer's queries and keys."""

    def __init__(self, shapes: list[Shape]):
        self.shapes = shapes

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Full attention; its shape is noted. Arguments as in `LookingCache`."""
        self.shapes.append(shape_of(call.q, keys, call.scale))
        return full_attention(call.q, keys, values, call.scale, call.sinks)


def shape_of(q: mx.array, keys: mx.array, scale: float) -> Shape:
    """The shape of causal attention.

    Args:
        q: `[B, Hq, T, D]`.
        keys: `[B, Hk, T, D]`.
        scale: Factor on q.k.
    """
    B, Hq, T, D = q.shape
    H = keys.shape[1]
    grouped = q.astype(mx.float32).reshape(B, H, Hq // H, T, D)[..., FIRST_QUERY:, :] * scale
    visible = mx.arange(T) <= mx.arange(FIRST_QUERY, T)[:, None]
    logits = grouped @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
    weights = mx.softmax(mx.where(visible, logits, -mx.inf), axis=-1)
    counts = mx.arange(FIRST_QUERY + 1, T + 1)
    entropy = -(weights * mx.log(mx.maximum(weights, 1e-30))).sum(axis=-1) / mx.log(counts)
    ordered = -mx.sort(-weights, axis=-1)
    strongest = mx.arange(T) < mx.ceil(STRONGEST * counts)[:, None]
    concentration = mx.where(strongest, ordered, 0).sum(axis=-1)
    return Shape(*(cast(float, x.mean().item()) for x in (entropy, concentration)))


def shapes_of(model: nn.Module, tokens: mx.array) -> list[Shape]:
    """The shape of attention in each layer with a plain cache, on a text `[B, T]`.

    Raises:
        ValueError: The model computes attention by itself.
    """
    routing.install()
    shapes: list[Shape] = []
    mx.eval(looked_through(model, tokens, Watcher(), lambda _: _Shaping(shapes))[:, -1, :1])
    if not shapes:
        raise ValueError("This model attends by itself: the shape of its attention is not seen.")
    return shapes


def text_of(reader: Reader, length: int) -> mx.array:
    """The beginning of the text, `[1, length]`."""
    return mx.array([[*reader.first, *reader.prose(length - len(reader.first), 0)]])


def budgets_by_entropy(shapes: list[Shape], mean: int, least: int) -> list[int]:
    """Slots of each layer, `mean` on average: `least` each, the rest in proportion to entropy.

    Args:
        shapes: The layers' shapes.
        mean: Slots of a layer, on average.
        least: The fewest slots of a layer.
    """
    whole = sum(shape.entropy for shape in shapes)
    free = (mean - least) * len(shapes)
    shares = [free * shape.entropy / whole for shape in shapes]
    slots = [int(share) for share in shares]
    rests = sorted(range(len(slots)), key=lambda i: slots[i] - shares[i])
    for i in rests[: free - sum(slots)]:
        slots[i] += 1
    return [least + count for count in slots]
