"""The bounded KV cache of one layer: one call brings rows, the next attends to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.cost import LayerShare
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.layer import eviction
from mlx_h2o.layer.layer import Layer
from mlx_h2o.layer.step import update_and_attend

if TYPE_CHECKING:
    from mlx_h2o.caches.batch import BatchH2OKVCache


class H2OKVCache(BoundedKVCache):
    """A KV cache that holds a bounded number of tokens, chosen by a policy.

    While decoding, the new row overwrites the slot of the policy's victim, whose row is folded into
    the remainder. Queries of a prompt chunk attend to the chunk and the kept slots together; then
    the rows are reduced to the budget with one gather. It takes the place of mlx-lm's `KVCache`
    (`update_and_fetch`, `make_mask`, `state`, ...); attention reaches `attend` through
    `mlx_h2o.hosts.routing`. The arguments are those of `BoundedKVCache`.

    Models with another attention have their own classes, which `make_prompt_cache` chooses:
    `PlainRowsKVCache` (they compute attention themselves), `LatentKVCache` (they attend to keys
    derived from the cached ones) and `SharedKVCache` (several layers attend to the same keys).
    """

    rows_return = True

    def _begin(self, settings: CacheSettings, share: LayerShare | None = None) -> None:
        super()._begin(settings, share)
        # Rows that came and were not attended to yet.
        self._handed: tuple[mx.array, mx.array] | None = None

    @property
    def _between(self) -> bool:
        return self._handed is not None

    # -- mlx-lm's cache protocol ------------------------------------------------------------------

    @property
    def offset(self) -> int:
        """The next logical position."""
        waiting = self._handed[0].shape[2] if self._handed is not None else 0
        return super().offset + waiting

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Hold new rows until `attend` comes with their queries.

        Arguments and errors as in `BoundedKVCache`.

        Returns:
            The same rows. `attend` adds the cached ones.
        """
        self._opened(keys, values)
        self._handed = keys, values
        return self._handed

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """As in `BoundedKVCache`; keys and values are the very arrays that were returned."""
        layer, (k, v) = self._taken_from_hand()
        if keys is not k or values is not v:
            raise RuntimeError(
                "This model attends to keys derived from the cached ones: it needs "
                'budgets="uniform", remainder=False, no bits and no undo, in a cache of another '
                "kind, which mlx_h2o.make_prompt_cache chooses."
            )
        return update_and_attend(layer, call, k, v)

    def keep_best(self, worths: Sequence[mx.array], budgets: Sequence[int], room: int = 0) -> None:
        """Keep the rows worth most in each head by a measure of the caller's.

        Args:
            worths: The worth of each KV head's rows, `[B, N]`, in the order of its slots.
            budgets: Slots of each head from now on.
            room: Slots of each head's budget that stay free for later tokens.

        Raises:
            ValueError: The budgets are too small, or not one for each head.
        """
        eviction.keep_best(self._require_layer(), self.resized_settings(budgets), worths, room)
        self._evaluate()

    def _taken_from_hand(self) -> tuple[Layer, tuple[mx.array, mx.array]]:
        """The layer, and the rows returned last."""
        handed, self._handed = self._handed, None
        if handed is None or self._layer is None:
            raise RuntimeError("attend() before update_and_fetch(): there is nothing to attend to.")
        return self._layer, handed

    @classmethod
    def merge(cls, caches: Sequence[H2OKVCache]) -> BatchH2OKVCache:
        """A batch of copies of these caches, which mlx-lm decodes together.

        Raises:
            ValueError: One is another kind of cache, or holds several sequences.
        """
        from mlx_h2o.caches.batch import BatchH2OKVCache  # not for a single conversation

        return BatchH2OKVCache.merge(caches)
