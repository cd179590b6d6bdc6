"""KeyDiff: keep keys that point away from the others."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies.base import KernelPolicy, Policy, Slots
from mlx_h2o.policies.registry import register_policy


@register_policy("keydiff")
@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keeps keys unlike the mean direction of the kept keys: 1 - cos(k, mean of k / ||k||).

    Source: Park et al. 2025, arXiv 2504.15364, section 3. Uses keys alone, so it runs where
    attention is hidden, and remembers facts well; reads all keys at each choice.
    """

    prompt: str = "full"

    ranks_scores = False
    suits_frames = False

    @property
    def needs_attention(self) -> bool:
        return False

    def kernel_policy(self) -> KernelPolicy | None:
        return KernelPolicy("none", "direction")

    def priority(self, slots: Slots) -> mx.array:
        keys = slots.keys.astype(mx.float32)
        directions = keys * mx.rsqrt(mx.square(keys).sum(axis=-1, keepdims=True) + 1e-12)
        anchor = directions.mean(axis=2)
        anchor = anchor * mx.rsqrt(mx.square(anchor).sum(axis=-1, keepdims=True) + 1e-12)
        return 1 - (directions @ anchor[..., None]).squeeze(-1)
