"""The default: keep what the remainder cannot stand for."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies.base import (
    MASS_FLOOR,
    Policy,
    Slots,
    register_policy,
    standardised,
    value_weighted,
)
from mlx_h2o.policies.kernel_policy import KernelPolicy

# Fewer evicted keys than this give no mean worth measuring distances from; the kept ones serve.
FEWEST_FOR_A_MEAN = 16

# Without masses the distance does more of the work, and less age keeps what it finds.
KEYS_ONLY = {"mass_weight": 0.0, "age_weight": 0.25, "recent": 0.25}


@register_policy("distinct")
@dataclass(frozen=True)
class Distinct(Policy):
    """Keeps tokens that are far from all that was forgotten, used, and young:

        z(log ||k - mean evicted key||^2) + mass_weight z(log(c / age)) - age_weight z(log age)

    each term standardised over the slots that may go; c / age is the mean attention mass per step.
    Evicted tokens answer together through the remainder, whose mean key stands for them; a token
    near that mean loses little by joining it, and a token far from it (a name, a number) would be
    lost. Source: this project (docs/policies.md has the measurements). The default; with
    mass_weight=0 it looks at keys only and runs in any model.

    Masses are per step already, so age_normalised changes nothing; value_weighted multiplies them.
    Prompts are reduced by the distance to the mean of all keys that may go, plus mass_weight times
    the standardised log mass of the prompt's last `window` queries.

    Attributes:
        mass_weight: Of the mean mass per step.
        age_weight: Of the age; more makes it a softer window.
    """

    mass_weight: float = 0.5
    age_weight: float = 0.6
    recent: int | float = 0.2
    window: int = 16

    uses_evicted_mean = True

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
        mean = slots.evicted_mean_key
        if slots.evicted < FEWEST_FOR_A_MEAN:
            mean = slots.keys.astype(mx.float32).mean(axis=2)
        ages = slots.ages
        worth = self.distance(slots, mean)
        if self.needs_attention:
            mass = slots.scores / ages
            worth = worth + self.mass_weight * self.log_mass(mass, slots)
        return worth - self.age_weight * standardised(mx.log(ages), slots.evictable)

    def prompt_priority(self, slots: Slots, window_mass: mx.array | None) -> mx.array:
        may_go = slots.evictable.astype(mx.float32)
        total = (may_go[..., None, :] @ slots.keys.astype(mx.float32)).squeeze(2)
        total = total + slots.evicted * slots.evicted_mean_key
        count = may_go.sum(axis=-1, keepdims=True) + slots.evicted
        worth = self.distance(slots, total / mx.maximum(count, 1))
        if self.needs_attention:
            mass = slots.scores / slots.ages if window_mass is None else window_mass
            worth = worth + self.mass_weight * self.log_mass(mass, slots)
        return worth

    def distance(self, slots: Slots, mean: mx.array) -> mx.array:
        """Standardised log ||k - mean||^2, `[B, H, N]`."""
        apart = slots.keys.astype(mx.float32) - mean[:, :, None]
        square = mx.square(apart).sum(axis=-1)
        # A key at the mean itself must not stretch the scale for all others.
        least = 1e-6 * mx.square(mean).sum(axis=-1, keepdims=True) + 1e-12
        return standardised(mx.log(mx.maximum(square, least)), slots.evictable)

    def log_mass(self, mass: mx.array, slots: Slots) -> mx.array:
        """Standardised log of attention masses, `[B, H, N]`."""
        if self.value_weighted:
            mass = value_weighted(mass, slots)
        return standardised(mx.log(mass + MASS_FLOOR), slots.evictable)
