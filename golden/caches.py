"""The caches of a conversation's case, one for each layer."""

from __future__ import annotations

from dataclasses import replace

from golden.group import Arrays, Parameters, policy_of
from mlx_h2o.budgets.growth import Stage
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.rope import Rope


def caches_of(p: Parameters, inputs: Arrays) -> list[BoundedKVCache]:
    """The case's caches, one for each layer.

    Args:
        p: The case's parameters.
        inputs: The layers' "frame.centre" and "frame.scale" (key scaling), or nothing.
    """
    settings = dict(p["cache"])
    rope = settings.pop("rope", None)
    budgets, stages = settings.pop("budgets"), settings.pop("filling", [])
    frames: list[Frame | None] = [None] * len(budgets)
    if inputs:
        parts = zip(inputs["frame.centre"], inputs["frame.scale"], strict=True)
        frames = [Frame(centre, scale) for centre, scale in parts]
    cls: type[BoundedKVCache]
    cls = H2OKVCache if settings.pop("attending", True) else PlainRowsKVCache
    caches: list[BoundedKVCache] = [
        cls(budgets=of_layer, policy=policy_of(p["policy"]), frame=frame, **settings)
        for of_layer, frame in zip(budgets, frames, strict=True)
    ]
    for layer, cache in enumerate(caches):
        filling = tuple(Stage(beyond, tuple(of[layer])) for beyond, of in stages)
        turning = None if rope is None else Rope.of_config(rope)
        cache.follow(replace(cache.settings, filling=filling, rope=turning))
    return caches


def most_slots(p: Parameters) -> int:
    """The most slots that a head ever has."""
    stages = [p["cache"]["budgets"], *(of for _, of in p["cache"].get("filling", ()))]
    most: int = max(slots for stage in stages for layer in stage for slots in layer)
    return most
