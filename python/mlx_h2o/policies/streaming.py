"""StreamingLLM: attention sinks and a window."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies.base import KernelPolicy, Policy, Slots
from mlx_h2o.policies.registry import register_policy


@register_policy("streaming")
@dataclass(frozen=True)
class Streaming(Policy):
    """Keeps the first `sink` tokens and the newest ones: the oldest other token is evicted first.

    Source: Xiao et al. 2023, arXiv 2309.17453; mlx-lm's RotatingKVCache(keep=4) is the same. Use it
    as the baseline; with the remainder it forgets more gently. It uses neither keys nor attention.
    """

    recent: int | float = 0
    prompt: str = "full"

    ranks_scores = False

    @property
    def needs_attention(self) -> bool:
        return False

    def kernel_policy(self) -> KernelPolicy | None:
        return KernelPolicy("none", "age")

    def priority(self, slots: Slots) -> mx.array:
        return slots.positions.astype(mx.float32)
