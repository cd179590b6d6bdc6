"""H2O, the heavy-hitter oracle."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_h2o.policies.base import Policy, register_policy
from mlx_h2o.policies.kernel_policy import KernelPolicy


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
