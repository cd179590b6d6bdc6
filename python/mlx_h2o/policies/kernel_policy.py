"""A policy as parameters of the fused kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelPolicy:
    """The scores that the kernels accumulate and the priority by which they rank.

    Attributes:
        score: The score: "none", "sum" (of masses), "ema", "ema_logits" or "last".
        priority: The priority: "score", "age", "distance" (`Distinct`), "direction" (`KeyDiff`) or
            "salience" (`Salient`, which uses values too).
        decay: The decay of the averages.
        distance_weight: The weight of the distance in `Distinct` and `Salient`, as the next three.
        mass_weight: The weight of the mean mass per step; 0 where no masses are accumulated.
        value_weight: The weight of the value's length.
        age_weight: The weight of the age.
        per_layer: Whether the heads' mean priority decides for all heads.
        age_normalised: Whether scores are divided by the steps since the token came.
    """

    score: str
    priority: str
    decay: float = 0.0
    distance_weight: float = 1.0
    mass_weight: float = 0.0
    value_weight: float = 0.0
    age_weight: float = 0.0
    per_layer: bool = False
    age_normalised: bool = False

    @property
    def weights(self) -> tuple[float, float, float, float, float]:
        """Decay of averages; weights of distance, mass, value and age, as in metal/priority.h."""
        terms = self.distance_weight, self.mass_weight, self.value_weight, -self.age_weight
        return self.decay, *terms
