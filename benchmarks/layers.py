"""Layers with every slot in use, for fused decode steps of any size without a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import mlx.core as mx

from mlx_h2o.attention.backends import choice
from mlx_h2o.attention.backends.decoder import DecodeStep, HeadPlan, Lent, TokenPlan
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.policies import Policy
from mlx_h2o.slots.packed import Packing, value_lengths
from mlx_h2o.slots.remainder import Remainder

# Tokens that a layer has seen beyond those that it holds.
EVICTED = 1000


def full_layer(
    policy: Policy,
    keys: mx.array,
    values: mx.array,
    lengths: Sequence[int],
    q: mx.array,
    *,
    remainder: bool = True,
    packing: Packing | None = None,
) -> Callable[[], mx.array]:
    """A layer that has been evicting for a long time.

    Args:
        policy: The policy that chooses a victim at every step.
        keys: `[1, S, D]`; the layer takes its own copy.
        values: `[1, S, Dv]`.
        lengths: Slots of each KV head, S in all.
        q: Queries `[1, Hq, 1, D]` of every step.
        remainder: Whether the evicted tokens form a remainder.
        packing: The packing of rows; dense by default.

    Returns:
        One decode step: its output, to be evaluated.
    """
    heads, width, value_width = len(lengths), keys.shape[-1], values.shape[-1]
    positions = mx.concatenate([mx.arange(EVICTED, EVICTED + n) for n in lengths])
    packing = packing or Packing()
    fields = {**packing.fields("keys", keys + 0), **packing.fields("values", values + 0)}
    fields["positions"] = positions[None]
    if policy.needs_attention:
        fields["scores"] = mx.random.uniform(shape=positions[None].shape)
    if policy.keeps_value_lengths(packing):
        fields["value_lengths"] = value_lengths(values)
    remembered = Remainder.empty(1, heads, width, value_width)
    remembered.count += EVICTED
    remembered.var_key += 1
    victims = mx.zeros((1, heads, 1), mx.int32)
    new_key = mx.random.normal((1, heads, 1, width)).astype(keys.dtype)
    new_value = mx.random.normal((1, heads, 1, value_width)).astype(values.dtype)
    mx.eval(fields, remembered.arrays, victims, new_key, new_value)
    settings = CacheSettings(
        budgets=tuple(lengths), policy=policy, remainder=remainder, packing=packing
    )
    layer = choice.decoder_for(Lent(fields, remembered, victims), settings)
    del fields, victims, remembered
    starts = [0, *accumulate(lengths)]
    offset = EVICTED + max(lengths)

    def step() -> mx.array:
        nonlocal offset
        offset += 1
        plan = tuple(
            HeadPlan(start, n, 0, policy.recent_slots(n), offset - n, True)
            for start, n in zip(starts, lengths, strict=False)
        )
        return layer.step(
            DecodeStep(q, new_key, new_value, width**-0.5, None, [TokenPlan(offset, plan)])
        )

    return step
