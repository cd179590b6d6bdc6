"""How a model uses each of its plain KV caches, probed by one token that is never computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.attention.call import AttentionCall, Looking
from mlx_h2o.budgets.cost import RowWidths
from mlx_h2o.budgets.plan import LayerKind
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.attending import hand_out
from mlx_h2o.hosts.cache_lists import entries, replaced
from mlx_h2o.hosts.loaded import host_of, logits_of, restored
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.loading.identity import ModelIdentity, architecture, identity_of


def identity_by_kinds(model: nn.Module, kinds: Sequence[LayerKind]) -> ModelIdentity:
    """The identity of a loaded model whose plain KV caches are of these kinds."""
    return identity_of(model, [k.heads for k in kinds], [k.widths.key for k in kinds])


class _Trial(Looking, mlx_lm_cache.KVCache):
    """A plain cache that notes how the model attends to it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.derived, self.sharers, self.query_heads = False, 0, 0
        self.handed: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._handing(super().update_and_fetch(keys, values))  # type: ignore[no-untyped-call]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._handing(super().keys_and_values())  # type: ignore[no-untyped-call]

    def _handing(self, rows: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
        self.handed += rows
        hand_out(self, rows[0])
        return rows

    def places(self) -> mx.array:
        """The rows' positions: a layer that asks for them needs all rows handed out."""
        assert self.keys is not None
        self.derived = True
        return mx.zeros((*self.keys.shape[:2], self.offset), mx.int32)

    def handed_out(self, rows: mx.array) -> bool:
        return any(rows is own for own in self.handed)

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        self.sharers += 1
        self.query_heads = self.query_heads or call.q.shape[1]
        # Latent rows attended to unchanged are keys and values at once.
        self.derived |= keys is values or not (self.handed_out(keys) and self.handed_out(values))
        return mx.fast.scaled_dot_product_attention(
            call.q, keys, values, scale=call.scale, mask=call.mask, sinks=call.sinks
        )

    def kind(self) -> LayerKind | None:
        if self.keys is None or self.values is None:
            return None
        widths = RowWidths(
            self.keys.shape[-1], self.values.shape[-1], self.keys.dtype.size, self.values.dtype.size
        )
        heads, sharers = self.keys.shape[1], self.sharers
        group = max(self.query_heads // heads, 1)
        return LayerKind(heads, widths, sharers > 0, self.derived, max(sharers, 1), group=group)


def _runs(model: nn.Module) -> bool:
    """Whether the model takes a token with its own caches."""
    try:
        with restored(model):
            logits_of(model, mx.array([[0]]), stock_caches(model))
    except Exception:  # a model may raise anything
        return False
    return True


def layer_kinds(model: nn.Module) -> list[LayerKind]:
    """How the model uses each of its plain KV caches, in order.

    One token is sent through the model lazily: shapes become known, and nothing is computed.

    Raises:
        ValueError: The model does not run with its library's own caches either.
    """
    routing.install()
    caches = [replaced(entry, _Trial) for entry in stock_caches(model)]
    try:
        with restored(model):
            logits_of(model, mx.array([[0]]), caches)
    except Exception as error:
        if not _runs(model):
            raise ValueError(
                f"{architecture(model)} with this config does not run with {host_of(model).name}'s "
                f"own caches either ({type(error).__name__}: {error}): look at its "
                "config.json (gemma3_text, for one, needs as many layers as "
                "sliding_window_pattern says)."
            ) from error
        raise ValueError(
            f"{architecture(model)} reads what its caches hold in a way that mlx-h2o does not know "
            f"({type(error).__name__}: {error}): leave its caches as they are."
        ) from error
    result: list[LayerKind] = []
    for entry in caches:
        trials = [trial for _, trial in entries([entry]) if isinstance(trial, _Trial)]
        kinds = [kind for kind in (trial.kind() for trial in trials) if kind is not None]
        attended = any(kind.routed for kind in kinds)
        result += [replace(kind, indexes=attended and not kind.routed) for kind in kinds]
    return result
