"""Digests of a conversation's pages: the keys of the heads that ask, in 8 bits, beside the rows.

A page is `PAGE` neighbouring positions of one KV head. Its digest is its keys as whole numbers of 8
bits and their scale. It tells, for a query, how much attention the page's rows would get, without
reading and unpacking them. Fewer numbers miss needles: neither the mean of a page's keys nor
Quest's least and greatest of each channel (arXiv 2406.10774) often finds the page with a fact
(docs/results/experiments.md).

Digests never change once their page is complete. They lie in a file without a name, as the rows do.
It has room for a layer's heads in tracts of `TRACT` pages, so that one head's digests lie together.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mlx_h2o.spill.layout import Array

#: Tokens of a page.
PAGE = 16
#: Pages of one head that lie together, and are compared with queries at once.
TRACT = 256
#: The greatest of a digest's whole numbers.
GREATEST = 127


def digest_type(width: int) -> np.dtype[Any]:
    """A page's digest as numpy reads it: its scale, and its keys `[PAGE, width]`."""
    return np.dtype([("scale", "<f4"), ("keys", "i1", (PAGE, width))])


def digests_of(keys: Array) -> Array:
    """The digests of pages: the nearest whole numbers of keys that are divided by a scale.

    Args:
        keys: `[..., PAGE, D]` float32.
    """
    made = np.zeros(keys.shape[:-2], digest_type(keys.shape[-1]))
    scale = np.abs(keys).max(axis=(-2, -1)) / GREATEST
    made["scale"] = scale
    divisor = np.where(scale > 0, scale, 1)[..., None, None]
    made["keys"] = np.rint(keys / divisor)
    return made


class PageDigests:
    """The digests of all layers of a conversation.

    Args:
        folder: Where the file without a name is to be.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file: Any = None
        self._tracts: dict[tuple[int, int], int] = {}  # layer, tract -> its first byte
        self._counts: dict[int, int] = {}
        self._end = 0

    def count(self, layer: int) -> int:
        """How many pages of a layer have digests."""
        return self._counts.get(layer, 0)

    def append(self, layer: int, digests: Array) -> None:
        """Keep the digests of a layer's next pages.

        Args:
            layer: The layer.
            digests: `[heads, pages]` (`digests_of`), of the heads that ask.

        Raises:
            OSError: The file cannot be made or written.
        """
        heads, pages = digests.shape
        size = digests.dtype.itemsize
        done = 0
        while done < pages:
            tract, at = divmod(self.count(layer), TRACT)
            here = min(pages - done, TRACT - at)
            first = self._tract(layer, tract, heads * TRACT * size)
            for head in range(heads):
                start = first + (head * TRACT + at) * size
                os.pwrite(self._file.fileno(), digests[head, done : done + here].tobytes(), start)
            done += here
            self._counts[layer] = tract * TRACT + at + here

    def read(self, layer: int, head: int, width: int) -> Iterator[tuple[int, Array]]:
        """All digests of one head, tract by tract: the first page, and `[pages]` digests.

        Args:
            layer: The layer.
            head: The head's place among those that ask.
            width: Width of a key, D.
        """
        dtype = digest_type(width)
        for first in range(0, self.count(layer), TRACT):
            size = min(self.count(layer) - first, TRACT) * dtype.itemsize
            start = self._tracts[layer, first // TRACT] + head * TRACT * dtype.itemsize
            yield first, np.frombuffer(os.pread(self._file.fileno(), size, start), dtype)

    def truncate(self, layer: int, position: int) -> None:
        """Forget the digests of pages that reach beyond a position."""
        self._counts[layer] = min(self.count(layer), position // PAGE)

    def _tract(self, layer: int, tract: int, size: int) -> int:
        """The byte at which a tract begins; a new one is at the end of the file."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        if (layer, tract) not in self._tracts:
            self._tracts[layer, tract], self._end = self._end, self._end + size
        return self._tracts[layer, tract]
