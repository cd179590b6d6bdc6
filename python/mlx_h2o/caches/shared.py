"""The bounded cache of a layer whose keys and values other layers attend to as well."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.cost import LayerShare
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.hosts.attending import hand_out
from mlx_h2o.layer.scoring import RunResult
from mlx_h2o.layer.step import attend_to_shared, evict_after_sharers, grow
from mlx_h2o.slots.slot_store import Fields


class SharedKVCache(BoundedKVCache):
    """A bounded cache that several layers of a model attend to in each step.

    All of them attend to the same slots, and a slot's mass is that of all their queries (the mean
    over the query heads of all, as within one layer). Victims are chosen after the last of them.
    Steps are not fused, since a fused step attends once; and a chunk cannot be processed token by
    token, so there is no undo.

    Raises:
        ValueError: The settings have undo.
    """

    is_shared = True

    def _begin(self, settings: CacheSettings, share: LayerShare | None = None) -> None:
        if settings.undo:
            raise ValueError(
                "Layers share these keys and values, so tokens cannot be taken back one by one: "
                "omit undo."
            )
        super()._begin(settings, share)
        # Between update_and_fetch and the last attend: the rows to attend to, the keys as they were
        # returned, and the observations so far.
        self._attended: list[Fields] | None = None
        self._keys: list[mx.array] = []
        self._results: list[list[RunResult]] = []

    @property
    def _between(self) -> bool:
        return self._attended is not None

    def handed_out(self, keys: mx.array) -> bool:
        """Whether these very keys are those of this step."""
        return any(keys is own for own in self._keys)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows; return them, so that they are recognised when layers attend.

        Arguments and errors as in `BoundedKVCache`.
        """
        layer = self._opened(keys, values)
        grow(layer, keys.shape[2])
        frame = layer.settings.frame
        entered = keys if frame is None else frame.enter(keys)
        self._attended = layer.take_in(entered, values)
        self._handing_out(keys)
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Placeholders `[B, Hk, offset, ...]` of all rows, for a layer that asks for them.

        Only their shapes have a meaning, since models take positions from them; any computation
        with them except attention gives NaN.
        """
        layer = self._require_layer()
        row = mx.full((1, 1, 1, 1), mx.nan)
        rows = []
        for kind in layer.types.values():
            shape = (kind.batch, kind.heads, layer.offset, kind.width)
            rows.append(mx.broadcast_to(row.astype(kind.dtype), shape))
        if self._between:
            self._handing_out(rows[0])
        return rows[0], rows[1]

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Attend to all rows held, once for each of the `sharers`; as in `BoundedKVCache`."""
        if self._attended is None or not self.handed_out(keys):
            raise RuntimeError(
                f"{self.sharers} layers were to attend to this cache's rows in each step; another "
                "attended, or to other keys."
            )
        layer = self._require_layer()
        out, results = attend_to_shared(layer, call, self._attended)
        self._results.append(results)
        if len(self._results) < self.sharers:
            return out
        rounds, self._results, self._attended, self._keys = self._results, [], None, []
        tied: mx.array = mx.depends(out, evict_after_sharers(layer, rounds))
        return tied

    def _handing_out(self, keys: mx.array) -> None:
        self._keys.append(keys)
        hand_out(self, keys)

    def config(self) -> dict[str, Any]:
        """As in `BoundedKVCache`, with the number of layers that attend."""
        return {**super().config(), "sharers": self.sharers}
