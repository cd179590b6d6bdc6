"""Keep what is attended to, beside it what is far from the forgotten, large in value, and young."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies.base import MASS_FLOOR, Policy, Slots, register_policy, standardised
from mlx_h2o.policies.distinct import FEWEST_FOR_A_MEAN

#: Of a squared length: keeps the logarithm of a zero vector from stretching the scale of all.
LEAST_SQUARE = 1e-12


@register_policy("salient")
@dataclass(frozen=True)
class Salient(Policy):
    """Keeps tokens by their mean attention mass per step, with three lesser terms beside it:

        z(log(c / age)) + distance_weight z(log ||k - mean evicted key||)
            + value_weight z(log ||v||^2) - age_weight z(log age)

    each standardised over the slots that may go. The mass per step is what counts on real models;
    the other terms are what keeps facts that nothing has asked for yet. Source: this project
    (docs/results.md).

    Attributes:
        distance_weight: Of the distance to what was forgotten.
        value_weight: Of the value's length: what is large moves the output most.
        age_weight: Of the age.
    """

    distance_weight: float = 0.3
    value_weight: float = 0.3
    age_weight: float = 0.3
    recent: int | float = 0.25

    uses_evicted_mean = True

    def priority(self, slots: Slots) -> mx.array:
        return self.salience(mx.log(slots.scores / slots.ages + MASS_FLOOR), slots)

    def prompt_priority(self, slots: Slots, window_mass: mx.array | None) -> mx.array:
        if window_mass is None:
            return self.priority(slots)
        return self.salience(mx.log(window_mass + MASS_FLOOR), slots)

    def salience(self, log_rate: mx.array, slots: Slots) -> mx.array:
        """The priority `[B, H, N]` for log masses per step `[B, H, N]`."""
        mean = slots.evicted_mean_key
        if slots.evicted < FEWEST_FOR_A_MEAN:
            mean = slots.keys.astype(mx.float32).mean(axis=2)
        apart = slots.keys.astype(mx.float32) - mean[:, :, None]
        terms = (
            (1.0, log_rate),
            (self.distance_weight, log_length(mx.square(apart).sum(axis=-1)) / 2),
            (
                self.value_weight,
                log_length(mx.square(slots.values.astype(mx.float32)).sum(axis=-1)),
            ),
            (-self.age_weight, mx.log(slots.ages)),
        )
        worth = mx.zeros_like(log_rate)
        for weight, term in terms:
            worth = worth + weight * standardised(term, slots.evictable)
        return worth


def log_length(square: mx.array) -> mx.array:
    """Logarithm of a squared length, finite for zero."""
    return mx.log(mx.maximum(square, LEAST_SQUARE))
