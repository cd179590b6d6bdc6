"""A cache written out op by op, for rivals that are known from their papers alone.

It holds rows, a bias for each, and possibly one further column that stands for rows that are gone.
It is slow, and right by inspection: nothing of the package's kernels takes part.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from mlx_h2o.attention.call import AttentionCall, Looking
from mlx_h2o.budgets.plan import LayerKind
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.hosts.stock_caches import stock_caches

#: Bytes of a number in a 16-bit model, and of a score.
ELEMENT, SCORE = 2, 4


class ColumnCache(Looking):
    """One layer's rows; subclasses say what leaves, and what stands for it."""

    def __init__(self) -> None:
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.bias: mx.array | None = None
        self.mass: mx.array | None = None

    @property
    def state(self) -> list[mx.array]:
        """All arrays."""
        return [x for x in (self.keys, self.values, self.bias, self.mass) if x is not None]

    @property
    def counted(self) -> int:
        """Bytes as a 16-bit model has them, of the whole batch."""
        if self.keys is None or self.values is None:
            return 0
        return (self.keys.size + self.values.size) * ELEMENT

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> None:
        """None, whatever the arguments: `look` masks."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The same rows; `look` takes them in."""
        self.offset += keys.shape[2]
        return keys, values

    def hold(self, keys: mx.array, values: mx.array, bias: mx.array, offset: int) -> None:
        """Start from rows that were chosen before.

        Args:
            keys: `[B, H, N, D]`.
            values: `[B, H, N, Dv]`.
            bias: Added to each row's logits, `[B, H, N]`.
            offset: The next token's position.
        """
        self.keys, self.values, self.bias, self.offset = keys, values, bias, offset
        self.mass = mx.zeros(bias.shape)

    def stored(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """New rows as the cache remembers them: exactly, unless a subclass packs them."""
        return keys, values

    def column(self, queries: mx.array) -> tuple[mx.array, mx.array] | None:
        """What stands for rows that are gone, for queries `[B, H, N, D]` that are scaled.

        Returns:
            Its logits `[B, H, N]` and values `[B, H, N, Dv]`, or None.
        """
        return None

    def evict(self) -> None:
        """Let rows go, after a call."""

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Attend to the rows, causally to the new ones, and to the further column.

        Args:
            call: Queries `[B, Hq, L, D]`; its mask is not read.
            keys: `[B, H, L, D]`.
            values: `[B, H, L, Dv]`.

        Returns:
            `[B, Hq, L, Dv]`.
        """
        B, Hq, L, D = call.q.shape
        H = keys.shape[1]
        before = self._append(keys, values)
        assert self.keys is not None
        assert self.values is not None
        assert self.bias is not None
        assert self.mass is not None
        queries = call.q.astype(mx.float32).reshape(B, H, -1, D) * call.scale  # [B, H, G L, D]
        logits = queries @ self.keys.swapaxes(-1, -2) + self.bias[:, :, None]
        row = mx.tile(mx.arange(L), Hq // H)[:, None]
        visible = mx.arange(self.keys.shape[2]) <= before + row
        logits = mx.where(visible, logits, -mx.inf)
        gone = self.column(queries)
        if gone is not None:
            logits = mx.concatenate([logits, gone[0][..., None]], axis=-1)
        weights = mx.softmax(logits, axis=-1)
        own = weights[..., : self.keys.shape[2]]
        out = own @ self.values
        if gone is not None:
            out = out + weights[..., -1:] * gone[1]
        self.mass = self.mass + own.sum(axis=2)
        self.evict()
        result: mx.array = out.reshape(B, Hq, L, -1).astype(call.q.dtype)
        return result

    def _append(self, keys: mx.array, values: mx.array) -> int:
        """Take new rows in; return how many there were before."""
        keys, values = self.stored(keys.astype(mx.float32), values.astype(mx.float32))
        zeros = mx.zeros(keys.shape[:3])
        if self.keys is None:
            self.keys, self.values, self.bias, self.mass = keys, values, zeros, zeros
            return 0
        before = self.keys.shape[2]
        columns = self.keys, self.values, self.bias, self.mass
        self.keys, self.values, self.bias, self.mass = (
            mx.concatenate([cast(mx.array, old), new], axis=2)
            for old, new in zip(columns, (keys, values, zeros, zeros), strict=True)
        )
        return before

    def keep(self, which: mx.array) -> None:
        """Keep some rows, in their order.

        Args:
            which: Their places, ascending, `[B, H, n]`.
        """
        assert self.keys is not None
        assert self.values is not None
        assert self.bias is not None
        assert self.mass is not None
        self.keys = mx.take_along_axis(self.keys, which[..., None], axis=2)
        self.values = mx.take_along_axis(self.values, which[..., None], axis=2)
        self.bias = mx.take_along_axis(self.bias, which, axis=2)
        self.mass = mx.take_along_axis(self.mass, which, axis=2)


def kinds_of(model: nn.Module) -> list[LayerKind]:
    """The kinds of a model's layers, whose attention is routed to such caches from now on.

    Raises:
        ValueError: Some layer is no plain attention over all tokens.
    """
    kinds = list(layer_kinds(model))
    plain = all(type(entry) is KVCache for entry in stock_caches(model))
    if not plain or any(kind.derived or not kind.routed for kind in kinds):
        raise ValueError("some of the model's layers are no plain attention over all tokens")
    routing.install()
    return kinds
