"""The most bytes that caches can ever take between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlx_h2o.budgets.cost import bytes_by_stage
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.hosts.loaded import is_exactly


def most_of_bounded(caches: Iterable[BoundedKVCache]) -> int:
    """The most bytes of a model's bounded caches, for one sequence; each knows its share."""
    layers = [bytes_by_stage(c.settings, c.share.widths) for c in caches if c.share is not None]
    stages = max(map(len, layers), default=0)
    sums = (sum(layer[min(i, len(layer) - 1)] for layer in layers) for i in range(stages))
    return max(sums, default=0)


def most_of_own(entry: Any, chunk: int = 1) -> int | None:
    """The most bytes of one of a library's caches; None if they grow, or are not known.

    Args:
        entry: A cache that has been used.
        chunk: The most tokens that come at once.
    """
    if is_exactly(entry, "ArraysCache"):
        return int(entry.nbytes)  # each token overwrites the whole cache
    if is_exactly(entry, "KVCache") and entry.keys is None:
        return 0  # the model does not use it
    if is_exactly(entry, "RotatingKVCache"):
        # Each token of a chunk sees the whole window; rows that no later token sees go with the
        # next.
        return _row_bytes(entry) * (int(entry.max_size) + chunk - 1)
    if is_exactly(entry, "ChunkedKVCache"):
        # It is trimmed before a chunk comes, and grows by the whole steps that hold the chunk.
        steps = -(-chunk // int(entry.step)) * int(entry.step)
        return _row_bytes(entry) * (int(entry.chunk_size) + chunk + steps)
    return None


def _row_bytes(entry: Any) -> int:
    """Bytes of one token's keys and values in a plain cache; 0 if the model does not use it."""
    if entry.keys is None:
        return 0
    rows: int = entry.keys.shape[2]
    return int(entry.nbytes) // rows
