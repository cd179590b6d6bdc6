"""How far a choice was from going the other way: rounding must not decide what is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_h2o import selection
from mlx_h2o.cache import H2OKVCache
from mlx_h2o.policies import Slots
from mlx_h2o.store import Run, SlotStore

# Of the largest priority. Implementations that sum in another order differ by 1e-6 or so of it.
LEAST_MARGIN = 1e-5


def margin(
    priority: mx.array, evictable: mx.array, unit: str, goes: int, ordered: bool = True
) -> float:
    """The least gap between priorities that decided a choice, as a share of the largest.

    Args:
        priority: `[B, H, N]`.
        evictable: `[B, H, N]` bool.
        unit: As in `select_victims`.
        goes: Slots that go in each head.
        ordered: Whether their order matters too, and not only which they are.
    """
    ranked = np.array(selection.rankable(priority, evictable, unit))
    least = math.inf
    for head in ranked.reshape(-1, ranked.shape[-1]):
        finite = np.sort(head[np.isfinite(head)].astype(np.float64))
        if goes < len(finite):
            gaps = np.diff(finite)[0 if ordered else goes - 1 : goes]
            least = min(least, float(gaps.min() / max(np.abs(finite).max(), 1e-30)))
    return least


class WatchedCache(H2OKVCache):
    """A cache that notes the least margin of its choices.

    Attributes:
        margin: The least so far.
    """

    margin = math.inf

    def _reduced(
        self, run: Run, fields: dict[str, mx.array], window_mass: mx.array | None, evicted: int
    ) -> dict[str, mx.array]:
        N = fields["positions"].shape[2]
        if run.budget < N:
            slots = self._slots(run, fields, evicted)
            priority = self.policy.prompt_priority(slots, window_mass)
            self._note(priority, slots, N - run.budget, ordered=False)
        return super()._reduced(run, fields, window_mass, evicted)

    def _choose_victims(self, store: SlotStore) -> None:
        for run in store.runs if self._slots_are_next else []:
            if run.length == run.budget and not run.victims:
                slots = self._slots(run, store.views(run), self._evicted(run))
                self._note(self.policy.priority(slots), slots, self.policy.evict_every)
        super()._choose_victims(store)

    def _note(self, priority: mx.array, slots: Slots, goes: int, ordered: bool = True) -> None:
        found = margin(priority, slots.evictable, self.policy.unit, goes, ordered)
        self.margin = min(self.margin, found)


def least_margin(caches: Sequence[H2OKVCache]) -> float:
    """The least margin of caches that were watched."""
    return min(cache.margin for cache in caches if isinstance(cache, WatchedCache))
