"""H2O, the heavy-hitter oracle."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_h2o.policies.base import KernelPolicy, Policy
from mlx_h2o.policies.registry import register_policy, register_preset


@register_policy("h2o")
@dataclass(frozen=True)
class H2O(Policy):
    """Keeps the tokens that have received the most attention so far: c <- c + mass.

    Source: Zhang et al. 2023, arXiv 2306.14048, section 4 (here with softmax mass per KV head, the
    mean over its query heads). Use it to compare with the literature; it remembers single facts
    poorly, since a fact receives no attention until a question needs it.
    """

    def kernel_policy(self) -> KernelPolicy | None:
        return KernelPolicy("sum", "score")


# Zhang et al. 2023, section 5: half heavy hitters, half recent, no sinks, sums over all queries.
register_preset("h2o-paper", "h2o", sink=0, recent=0.5, prompt="full")
