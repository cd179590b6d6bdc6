"""A policy in the fused kernels' terms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelPolicy:
    """What the kernels accumulate and rank.

    Attributes:
        score: What is accumulated: "none", "sum" (of masses), "ema", "ema_logits" or "last".
        priority: What is ranked: "score", "age", "distance" (`Distinct`), "direction" (`KeyDiff`)
            or "salience" (`Salient`, which looks at values too).
        decay: Of the averages.
        distance_weight: Of `Distinct` and `Salient`, as the next three.
        mass_weight: Of the mean mass per step; 0 where no masses are accumulated.
        value_weight: Of the value's length.
        age_weight: Of the age.
        per_layer: Whether the heads' mean priority decides for all.
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
        """Decay of the averages; of distance, mass, value and age, as in metal/priority.h."""
        terms = self.distance_weight, self.mass_weight, self.value_weight, -self.age_weight
        return self.decay, *terms
