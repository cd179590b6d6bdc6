"""Marks of caches, which go with them through batches and copies: settings and requested pins.

The pins that a request asked for are not always those of its caches in the end: the server's page
can pin more tokens and unpin others. So the requested pins are written on the caches, as their
label.
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
    """The settings and requested pins with which a list of caches was begun.

    Attributes:
        label: The label of the settings.
        pins: The pins that its requests asked for.
    """

    label: str = ""
    pins: tuple[Span, ...] = ()

    def serves(self, wanted: Mark, count: int) -> bool:
        """Whether caches with this mark may serve a prompt with another mark.

        The pins among a prompt's first tokens decide which other tokens were evicted, so they must
        be the same; and pins on later tokens have taken their room already.

        Args:
            wanted: The prompt's mark.
            count: The number of its tokens that the caches hold.
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
