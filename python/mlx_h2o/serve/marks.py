"""What a conversation's caches carry through batches and copies: its settings, and asked pins.

What a request asked to be pinned is not what its caches pin in the end: on the server's page more
can be pinned, and let go. So it is written on the caches, as their label.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.storage.pins import Span, among_first


@dataclass(frozen=True)
class Mark:
    """What a list of caches was begun with.

    Attributes:
        label: Of its settings.
        pins: That its requests asked for.
    """

    label: str = ""
    pins: tuple[Span, ...] = ()

    def serves(self, wanted: Mark, count: int) -> bool:
        """Whether caches with this mark may serve a prompt that is to have another.

        What is pinned of a prompt's first tokens decides which of the others were evicted, so it
        must be the same; and pins that were still to come have taken their room already.

        Args:
            wanted: Of the prompt.
            count: Of its tokens the caches know these.
        """
        same = self.pins in (wanted.pins, among_first(wanted.pins, count))
        return same and self.label == wanted.label


def mark(cache: Sequence[Any], as_: Mark) -> None:
    """Write a mark on a list's bounded caches."""
    text = json.dumps([as_.label, as_.pins])
    for _, entry in entries(cache):
        if isinstance(entry, BoundedKVCache):
            entry.label = text


def mark_of(cache: Sequence[Any]) -> Mark:
    """The mark of a list of caches; that of a list without bounded ones is empty."""
    found = {entry.label for _, entry in entries(cache) if isinstance(entry, BoundedKVCache)}
    if len(found) != 1 or not (text := found.pop()):
        return Mark()
    label, pins = json.loads(text)
    return Mark(label, tuple((first, end) for first, end in pins))
