"""The bounded cache of models that compute attention themselves; plain rows are its remainder."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlx_h2o.budgets.cost import LayerShare
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.layer import eviction
from mlx_h2o.layer.layer import Layer
from mlx_h2o.slots.slot_store import Fields


class PlainRowsKVCache(BoundedKVCache):
    """A bounded cache that returns its rows and does not observe attention.

    The policy uses keys alone. The remainder is R rows before the others, in slots of their own;
    `make_mask` adds their weight to their logits.
    """

    attending = False
    own = None

    def _begin(self, settings: CacheSettings, share: LayerShare | None = None) -> None:
        super()._begin(replace(settings, attending=False), share)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows, and choose at once the tokens to evict.

        Arguments and errors as in `BoundedKVCache`.

        Returns:
            `[B, Hk, R + N, D]` and `[B, Hk, R + N, Dv]`: the remainder's rows, once anything was
            evicted, and all rows held, old and new.
        """
        layer = self._opened(keys, values)
        fields = layer.take_in(keys, values)[0]
        if layer.store.reserved and layer.lost_beside(fields):
            fetched, fields = _with_plain_rows(layer, fields)
        else:
            fetched = fields["keys"], fields["values"]
        eviction.settle(layer, [fields])
        return mx.depends(fetched[0], layer.side_state()), fetched[1]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """As in `BoundedKVCache`; with plain rows an additive mask `[1, 1, N, R + kept + N]`."""
        layer = self._layer
        plain = super().make_mask(N, return_array, window_size)
        if layer is None or not layer.store.reserved:
            return plain
        run = layer.runs[0]
        lost = layer.lost(run)
        if N == 1:  # the new row overwrites a victim before attention
            lost = layer.offset + 1 - min(run.length + 1, run.budget)
        return _mask(layer, N, lost) if lost else plain


def _with_plain_rows(layer: Layer, fields: Fields) -> tuple[tuple[mx.array, mx.array], Fields]:
    """The rows to attend to after the remainder's, and the fields of the slots alone."""
    store = layer.store
    run = store.runs[0]
    rows = layer.remainder.plain_rows(store.reserved)
    if fields["positions"].shape[2] > run.budget:
        pairs = zip(rows, (fields["keys"], fields["values"]), strict=True)
        keys, values = (mx.concatenate([row.astype(f.dtype), f], axis=2) for row, f in pairs)
        return (keys, values), fields
    layer.put_plain_rows(rows)
    fetched = store.view(run, "keys", True), store.view(run, "values", True)
    return fetched, layer.attended()[0]


def _mask(layer: Layer, N: int, lost: int) -> mx.array:
    """log(lost / R) in the plain rows' columns, minus infinity in columns of later tokens."""
    run, rows = layer.runs[0], layer.store.reserved
    dtype = layer.store.fields["keys"].dtype
    length = min(layer.length, run.budget - 1) if N == 1 else layer.length
    bias = mx.log(mx.full((1,), lost / rows))
    mask = mx.concatenate([mx.broadcast_to(bias, (rows,)), mx.zeros(length + N)])
    if N > 1:
        future = mx.arange(length + N) > mx.arange(length, length + N)[:, None]
        lowest = mx.finfo(dtype).min
        future = mx.pad(mx.where(future, lowest, 0.0), [(0, 0), (rows, 0)])
        mask = mx.maximum(mask + future, lowest)
    return mx.broadcast_to(mask, (1, 1, N, rows + length + N)).astype(dtype)
