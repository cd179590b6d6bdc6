"""What a model's caches take at most, before a token has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_h2o.bounded_cache import BoundedKVCache
from mlx_h2o.budget import bytes_for_slots
from mlx_h2o.cache_lists import entries


def most_bytes(cache: Sequence[Any]) -> int:
    """Bytes that a list of caches of one conversation can ever take between two steps.

    Args:
        cache: From `make_prompt_cache`, before its first token.

    Raises:
        ValueError: One of them has no bound that is known beforehand.
    """
    layers: list[list[int]] = []
    for place, entry in entries(cache):
        if not isinstance(entry, BoundedKVCache) or entry.share is None:
            raise ValueError(
                f"Layer {place} has a {type(entry).__name__}, whose bytes are not known before it "
                "is used: --kv-memory is for models of which all layers are bounded. Leave it away "
                "and bound each conversation by --max-kv-size."
            )
        budgets = [entry.settings.budgets or ()]
        budgets += [stage.budgets for stage in entry.settings.filling]
        layers.append([sum(_head_bytes(entry, slots) for slots in stage) for stage in budgets])
    stages = max(map(len, layers))
    return max(sum(layer[min(i, len(layer) - 1)] for layer in layers) for i in range(stages))


def _head_bytes(entry: BoundedKVCache, slots: int) -> int:
    assert entry.share is not None
    remembers = entry.settings.remembers
    return bytes_for_slots(slots, 1, entry.share.widths, entry.policy, remembers)
