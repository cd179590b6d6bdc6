"""Distinct: keep tokens whose keys are far from the mean key of the evicted."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies import terms
from mlx_h2o.policies.base import KernelPolicy, Policy, Slots, value_weighted
from mlx_h2o.policies.registry import register_policy

# Without masses the distance matters more, and a lower age weight keeps the distant tokens.
KEYS_ONLY = {"mass_weight": 0.0, "age_weight": 0.25, "recent": 0.25}


@register_policy("distinct")
@dataclass(frozen=True)
class Distinct(Policy):
    """Keeps tokens that are far from all evicted ones, attended to, and young:

        z(log ||k - mean evicted key||^2) + mass_weight z(log(c / age)) - age_weight z(log age)

    each term standardised over the slots that may be evicted; c / age is the mean attention mass
    per step. Evicted tokens share one column, the remainder, whose mean key stands for them; a
    token near that mean loses little by joining it, and a token far from it (a name, a number)
    would be lost. Source: this project (measured in docs/results/experiments.md). With
    mass_weight=0 it uses keys alone and runs in any model; it is then the default of models with
    attention of their own.

    Masses are per step already, so age_normalised changes nothing; value_weighted multiplies them.
    Prompts are reduced by the distance to the mean of all keys that may be evicted, plus
    mass_weight times the standardised log mass of the prompt's last `window` queries.

    Attributes:
        mass_weight: The weight of the mean mass per step.
        age_weight: The weight of the age; a greater one makes the policy more like a window.
    """

    mass_weight: float = 0.5
    age_weight: float = 0.6
    recent: int | float = 0.2
    window: int = 16

    uses_evicted_mean = True
    suits_frames = False

    @property
    def needs_attention(self) -> bool:
        return self.mass_weight != 0

    def kernel_policy(self) -> KernelPolicy | None:
        return KernelPolicy(
            "sum" if self.needs_attention else "none",
            "distance",
            mass_weight=self.mass_weight,
            age_weight=self.age_weight,
        )

    def priority(self, slots: Slots) -> mx.array:
        worth = terms.distance(slots, terms.forgotten_mean(slots))
        if self.needs_attention:
            worth = worth + self.mass_weight * self.mass(slots.scores / slots.ages, slots)
        return worth - self.age_weight * terms.age(slots)

    def prompt_priority(self, slots: Slots, window_mass: mx.array | None) -> mx.array:
        may_go = slots.evictable.astype(mx.float32)
        total = (may_go[..., None, :] @ slots.keys.astype(mx.float32)).squeeze(2)
        total = total + slots.evicted * slots.evicted_mean_key
        count = may_go.sum(axis=-1, keepdims=True) + slots.evicted
        worth = terms.distance(slots, total / mx.maximum(count, 1))
        if self.needs_attention:
            mass = slots.scores / slots.ages if window_mass is None else window_mass
            worth = worth + self.mass_weight * self.mass(mass, slots)
        return worth

    def mass(self, rate: mx.array, slots: Slots) -> mx.array:
        """Standardised log of attention masses, `[B, H, N]`."""
        return terms.mass(value_weighted(rate, slots) if self.value_weighted else rate, slots)
