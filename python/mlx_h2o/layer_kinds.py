"""How a model uses each of its plain KV caches, found out by one token that is never computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o import routing
from mlx_h2o.budget import RowWidths
from mlx_h2o.cache_lists import replaced
from mlx_h2o.stock import stock_caches


@dataclass
class LayerKind:
    """What a trial run told about a plain KV cache of a model.

    Attributes:
        heads: Hk.
        widths: Of its rows.
        routed: Whether the model asked the cache to attend.
        derived: Whether it attended to keys made of the cached ones (MLA).
    """

    heads: int
    widths: RowWidths
    routed: bool
    derived: bool


class _Trial(mlx_lm_cache.KVCache):
    """A plain cache that notes how the model attends to it."""

    attending = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.routed = self.derived = False
        self.handed: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.handed = super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
        return self.handed

    def attend(
        self, q: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        assert self.handed is not None
        self.routed = True
        self.derived = keys is not self.handed[0] or values is not self.handed[1]
        return mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def kind(self) -> LayerKind | None:
        if self.keys is None or self.values is None:
            return None
        widths = RowWidths(
            self.keys.shape[-1], self.values.shape[-1], self.keys.dtype.size, self.values.dtype.size
        )
        return LayerKind(self.keys.shape[1], widths, self.routed, self.derived)


def layer_kinds(model: nn.Module) -> list[LayerKind]:
    """How the model uses each of its plain KV caches, in order.

    One token is sent through the model lazily: shapes become known, and nothing is computed.
    """
    routing.install()
    caches = stock_caches(model)
    trials: list[_Trial] = []

    def trial() -> _Trial:
        trials.append(_Trial())
        return trials[-1]

    caches = [replaced(entry, trial) for entry in caches]
    model(mx.array([[0]]), cache=caches)
    kinds = [trial.kind() for trial in trials]
    return [kind for kind in kinds if kind is not None]
