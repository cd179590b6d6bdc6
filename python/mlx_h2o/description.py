"""What a list of caches bounds, and what it does not, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.bounded_cache import BoundedKVCache
from mlx_h2o.cache_lists import entries
from mlx_h2o.remainder import SATURATION


@dataclass
class LayerDescription:
    """One entry of a model's cache list.

    Attributes:
        layer: Its place in the list ("3", or "3.1" within a CacheList).
        kind: The cache's class.
        bounded: Whether its memory has a bound.
        reason: Why, or why not.
        budgets: Slots per KV head of a bounded cache, once known.
        nbytes: Bytes held now.
    """

    layer: str
    kind: str
    bounded: bool
    reason: str
    budgets: list[int] | None
    nbytes: int

    def __str__(self) -> str:
        state = "bounded" if self.bounded else "NOT bounded"
        return f"layer {self.layer}: {self.kind}, {state}: {self.reason} ({self.nbytes:,} bytes)"


def describe(cache: list[Any]) -> list[LayerDescription]:
    """Per layer what is bounded and what is not, and why."""
    return [_described(layer, entry) for layer, entry in entries(cache)]


def _described(layer: str, entry: Any) -> LayerDescription:
    name = type(entry).__name__
    try:
        nbytes = entry.nbytes
    except (AttributeError, NotImplementedError):
        nbytes = 0
    if isinstance(entry, BoundedKVCache):
        policy = entry.policy.name
        answer = "evicted tokens go on answering" if entry.answers else "no remainder"
        if not entry.attending:
            answer += ", as plain rows" if entry.answers else ""
        elif entry.answers:
            answer += _saturation(entry)
        sizes = entry.budgets or [entry.settings.max_size or 0]
        framed = " in a frame" if entry.frame else ""
        spread = f"{sizes[0]}" if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
        reason = f"{spread} slots a KV head{entry.packing}{framed}, policy {policy}, {answer}"
        if entry.settings.rope:
            reason += ", positions without gaps"
        if entry.sharers > 1:
            reason += f", attended to by {entry.sharers} layers"
        if entry.settings.filling:
            reason += ", shared out by the profile when the memory is full"
        if entry.choice:
            reason += f" (chosen: {entry.choice})"
        return LayerDescription(layer, name, True, reason, entry.budgets, nbytes)
    if isinstance(entry, mlx_lm_cache.RotatingKVCache):
        reason = f"the model's own sliding window of {entry.max_size} tokens"
        return LayerDescription(layer, name, True, reason, None, nbytes)
    if isinstance(entry, mlx_lm_cache.ArraysCache):
        reason = "a state of fixed size, not a list of tokens"
        return LayerDescription(layer, name, True, reason, None, nbytes)
    if isinstance(entry, mlx_lm_cache.ChunkedKVCache):
        reason = f"the model's own chunks of {entry.chunk_size} tokens"
        return LayerDescription(layer, name, True, reason, None, nbytes)
    reason = "a cache of the model's own kind, left as it is; it may grow with the conversation"
    return LayerDescription(layer, name, False, reason, None, nbytes)


def _saturation(entry: BoundedKVCache) -> str:
    """What is unusual about the order in which a cache's remainder answers."""
    ts = entry.settings.config()["saturation"]
    if ts == SATURATION:
        return ""
    if isinstance(ts, float):
        return f" with saturation {ts:g}"
    return f" with saturation {min(ts):g} to {max(ts):g}"
