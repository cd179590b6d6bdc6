"""The AtomGradient report's score: an average of absolute logits."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies.base import KernelPolicy, Observation
from mlx_h2o.policies.ema import EMA
from mlx_h2o.policies.registry import register_policy, register_preset


@register_policy("ema-logits")
@dataclass(frozen=True)
class EMALogits(EMA):
    """Keeps large |logits|: c <- decay c + (1 - decay) mean over query heads of |s|.

    Source: the AtomGradient report on H2O for MLX; masked entries count 0. Here for fidelity to the
    report: a strongly negative logit means *no* attention, and ranking by |logit| loses to every
    other policy here (docs/results/experiments.md). Not for use.
    """

    def kernel_policy(self) -> KernelPolicy | None:
        return KernelPolicy("ema_logits", "score", decay=self.decay)

    def evidence(self, query: Observation) -> mx.array:
        B, Hq, L, N = query.logits.shape
        size = mx.where(query.logits == -mx.inf, 0.0, mx.abs(query.logits))
        return size.reshape(B, query.heads, -1, N).sum(axis=2) * (query.heads / Hq)


# The AtomGradient report: 4 sink + 128 recent + 124 heavy of 256 slots, |logit| averages per layer.
register_preset("paper", "ema-logits", sink=4, recent=128, unit="layer", prompt="full")
