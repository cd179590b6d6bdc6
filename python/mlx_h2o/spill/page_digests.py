"""Digests of a conversation's pages: the mean key of every page, on disk beside the rows.

A page is `PAGE` neighbouring positions of one KV head. Its digest tells, for a query, how much
attention its rows may deserve, without reading them (Quest, arXiv 2406.10774, keeps each channel's
least and greatest instead; means choose as well). Digests never change once their page is complete.
They lie in a file without a name, which no other process can open and which goes with this object,
since they can be made from the rows again. The file has room for a layer's heads in tracts of
`TRACT` pages, so that one head's digests lie together. Rows that are sealed on disk must not leave
their means there in the open: their digests stay in memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mlx_h2o.spill.parts import Array

#: Tokens of a page.
PAGE = 16
#: Pages of one head that lie together.
TRACT = 256


class PageDigests:
    """The digests of all layers of a conversation.

    Args:
        folder: Where the file without a name is to be, or None to keep digests in memory.
    """

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._file: Any = None
        self._tracts: dict[tuple[int, int], int | Array] = {}
        self._counts: dict[int, int] = {}
        self._end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of digests in memory."""
        return sum(part.nbytes for part in self._tracts.values() if not isinstance(part, int))

    def count(self, layer: int) -> int:
        """How many pages of a layer have digests."""
        return self._counts.get(layer, 0)

    def append(self, layer: int, means: Array) -> None:
        """Keep the digests of a layer's next pages.

        Args:
            layer: The layer.
            means: Mean keys `[H, pages, D]`, kept in float16.

        Raises:
            OSError: The file cannot be made or written.
        """
        H, pages, D = means.shape
        done = 0
        while done < pages:
            tract, at = divmod(self.count(layer), TRACT)
            here = min(pages - done, TRACT - at)
            digests = means[:, done : done + here].astype(np.float16)
            place = self._tract(layer, tract, H, D)
            if isinstance(place, int):
                for head, of_head in enumerate(digests):
                    start = place + (head * TRACT + at) * D * 2
                    os.pwrite(self._file.fileno(), of_head.tobytes(), start)
            else:
                place[:, at : at + here] = digests
            done += here
            self._counts[layer] = tract * TRACT + at + here

    def read(self, layer: int, head: int, heads: int, width: int) -> Iterator[tuple[int, Array]]:
        """All digests of one head, tract by tract: the first page, and `[pages, D]` float16.

        Args:
            layer: The layer.
            head: The KV head.
            heads: KV heads of the layer, H.
            width: Width of a key, D.
        """
        for tract in range(-(-self.count(layer) // TRACT)):
            first = tract * TRACT
            pages = min(self.count(layer) - first, TRACT)
            place = self._tract(layer, tract, heads, width)
            if isinstance(place, int):
                size = pages * width * 2
                data = os.pread(self._file.fileno(), size, place + head * TRACT * width * 2)
                yield first, np.frombuffer(data, np.float16).reshape(pages, width)
            else:
                yield first, place[head, :pages]

    def truncate(self, layer: int, position: int) -> None:
        """Forget the digests of pages that reach beyond a position."""
        self._counts[layer] = min(self.count(layer), position // PAGE)

    def _tract(self, layer: int, tract: int, heads: int, width: int) -> int | Array:
        place = self._tracts.get((layer, tract))
        if place is None:
            if self._folder is None:
                place = np.zeros((heads, TRACT, width), np.float16)
            else:
                if self._file is None:
                    self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
                place, self._end = self._end, self._end + heads * TRACT * width * 2
            self._tracts[layer, tract] = place
        return place
