"""Salient: attention mass, distance from the evicted keys, length of the value, and age."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies import terms
from mlx_h2o.policies.base import KernelPolicy, Policy, Slots
from mlx_h2o.policies.registry import register_policy


@register_policy("salient")
@dataclass(frozen=True)
class Salient(Policy):
    """Keeps tokens by their mean attention mass per step, with three lesser terms beside it:

        z(log(c / age)) + distance_weight z(log ||k - mean evicted key||^2)
            + value_weight z(log ||v||^2) - age_weight z(log age)

    each standardised over the slots that may be evicted, so that a factor or power in a term
    changes nothing. A token is salient if this sum is high. The mass per step matters most on real
    models; the other terms keep facts that no query has needed yet. Distances are `Distinct`'s: at
    least 1e-6 of the mean key's squared length, and from the mean of the kept keys while fewer than
    16 were evicted. Packed values are ranked by the ranges of their groups instead of their lengths
    (`slots/packed.py`). Source: this project (docs/results/experiments.md).

    Masses are per step and values weighted already, so age_normalised and value_weighted are
    refused. Prompts are ranked by the same sum, with the mass of the last `window` queries.

    Attributes:
        distance_weight: The weight of the distance from the evicted keys.
        value_weight: The weight of the value's length; large values move the output most.
        age_weight: The weight of the age.
    """

    distance_weight: float = 0.3
    value_weight: float = 0.3
    age_weight: float = 0.3
    recent: int | float = 0.25

    ranks_scores = False
    uses_evicted_mean = True
    uses_value_lengths = True

    def kernel_policy(self) -> KernelPolicy | None:
        return KernelPolicy(
            "sum",
            "salience",
            distance_weight=self.distance_weight,
            mass_weight=1.0,
            value_weight=self.value_weight,
            age_weight=self.age_weight,
        )

    def priority(self, slots: Slots) -> mx.array:
        return self.salience(slots.scores / slots.ages, slots)

    def prompt_priority(self, slots: Slots, window_mass: mx.array | None) -> mx.array:
        return self.priority(slots) if window_mass is None else self.salience(window_mass, slots)

    def salience(self, rate: mx.array, slots: Slots) -> mx.array:
        """The priority `[B, H, N]` for masses per step `[B, H, N]`."""
        return (
            terms.mass(rate, slots)
            + self.distance_weight * terms.distance(slots, terms.forgotten_mean(slots))
            + self.value_weight * terms.value_length(slots)
            - self.age_weight * terms.age(slots)
        )
