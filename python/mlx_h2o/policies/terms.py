"""The terms of `Distinct` and `Salient`, which are standardised and weighted."""

from __future__ import annotations

import mlx.core as mx

from mlx_h2o.policies.base import Slots

# Fewer evicted keys than this have no meaningful mean; the kept keys' mean is used instead.
FEWEST_FOR_A_MEAN = 16

# A mean mass per step below this counts as this: otherwise log masses of never-used slots would
# stretch the scale on which all others are compared.
MASS_FLOOR = 1e-6


def standardised(x: mx.array, among: mx.array) -> mx.array:
    """z-scores `[B, H, N]` of x by the mean and deviation among the slots marked True."""
    weight = among.astype(mx.float32)
    weight = weight / mx.maximum(weight.sum(axis=-1, keepdims=True), 1)
    mean = (x * weight).sum(axis=-1, keepdims=True)
    deviation = mx.sqrt((mx.square(x - mean) * weight).sum(axis=-1, keepdims=True))
    return (x - mean) / (deviation + 1e-6)


def forgotten_mean(slots: Slots) -> mx.array:
    """The mean key `[B, H, D]` of the evicted tokens, or of the kept ones if few were evicted."""
    if slots.evicted < FEWEST_FOR_A_MEAN:
        return slots.keys.astype(mx.float32).mean(axis=2)
    return slots.evicted_mean_key


def distance(slots: Slots, mean: mx.array) -> mx.array:
    """Standardised log ||k - mean||^2, `[B, H, N]`."""
    apart = slots.keys.astype(mx.float32) - mean[:, :, None]
    square = mx.square(apart).sum(axis=-1)
    # A key at the mean itself must not stretch the scale for all others.
    least = 1e-6 * mx.square(mean).sum(axis=-1, keepdims=True) + 1e-12
    return standardised(mx.log(mx.maximum(square, least)), slots.evictable)


def mass(rate: mx.array, slots: Slots) -> mx.array:
    """Standardised log of attention masses `[B, H, N]`."""
    return standardised(mx.log(rate + MASS_FLOOR), slots.evictable)


def value_length(slots: Slots) -> mx.array:
    """Standardised log ||v||^2, `[B, H, N]`."""
    return standardised(slots.lengths_of_values, slots.evictable)


def age(slots: Slots) -> mx.array:
    """Standardised log of the ages, `[B, H, N]`."""
    return standardised(mx.log(slots.ages), slots.evictable)
