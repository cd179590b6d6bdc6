"""Finds which plain RoPE is in a model's cached keys, by sending it one token to two places."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.cache_lists import replaced
from mlx_h2o.hosts.loaded import logits_of, restored
from mlx_h2o.hosts.recorder import LookingCache
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.slots.rope import Rope

# The second place of the token: a rotation by so many positions is not the identity by chance.
FAR = 300
# The tolerated error of keys computed in bfloat16, as a share of the largest channel.
TOLERANCE = 0.03


class _At(LookingCache):
    """A looking cache that claims to stand at some position, and keeps the keys.

    A token that is alone gets its own value as output, whatever caps its logit.
    """

    knows_softcap = True

    def __init__(self, offset: int, keys: list[mx.array]):
        self.offset, self.keys = offset, keys

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys.append(keys)
        self.rows = keys, values
        return self.rows

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The same for layers that share keys."""
        return self.rows

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            call.q, keys, values, scale=call.scale, mask=call.mask, sinks=call.sinks
        )


def ropes_in_keys(name: str, model: nn.Module, layers: int) -> list[Rope]:
    """The plain RoPE of each plain KV cache.

    A token that is alone sees nothing but itself, wherever it stands, so in every layer its keys at
    two places differ by the RoPE between them, and by nothing else.

    Args:
        name: The model's name.
        model: A model that mlx_h2o can route.
        layers: The number of plain KV caches that it uses.

    Raises:
        ValueError: The keys of a layer have another RoPE, or none, or were changed after it.
    """
    routing.install()
    plain, ropes = _plain_ropes(model), list[Rope]()
    pairs = zip(_keys_at(model, 0), _keys_at(model, FAR), strict=True)
    for layer, pair in enumerate(pairs):
        rope = next((rope for rope in plain if _explains(rope, *pair)), None)
        if rope is None:
            raise ValueError(
                f'positions="rolling" turns cached keys by their RoPE, and those of {name} have '
                f"another one than mlx.nn.RoPE, or none (layer {layer}): omit positions."
            )
        ropes.append(rope)
    if len(ropes) != layers:
        raise ValueError(
            f'positions="rolling" must know every layer\'s RoPE, and {name} shows {len(ropes)} of '
            f"{layers}: omit positions."
        )
    return ropes


def _keys_at(model: nn.Module, place: int) -> list[mx.array]:
    """The keys `[1, H, 1, D]` of one token at a place, of each plain KV cache in use."""
    keys: list[mx.array] = []
    caches = [replaced(entry, lambda: _At(place, keys)) for entry in stock_caches(model)]
    with restored(model):
        logits_of(model, mx.array([[1]]), caches)
    mx.eval(keys)
    return keys


def _plain_ropes(model: nn.Module) -> list[Rope]:
    """The different plain RoPEs among a model's parts."""
    modules = [module for _, module in model.named_modules() if type(module) is nn.RoPE]
    ropes = [Rope(m.dims, float(m.base), float(m.scale), bool(m.traditional)) for m in modules]
    return list(dict.fromkeys(ropes))


def _explains(rope: Rope, here: mx.array, there: mx.array) -> bool:
    """Whether the same token's keys at the two places differ by this RoPE."""
    if rope.dims > here.shape[-1]:
        return False
    turned = rope.turned(here, mx.full(here.shape[:3], FAR)).astype(mx.float32)
    there = there.astype(mx.float32)
    off = mx.abs(turned - there).max() / mx.maximum(mx.abs(there).max(), 1e-9)
    return bool((off < TOLERANCE).item())
