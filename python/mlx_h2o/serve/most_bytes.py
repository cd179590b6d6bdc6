"""The most bytes of a model's caches, computed before any token has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.budgets.cost import bytes_by_stage
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.integration import routing
from mlx_h2o.integration.stock_caches import stock_caches

#: Prompt tokens that go through a model at once, unless the server says otherwise.
USUAL_CHUNK = 2048
#: Tokens of the calls that show the rows of other caches: those of a step, and of a prompt.
TRIALS = (1, 2)


def most_bytes(
    cache: Sequence[Any], model: nn.Module | None = None, chunk: int = USUAL_CHUNK
) -> int:
    """The most bytes that a conversation's list of caches can ever take between two steps.

    In a batch of several conversations each takes no more than by itself.

    Args:
        cache: From `make_prompt_cache`, before its first token.
        model: The caches' model; not needed if all of them are bounded.
        chunk: Prompt tokens that go through the model at once.

    Raises:
        ValueError: One of them has no bound that is known beforehand.
    """
    layers: list[list[int]] = []
    others = 0
    known = dict[str, int]()
    for place, entry in entries(cache):
        if isinstance(entry, BoundedKVCache) and entry.share is not None:
            layers.append(bytes_by_stage(entry.settings, entry.share.widths))
            continue
        known = known or (_most_of_others(model, chunk) if model is not None else {})
        if place not in known:
            raise ValueError(
                f"Layer {place} has a {type(entry).__name__}, whose bytes are not known before it "
                "is used, so --kv-memory cannot bound them. Omit it and bound each "
                "conversation by --max-kv-size."
            )
        others += known[place]
    stages = max(map(len, layers), default=0)
    sums = [sum(layer[min(i, len(layer) - 1)] for layer in layers) for i in range(stages)]
    return others + max(sums, default=0)


def _most_of_others(model: nn.Module, chunk: int) -> dict[str, int]:
    """The most bytes of the model's own caches of known kinds, by their places.

    They take in a token or two that are never computed: shapes become known all the same.
    """
    routing.install()
    most = dict[str, int]()
    for count in TRIALS:
        caches = stock_caches(model)
        model(mx.zeros((1, count), mx.int32), cache=caches)
        for place, entry in entries(caches):
            nbytes = _most_of(entry, chunk)
            if nbytes is not None:
                most[place] = max(nbytes, most.get(place, 0))
    return most


def _most_of(entry: Any, chunk: int) -> int | None:
    """The most bytes of one of mlx-lm's caches; None if they grow, or are not known.

    Args:
        entry: A cache that has been used.
        chunk: The most tokens that come at once.
    """
    kind = type(entry)
    if kind is ArraysCache:
        return int(entry.nbytes)  # each token overwrites the whole cache
    if kind is KVCache and entry.keys is None:
        return 0  # the model does not use it
    if kind is RotatingKVCache:
        # Each token of a chunk sees the whole window; rows that no later token sees go with the
        # next.
        return _row_bytes(entry) * (int(entry.max_size) + chunk - 1)
    if kind is ChunkedKVCache:
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
