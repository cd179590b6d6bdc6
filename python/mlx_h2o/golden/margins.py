"""Margins of choices: the change in priority by which another token would be kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import mlx.core as mx
import numpy as np

from mlx_h2o.policies import selection
from mlx_h2o.policies.selection import select_kept, select_victims

# A share of the largest priority. Implementations that sum in another order differ by about 1e-6.
LEAST_MARGIN = 1e-5


def margin(
    priority: mx.array, evictable: mx.array, unit: str, goes: int, ordered: bool = True
) -> float:
    """The smallest gap between priorities that decided a choice, as a share of the largest.

    Args:
        priority: `[B, H, N]`.
        evictable: `[B, H, N]` bool.
        unit: As in `select_victims`.
        goes: Slots evicted in each head.
        ordered: Whether the order of the evicted slots matters too.
    """
    ranked = np.array(selection.rankable(priority, evictable, unit))
    least = math.inf
    for head in ranked.reshape(-1, ranked.shape[-1]):
        finite = np.sort(head[np.isfinite(head)].astype(np.float64))
        if goes < len(finite):
            gaps = np.diff(finite)[0 if ordered else goes - 1 : goes]
            least = min(least, float(gaps.min() / max(np.abs(finite).max(), 1e-30)))
    return least


@contextmanager
def watching() -> Iterator[list[float]]:
    """Note the margin of every choice in the block, beginning with infinity."""
    found = [math.inf]

    def kept(
        priority: mx.array, positions: mx.array, evictable: mx.array, count: int, unit: str = "head"
    ) -> mx.array:
        goes = positions.shape[-1] - count
        found.append(margin(priority, evictable, unit, goes, ordered=False))
        return select_kept(priority, positions, evictable, count, unit)

    def victims(
        priority: mx.array, positions: mx.array, evictable: mx.array, count: int, unit: str = "head"
    ) -> mx.array:
        found.append(margin(priority, evictable, unit, count))
        return select_victims(priority, positions, evictable, count, unit)

    with (
        mock.patch.object(selection, "select_kept", kept),
        mock.patch.object(selection, "select_victims", victims),
    ):
        yield found
