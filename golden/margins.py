"""Margins of choices: the change in priority by which another token would be kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import mlx.core as mx
import numpy as np

from mlx_h2o.layer import returning
from mlx_h2o.layer.returning import most_wanted, pages_to_read
from mlx_h2o.policies import selection
from mlx_h2o.policies.selection import select_kept, select_victims

# A share of the largest priority. Implementations that sum in another order differ by about 1e-6.
LEAST_MARGIN = 1e-5
# Pages are chosen by means in 16 bits, one of which may be rounded to the other side: their
# estimates, which are logarithms, must differ by so many times more. What a row is wanted is a
# power of its logit, so a share of it has about ten times the error.
PAGES_COARSER, WANTED_COARSER = 100, 10


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
        # Of rows that are worth more than any the largest finite number is the rank.
        ranks = head[np.abs(head) < np.finfo(np.float32).max]
        finite = np.sort(ranks.astype(np.float64))
        if goes < len(finite):
            gaps = np.diff(finite)[0 if ordered else goes - 1 : goes]
            least = min(least, float(gaps.min() / max(np.abs(finite).max(), 1e-30)))
    return least


def page_margin(estimates: np.ndarray, read: set[int]) -> float:
    """The smallest gap between estimates that decided which pages are read, made comparable.

    Args:
        estimates: The logarithm of each page's estimated mass.
        read: The pages read.
    """
    falling = np.argsort(-estimates, kind="stable")
    # The order of the pages read decides which comes last; the first of the others would be next.
    deciding = estimates[falling[: len(read) + 1]].astype(np.float64)
    gaps = -np.diff(deciding[np.isfinite(deciding)])
    return float(gaps.min()) / PAGES_COARSER if len(gaps) else math.inf


def wanted_margin(rank: np.ndarray, most: int) -> float:
    """The gap between the last row that comes back and the first that does not, as a share.

    Args:
        rank: How much each row is wanted.
        most: How many come back.
    """
    falling = -np.sort(-rank.astype(np.float64))
    if most >= len(falling) or falling[most] <= 0:
        return math.inf
    return float((falling[most - 1] - falling[most]) / falling[most - 1]) / WANTED_COARSER


@contextmanager
def watching() -> Iterator[list[float]]:
    """Note the margin of every choice in the block, beginning with infinity."""
    margins = [math.inf]

    def watched_select(
        priority: mx.array, positions: mx.array, evictable: mx.array, count: int, unit: str = "head"
    ) -> mx.array:
        goes = positions.shape[-1] - count
        margins.append(margin(priority, evictable, unit, goes, ordered=False))
        return select_kept(priority, positions, evictable, count, unit)

    def victims(
        priority: mx.array, positions: mx.array, evictable: mx.array, count: int, unit: str = "head"
    ) -> mx.array:
        margins.append(margin(priority, evictable, unit, count))
        return select_victims(priority, positions, evictable, count, unit)

    def pages(estimates: np.ndarray, lost: np.ndarray, pages: int, most: int) -> set[int]:
        read = pages_to_read(estimates, lost, pages, most)
        margins.append(page_margin(estimates, read))
        return read

    def watched_most(rank: np.ndarray, most: int) -> np.ndarray:
        margins.append(wanted_margin(rank, most))
        return most_wanted(rank, most)

    with (
        mock.patch.object(selection, "select_kept", watched_select),
        mock.patch.object(selection, "select_victims", victims),
        mock.patch.object(returning, "pages_to_read", pages),
        mock.patch.object(returning, "most_wanted", watched_most),
    ):
        yield margins
