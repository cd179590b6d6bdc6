"""Which tokens of a conversation its caches still hold: how many KV heads of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_h2o.inspection import bounded_layers, runs_of


@dataclass(frozen=True)
class LayerMemory:
    """What one layer holds of T tokens.

    Attributes:
        layer: Its place in the cache list ("3", or "3.1" within a CacheList).
        heads: Its KV heads.
        held: `[T]` how many of them hold each token.
    """

    layer: str
    heads: int
    held: NDArray[np.int64]


def remembered(cache: Sequence[Any], T: int) -> list[LayerMemory]:
    """What each bounded layer that has seen tokens holds, of the first sequence.

    Args:
        cache: One for each layer of the model.
        T: Tokens of the conversation.
    """
    layers = []
    for place, entry in bounded_layers(cache):
        if entry.empty():
            continue
        held, heads = np.zeros(T, np.int64), 0
        for run in runs_of(entry):
            positions = np.asarray(entry.slots(run).positions)[0]  # [heads, N]
            held += np.bincount(positions.ravel(), minlength=T)[:T]
            heads += len(positions)
        layers.append(LayerMemory(place, heads, held))
    return layers
