"""TOVA: token omission via attention."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies.base import KernelPolicy, Observation, Policy
from mlx_h2o.policies.registry import register_policy


@register_policy("tova")
@dataclass(frozen=True)
class TOVA(Policy):
    """Keeps the tokens that the last query attended to: c <- mass of the last step only.

    Source: Oren et al. 2024, arXiv 2401.06104. Use it as the memoryless extreme; `h2o` is the
    other extreme.
    """

    prompt: str = "full"

    def kernel_policy(self) -> KernelPolicy | None:
        return KernelPolicy("last", "score")

    def accumulate(self, scores: mx.array, observation: Observation) -> mx.array:
        return observation.per_query()[-1].mass

    def mean_mass(self, scores: mx.array, ages: mx.array) -> mx.array:
        return scores
