"""EMA: the attention mass of each token, with exponential decay."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies.base import KernelPolicy, Observation, Policy
from mlx_h2o.policies.registry import register_policy


@register_policy("ema")
@dataclass(frozen=True)
class EMA(Policy):
    """Keeps recently attended tokens: c <- decay c + (1 - decay) mass, query by query.

    Source: the exponential form of H2O's sum (arXiv 2306.14048); the AtomGradient report uses it
    over logits, see `ema-logits`. Use it when topics change within a conversation.
    """

    decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1; got {self.decay}.")

    def kernel_policy(self) -> KernelPolicy | None:
        return KernelPolicy("ema", "score", decay=self.decay)

    def accumulate(self, scores: mx.array, observation: Observation) -> mx.array:
        for query in observation.per_query():
            scores = self.decay * scores + (1 - self.decay) * self.evidence(query)
        return scores

    def evidence(self, query: Observation) -> mx.array:
        """The score that one query gives each slot, `[B, H, N]`."""
        return query.mass

    def mean_mass(self, scores: mx.array, ages: mx.array) -> mx.array:
        return scores
