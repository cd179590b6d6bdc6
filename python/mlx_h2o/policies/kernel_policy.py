"""A policy in the fused kernels' terms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelPolicy:
    """What the kernels accumulate and rank.

    Attributes:
        score: What is accumulated: "none", "sum" (of masses), "ema", "ema_logits" or "last".
        priority: What is ranked: "score", "age", "distance" (`Distinct`) or "direction"
            (`KeyDiff`).
        decay: Of the averages.
        mass_weight: Of `Distinct`.
        age_weight: Of `Distinct`.
        per_layer: Whether the heads' mean priority decides for all.
        age_normalised: Whether scores are divided by the steps since the token came.
    """

    score: str
    priority: str
    decay: float = 0.0
    mass_weight: float = 0.0
    age_weight: float = 0.0
    per_layer: bool = False
    age_normalised: bool = False

    @property
    def weights(self) -> tuple[float, float, float, float]:
        """Decay of the averages; of the distance, the mass and the age, as in metal/priority.h."""
        return self.decay, 1.0, self.mass_weight, -self.age_weight
