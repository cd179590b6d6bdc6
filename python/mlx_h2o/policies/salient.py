"""Salient: attention mass, distance from the evicted keys, length of the value, and youth."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies import terms
from mlx_h2o.policies.base import Policy, Slots, register_policy
from mlx_h2o.policies.kernel_policy import KernelPolicy


@register_policy("salient")
@dataclass(frozen=True)
class Salient(Policy):
    """Keeps tokens by their mean attention mass per step, with three lesser terms beside it:

        z(log(c / age)) + distance_weight z(log ||k - mean evicted key||^2)
            + value_weight z(log ||v||^2) - age_weight z(log age)

    each standardised over the slots that may go, so that a square more or less changes nothing. The
    mass per step is what counts on real models; the other terms are what keeps facts that nothing
    has asked for yet. Distances are `Distinct`'s: at least 1e-6 of the mean key's own length
    squared, and from the mean of the kept keys while fewer than 16 were evicted. For the lengths of
    packed values the ranges of their groups stand (`storage/packed.py`). Source: this project
    (docs/results/policies.md).

    Masses are per step and values weighed already, so age_normalised and value_weighted are
    refused. Prompts are ranked by the same sum, with the mass of the last `window` queries.

    Attributes:
        distance_weight: Of the distance to what was forgotten.
        value_weight: Of the value's length: what is large moves the output most.
        age_weight: Of the age.
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
