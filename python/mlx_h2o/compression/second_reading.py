"""The second reading of a block: the attention that rows receive when their text is repeated.

Source: KVzip (Kim et al. 2025, arXiv 2505.23416). The model is asked to repeat a text, and reads it
again, with the rows of the first reading before it. Nothing of the second reading is stored.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_h2o.attention.backends.reference import softcapped
from mlx_h2o.attention.call import AttentionCall, Looking
from mlx_h2o.attention.ops import scaled_dot_product_attention_with_mass
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.hosts.cache_lists import replaced
from mlx_h2o.layer.layer import Layer, new_fields
from mlx_h2o.slots.packed import dense


class SecondReading(Looking):
    """One layer in a second reading: its rows as they are, and the attention that they receive.

    Args:
        layer: The layer; it stays as it is.
        every: One of each so many queries is kept, to fit values by; 0: none is.

    Attributes:
        offset: The next position.
        worths: The greatest weight that each row received from any query: of each run
            `[B, heads, N]`.
    """

    def __init__(self, layer: Layer, every: int):
        self.layer, self.offset = layer, layer.offset
        self.worths = [mx.zeros(layer.store.view(run, "positions").shape) for run in layer.runs]
        self._every, self._calls = every, list[AttentionCall]()

    @property
    def fits(self) -> bool:
        """Whether queries were kept, to fit values by."""
        return bool(self._calls)

    @property
    def call(self) -> AttentionCall:
        """A call with the queries that were kept."""
        q = mx.concatenate([call.q for call in self._calls], axis=2)
        return self._calls[-1].with_queries(q)

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> None:
        """None, whatever the arguments: `look` determines the mask."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The same rows."""
        return keys, values

    @property
    def state(self) -> list[mx.array]:
        """The results of the second reading."""
        return [*self.worths, *(call.q for call in self._calls)]

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Attend to the layer's rows, the remainder and, causally, the chunk itself.

        Args:
            call: Queries `[B, Hq, L, D]`; its mask is not read.
            keys: Keys of the chunk, `[B, Hk, L, D]`.
            values: Values of the chunk, `[B, Hk, L, Dv]`.

        Returns:
            `[B, Hq, L, Dv]`.
        """
        if self._every:
            few = mx.contiguous(call.q[:, :, :: self._every])  # a view would keep all of them
            self._calls.append(call.with_queries(few))
        layer = self.layer
        settings, heads = layer.settings, layer.store.heads
        group = call.q.shape[1] // heads
        if settings.frame is not None:
            keys = settings.frame.enter(keys)
            call = call.with_queries(settings.frame.enter_queries(call.q))
        outs = []
        attended = layer.attended(new_fields(settings, keys, values, self.offset))
        for i, (run, fields) in enumerate(zip(layer.runs, attended, strict=True)):
            own = call.of_heads(run.first * group, run.last * group)
            seed = None
            if settings.remainder and layer.lost(run):
                rest = layer.remainder.heads(run.first, run.last)
                orders = settings.saturations(heads)[run.first : run.last]
                seed = rest.column(own.q, own.scale, orders, own.softcap), rest.mean_value
            rows = [layer.packing.rows(name, fields) for name in ("keys", "values")]
            # MLX's exp on a CPU takes most of the time of a softmax written out: the kernels
            # attend, and here only each row's largest weight goes through exp.
            out, _, lse = scaled_dot_product_attention_with_mass(
                own.q,
                *rows,
                scale=own.scale,
                mask="causal",
                sinks=own.sinks,
                seed=seed,
                softcap=own.softcap,
            )
            outs.append(out)
            keys = dense(rows[0])[:, :, : self.worths[i].shape[2]]
            self.worths[i] = mx.maximum(self.worths[i], greatest_weights(own, keys, lse))
        tied: mx.array = mx.depends(
            outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1), self.state
        )
        return tied


def greatest_weights(call: AttentionCall, keys: mx.array, lse: mx.array) -> mx.array:
    """The greatest weight that each row received from any query, `[B, Hk, N]`.

    Every query attends to all of the rows, so they need no mask. One KV head comes after the other:
    the logits of all of them would take more memory than the rows.

    Args:
        call: Queries `[B, Hq, L, D]`.
        keys: Keys of the rows, `[B, Hk, N, D]`.
        lse: The logarithm of each query's sum of exponentials, `[B, Hq, L]`.
    """
    B, heads, _, D = keys.shape
    queries = (call.q.astype(mx.float32) * call.scale).reshape(B, heads, -1, D)
    sums = lse.reshape(B, heads, -1, 1)
    greatest = [
        (
            softcapped(queries[:, i] @ keys[:, i].astype(mx.float32).swapaxes(-1, -2), call.softcap)
            - sums[:, i]
        ).max(axis=1)
        for i in range(heads)
    ]
    return mx.exp(mx.stack(greatest, axis=1))


def looking_caches(caches: Sequence[Any], looks: Sequence[Looking]) -> list[Any]:
    """A model's list with looking caches; copies of other caches go on from the first reading.

    Args:
        caches: The model's caches, which have read a text; they stay as they are.
        looks: A cache in the place of each bounded one.
    """
    again = iter(looks)
    own = [entry if is_bounded(entry) else copy.deepcopy(entry) for entry in caches]
    return [replaced(entry, lambda: next(again), is_bounded) for entry in own]


def is_bounded(entry: Any) -> bool:
    """Whether a cache is a bounded one."""
    return isinstance(entry, BoundedKVCache)
