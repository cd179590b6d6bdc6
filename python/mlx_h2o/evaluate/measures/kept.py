"""Kept tokens: the positions of a text that the heads of each layer still hold at its end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.measures.measure import Findings, Found, Measure
from mlx_h2o.evaluate.sections import Maps, Rows, Section
from mlx_h2o.evaluate.stage import Stage, read
from mlx_h2o.evaluate.workers import Tell


@dataclass(frozen=True)
class KeptMeasure(Measure):
    """One reading of the text's beginning.

    Attributes:
        length: Tokens of the reading.
        parts: Columns of the map.
    """

    length: int = 1024
    parts: int = 64

    name = "kept"

    def tokens(self) -> int:
        return self.length

    def work(self) -> int:
        return self.length

    def passes(self) -> int:
        return 2

    def of(self, stage: Stage, contender: Contender, tell: Tell) -> Found:
        cache = contender.make(stage.model, self.length)
        tokens = mx.array([[*stage.first, *stage.prose(self.length - len(stage.first), 0)]])
        read(stage.model, cache, tokens, stage.chunk, tell)
        layers = [
            held_by(entry, self.length)
            for _, entry in entries(cache)
            if isinstance(entry, BoundedKVCache)
        ]
        edges = np.linspace(0, self.length, self.parts + 1).astype(int)
        return {
            "layers": [
                [round(float(held[a:b].mean()), 4) for a, b in pairwise(edges)] for held in layers
            ]
        }

    def section(self, findings: Findings) -> Section:
        grids, rows = {}, []
        for contender, found in findings:
            if found["layers"]:
                held = np.asarray(found["layers"])
                grids[contender.name] = cast(list[list[float | None]], held.tolist())
                old = held[:, : self.parts // 2]
                rows.append((contender.name, f"{held.mean():.1%}", f"{old.mean():.1%}"))
        columns = ("cache", "of all tokens held", "of the older half")
        return Section(
            "What is kept",
            f"After {self.length} tokens of the text: the part of each layer's heads that holds a "
            "token, by where it stands. A window would be one bright stripe at the right.",
            [Rows("", columns, rows)],
            [Maps("Held at the end", grids, "position", "layer")] if grids else [],
        )


def held_by(entry: Any, length: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The part of a layer's KV heads that holds each position of the first sequence, `[length]`."""
    held = np.zeros(length)
    heads = 0
    for run in entry.store.runs:
        positions = np.asarray(entry.slots(run).positions)[0]  # [heads, N]
        heads += len(positions)
        np.add.at(held, positions.ravel(), 1)
    newest = entry.layer.recently_held  # the recent tokens stored apart are held by every head
    held[entry.offset - newest : entry.offset] = heads
    return held / heads
