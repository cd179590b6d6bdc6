"""Query centres of a model: loaded if they were kept, else measured on the bundled texts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o._utils.json_arrays import as_text, of_text
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.profile_store import KeptOfModel
from mlx_h2o.budgets.tensor_parallel import ranks_of
from mlx_h2o.calibration.scaling_build import frame_passes, frame_tokens
from mlx_h2o.integration import routing
from mlx_h2o.integration.layer_probe import LayerKind, identity_by_kinds, layer_kinds
from mlx_h2o.integration.recorder import LookingCache, Watcher, full_attention, looked_through
from mlx_h2o.integration.rope_probe import known_ropes
from mlx_h2o.loading.identity import ModelIdentity, architecture
from mlx_h2o.policies import Policy
from mlx_h2o.storage.query_centres import QueryCentres
from mlx_h2o.storage.rope import Rope

KEPT = KeptOfModel("mlx-h2o query centres", ".centres.json")

#: Query centres of each plain KV cache of a model, in their order.
Centres = tuple[QueryCentres, ...]


def centres_for(model: nn.Module, kinds: Sequence[LayerKind], policy: Policy) -> Centres:
    """The query centres of a model; measured on the bundled texts if none were kept.

    Args:
        model: An mlx-lm model.
        kinds: How the model uses its plain KV caches.
        policy: The policy that uses them, for messages.

    Raises:
        ValueError: The model does not show its queries, or its RoPE is not known, or there is no
            text to measure them on.
    """
    wish = f"Policy {policy.name!r} needs the query centres of each layer"
    _require_seen(model, kinds, wish)
    identity = identity_by_kinds(model, kinds)
    found = _kept_of(identity)
    if found is not None:
        return found
    tokenizer = getattr(model, "mlx_h2o_tokenizer", None)
    if tokenizer is None:
        raise ValueError(
            f"{wish}, measured over a text: load the model with mlx_h2o.load, or give a text's "
            "tokens to mlx_h2o.learn_query_centres(model, tokens) once."
        )
    place = KEPT.place_of(identity)
    print(f"Measuring query centres (once, kept in {place})", file=sys.stderr)
    return _learnt(model, identity, frame_tokens(tokenizer), wish)


def learn_query_centres(model: nn.Module, tokens: Sequence[int]) -> list[QueryCentres]:
    """Measure the query centres of a model's heads, and keep them for later caches.

    Caches whose policy needs them do so by themselves, on bundled texts, for models of
    `mlx_h2o.load`.

    Args:
        model: An mlx-lm model.
        tokens: A varied text, like those that the model will see; some 4000 tokens.

    Returns:
        The centres of each plain KV cache, in their order.

    Raises:
        ValueError: The text is too short, the model does not show its queries, or its RoPE is not
            known.
    """
    kinds, wish = layer_kinds(model), "The query centres of each layer cannot be measured"
    _require_seen(model, kinds, wish)
    return list(_learnt(model, identity_by_kinds(model, kinds), tokens, wish))


def _require_seen(model: nn.Module, kinds: Sequence[LayerKind], wish: str) -> None:
    """Raise ValueError unless every plain KV cache gets the queries of one layer."""
    if any(not kind.routed or kind.derived or kind.sharers > 1 for kind in kinds):
        raise ValueError(
            f"{wish}, and {architecture(model)} attends by itself, to keys derived from the cached "
            "ones, or with several layers to the same: choose another policy "
            '("keydiff" uses keys alone).'
        )
    if ranks_of(model) is not None:
        raise ValueError(f"{wish}, and this process has a part of them: choose another policy.")


def _learnt(model: nn.Module, identity: ModelIdentity, tokens: Sequence[int], wish: str) -> Centres:
    """The query centres of a text, kept for the next time."""
    ropes = known_ropes(model)
    for layer, rope in enumerate(ropes):
        if rope is None:
            raise ValueError(
                f"{wish} before RoPE, and {architecture(model)} has another one than "
                f"mlx.nn.RoPE, or none (layer {layer}): choose another policy."
            )
    passes = frame_passes(model, tokens)
    centres = centres_of_text(model, passes, [rope for rope in ropes if rope is not None])
    KEPT.keep(identity, {"layers": _json_of(centres)})
    return centres


def centres_of_text(model: nn.Module, passes: mx.array, ropes: Sequence[Rope]) -> Centres:
    """The query centres of every layer.

    Args:
        model: An mlx-lm model that mlx_h2o can route.
        passes: Token ids `[B, T]`, all at positions 0 to T - 1.
        ropes: The RoPE of each layer.
    """
    routing.install()
    found: dict[int, QueryCentres] = {}
    looked_through(model, passes, Watcher(), lambda i: _Centring(i, ropes[i], found))
    return tuple(found[i] for i in range(len(ropes)))


class _Centring(LookingCache):
    """A looking cache that measures its layer's query centres."""

    knows_softcap = True

    def __init__(self, index: int, rope: Rope, found: dict[int, QueryCentres]):
        self.index, self.rope, self.found = index, rope, found

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        self.found[self.index] = QueryCentres.of(call.q, keys.shape[1], self.rope)
        return full_attention(call.q, keys, values, call.scale, call.sinks, call.softcap)


def _json_of(centres: Centres) -> list[dict[str, Any]]:
    """Each layer's centres as JSON types."""
    return [
        {
            "rope": layer.rope.config(),
            "centre": as_text(np.array(layer.centre)),
            "spread": as_text(np.array(layer.spread)),
        }
        for layer in centres
    ]


def _kept_of(identity: ModelIdentity) -> Centres | None:
    """The centres kept of this model, or None."""

    def read(data: Any) -> Centres:
        return tuple(
            QueryCentres(
                mx.array(of_text(layer["centre"])),
                mx.array(of_text(layer["spread"])),
                Rope.of_config(layer["rope"]),
            )
            for layer in data["layers"]
        )

    found = KEPT.load(identity, read)
    expected = list(zip(identity.kv_heads, identity.key_widths, strict=True))
    return found if found and [layer.keys for layer in found] == expected else None
