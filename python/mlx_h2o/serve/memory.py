"""The bound of KV memory: what a request may take at most, and which requests may run.

What happens when memory is full:

1. A request waits until the most bytes that its caches may ever take are free beside those of the
   running requests (`Ledger.has_room`), first come, first served; then they are reserved. So
   nothing that happens while it runs can exceed the bound. Beyond `--queue` waiting requests the
   next gets 429. One that alone exceeds the bound gets 400.
2. Idle conversations have the rest. When a request begins they make room
   (`conversations.Conversations.make_room`): snapshots that a longer conversation has passed go
   first, then the conversations shrink, those unused longest first, then they leave memory. With
   `--sessions` they are in their files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.most_bytes import most_of_bounded, most_of_own
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.stock_caches import stock_caches

#: The most prompt tokens that go through a model at once (`model.chunk_of`).
LARGEST_CHUNK = 512
#: Tokens of the calls that show the rows of other caches: those of a step, and of a prompt.
TRIALS = (1, 2)
#: Finished answers from which the waiting time for a place is estimated.
RECENT = 16


class CacheBytes(NamedTuple):
    """Bytes of all caches at one moment: of those that requests use, and of idle ones."""

    running: int
    idle: int


class Ledger:
    """Bytes of all conversations, prefixes and running requests.

    The thread that generates writes here. Running and idle caches are measured in one call, and
    everyone who shows bytes reads them here: a cache that leaves a batch and becomes a conversation
    is in one of the two sums, never in both.

    Attributes:
        bound: Bytes for everything; None means no bound.
        current: Bytes of the caches at the last measurement.
        peak: The largest sum of the two so far.
    """

    bound: int | None = None
    current = CacheBytes(0, 0)
    peak: int = 0

    def __init__(self) -> None:
        self._reserved: dict[Hashable, int] = {}
        self._seconds: deque[float] = deque(maxlen=RECENT)

    @property
    def running(self) -> int:
        """The number of running answers."""
        return len(self._reserved)

    @property
    def reserved(self) -> int:
        """The most bytes that running requests may take."""
        return sum(list(self._reserved.values()))

    @property
    def left_for_idle(self) -> int | None:
        """The most bytes that idle conversations may take now; None means no bound."""
        return None if self.bound is None else self.bound - self.reserved

    def has_room(self, need: int) -> bool:
        """Whether so many bytes are free, once idle conversations have made room."""
        return self.bound is None or self.reserved + need <= self.bound

    def reserve(self, owner: Hashable, need: int) -> None:
        """Reserve bytes for one answer; idle conversations must make room before it runs."""
        self._reserved[owner] = need

    def reserved_by(self, owner: Hashable) -> int:
        """The bytes that are reserved for an answer."""
        return self._reserved.get(owner, 0)

    def release(self, owner: Hashable, seconds: float | None = None) -> None:
        """Free an answer's bytes; repeating it changes nothing.

        Args:
            owner: The answer.
            seconds: Seconds since its admission, if it was completed.
        """
        if self._reserved.pop(owner, None) is not None and seconds is not None:
            self._seconds.append(seconds)
        if not self._reserved:
            self.weigh(0, self.current.idle)

    @property
    def retry_after(self) -> int:
        """Estimated seconds until a place is free."""
        seconds = list(self._seconds) or [1.0]
        return max(1, round(sum(seconds) / len(seconds)))

    def weigh(self, running: int, idle: int) -> None:
        """Note the bytes of all caches, measured between two steps.

        Args:
            running: Bytes of the caches that requests use.
            idle: Bytes of all other caches.
        """
        self.peak = max(self.peak, running + idle)
        self.current = CacheBytes(running, idle)


def most_bytes(
    cache: Sequence[Any], model: nn.Module | None = None, chunk: int = LARGEST_CHUNK
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
    layers: list[BoundedKVCache] = []
    others = 0
    stock = dict[str, int]()
    for place, entry in entries(cache):
        if isinstance(entry, BoundedKVCache) and entry.share is not None:
            layers.append(entry)
            continue
        stock = stock or (_most_of_others(model, chunk) if model is not None else {})
        if place not in stock:
            raise ValueError(
                f"Layer {place} has a {type(entry).__name__}, whose bytes are not known before it "
                "is used, so --kv-memory cannot bound them. Omit it and bound each "
                "conversation by --max-kv-size."
            )
        others += stock[place]
    return others + most_of_bounded(layers)


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
            nbytes = most_of_own(entry, chunk)
            if nbytes is not None:
                most[place] = max(nbytes, most.get(place, 0))
    return most
