"""Which plain RoPE is in a model's cached keys, found out by sending it one token to two places."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o import routing
from mlx_h2o.attention_call import AttentionCall
from mlx_h2o.cache_lists import replaced
from mlx_h2o.rolling import Rope
from mlx_h2o.stock import stock_caches
from mlx_h2o.watching import LookingCache

# Where the token is sent to; a turn by so many positions is none by chance.
FAR = 300
# Of the largest channel: what keys computed in bfloat16 may be off.
TOLERANCE = 0.03


class _At(LookingCache):
    """A looking cache that claims to stand at some position, and keeps the keys.

    One token alone gets its own value, whatever caps its logit.
    """

    knows_softcap = True

    def __init__(self, offset: int, seen: list[mx.array]):
        self.offset, self.seen = offset, seen

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.seen.append(keys)
        self.rows = keys, values
        return self.rows

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For layers that share them."""
        return self.rows

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            call.q, keys, values, scale=call.scale, mask=call.mask, sinks=call.sinks
        )


def ropes_in_keys(name: str, model: nn.Module, layers: int) -> list[Rope]:
    """The plain RoPE of each plain KV cache.

    One token alone sees nothing but itself, wherever it stands, so in every layer its keys at two
    places differ by the RoPE between them, and by nothing else.

    Args:
        name: The model's.
        model: An mlx-lm model that mlx_h2o can route.
        layers: How many plain KV caches it uses.

    Raises:
        ValueError: The keys of a layer have another RoPE, or none, or were changed after it.
    """
    routing.install()
    here, there = (_keys_at(model, place) for place in (0, FAR))
    known = _plain_ropes(model)
    found = []
    for layer, (first, second) in enumerate(zip(here, there, strict=True)):
        of_layer = [rope for rope in known if _explains(rope, first, second)]
        if not of_layer:
            raise ValueError(
                f'positions="rolling" turns cached keys by their RoPE, and those of {name} have '
                f"another one than mlx.nn.RoPE, or none (layer {layer}): leave positions away."
            )
        found.append(of_layer[0])
    if len(found) != layers:
        raise ValueError(
            f'positions="rolling" must know every layer\'s RoPE, and {name} shows {len(found)} of '
            f"{layers}: leave positions away."
        )
    return found


def _keys_at(model: nn.Module, place: int) -> list[mx.array]:
    """The keys `[1, H, 1, D]` of one token at a place, in all layers with a plain KV cache."""
    seen: list[mx.array] = []
    caches = [replaced(entry, lambda: _At(place, seen)) for entry in stock_caches(model)]
    model(mx.array([[1]]), cache=caches)
    mx.eval(seen)
    return seen


def _plain_ropes(model: nn.Module) -> list[Rope]:
    """The different plain RoPEs among a model's parts."""
    modules = [module for _, module in model.named_modules() if type(module) is nn.RoPE]
    ropes = [Rope(m.dims, float(m.base), float(m.scale), bool(m.traditional)) for m in modules]
    return list(dict.fromkeys(ropes))


def _explains(rope: Rope, here: mx.array, there: mx.array) -> bool:
    """Whether the same token's keys at two places are that RoPE apart."""
    if rope.dims > here.shape[-1]:
        return False
    turned = rope.turned(here, mx.full(here.shape[:3], FAR)).astype(mx.float32)
    there = there.astype(mx.float32)
    off = mx.abs(turned - there).max() / mx.maximum(mx.abs(there).max(), 1e-9)
    return bool((off < TOLERANCE).item())
