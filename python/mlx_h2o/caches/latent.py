"""The bounded cache of layers that attend to keys derived from the cached rows (MLA)."""

from __future__ import annotations

import mlx.core as mx

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.cost import LayerShare
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.layer.step import attend_to_derived
from mlx_h2o.slots.pins import true_positions
from mlx_h2o.slots.slot_store import Fields


class LatentKVCache(BoundedKVCache):
    """A bounded cache of latent rows, from which the model itself makes keys and values.

    No mean key can represent such keys, so there is no remainder; one mask is for all layers, so
    all heads have one budget; rows are returned to the model, so they are not packed; and a chunk
    cannot be processed token by token, so there is no undo.

    Raises:
        ValueError: The settings have one of these.
    """

    own = False

    def _begin(self, settings: CacheSettings, share: LayerShare | None = None) -> None:
        alike = settings.budgets is None or len(set(settings.budgets)) == 1
        others = settings.packing.packs or settings.undo or settings.rope
        if settings.remainder or others or not alike:
            raise ValueError(
                "A cache of latent rows needs one budget for all heads, remainder=False, no bits, "
                "no undo and absolute positions."
            )
        super()._begin(settings, share)
        # Rows that were returned and are not attended to yet.
        self._attended: list[Fields] | None = None

    @property
    def _between(self) -> bool:
        return self._attended is not None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows; return all rows, from which the model makes keys and values.

        Arguments and errors as in `BoundedKVCache`.

        Returns:
            `[B, Hk, N, D]` and `[B, Hk, N, Dv]`, old and new.
        """
        self._attended = self._opened(keys, values).take_in(keys, values)
        return self._attended[0]["keys"], self._attended[0]["values"]

    def places(self) -> mx.array:
        """Positions of the rows that `update_and_fetch` returned last, `[B, Hk, N]`.

        Raises:
            RuntimeError: Queries have attended to them already.
        """
        if self._attended is None:
            raise RuntimeError("places() before update_and_fetch(): no rows were handed out.")
        return true_positions(self._attended[0]["positions"])

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Attend to keys and values `[B, H, N, ...]` derived from the rows.

        Arguments as in `BoundedKVCache`; an array mask covers all N.
        """
        attended, self._attended = self._attended, None
        if attended is None:
            raise RuntimeError("attend() before update_and_fetch(): there is nothing to attend to.")
        return attend_to_derived(self._require_layer(), call, attended, keys, values)
