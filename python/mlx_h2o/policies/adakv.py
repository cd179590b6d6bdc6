"""Ada-KV: the heads of a layer get slots by what their own tokens are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlx_h2o.policies.base import register_policy
from mlx_h2o.policies.kernel_policy import KernelPolicy
from mlx_h2o.policies.snapkv import SnapKV


@register_policy("adakv")
@dataclass(frozen=True)
class AdaKV(SnapKV):
    """`snapkv`, with a layer's slots shared out among its KV heads when a prompt is cut down.

    Source: Feng et al. 2024, arXiv 2407.11550, algorithm 1: the tokens of all heads of a layer are
    ranked together, and a head gets as many slots as it has tokens among the best. A part of its
    even share (`least_share`, the paper's safeguard) stays with every head. The storage is real:
    a head that needs little holds little, and the layer's bytes are those of even shares. While
    decoding, shares stay as the last prompt chunk left them. A model's own profile shares slots
    out by losses that were measured, over all layers; this needs no calibration.

    Attributes:
        least_share: Part of the even share that no head falls below.
    """

    least_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least_share <= 1:
            raise ValueError(f"least_share must be from 0 to 1; got {self.least_share}.")
        if self.unit == "layer":
            raise ValueError('unit="layer" keeps the same tokens in all heads: omit it here.')

    @property
    def shares_slots(self) -> bool:
        return True

    def kernel_policy(self) -> KernelPolicy | None:
        return KernelPolicy("ema", "score", decay=self.decay)

    def shared_out(self, worths: Sequence[mx.array], budgets: Sequence[int]) -> list[int]:
        """As many slots as `budgets` are in all, to each head by its tokens among the best.

        Args:
            worths: Of each KV head's tokens `[B, N]`, minus infinity where one is protected anyway.
            budgets: Slots of each head so far.
        """
        whole, heads = sum(budgets), len(budgets)
        least = max(int(self.least_share * whole / heads), self.least_budget())
        free = whole - heads * least
        if free <= 0:
            return list(budgets)
        # All sequences of a batch have one layout.
        together = mx.concatenate(list(worths), axis=-1)
        best = mx.argpartition(-together, min(free, together.shape[-1] - 1), axis=-1)[:, :free]
        edges, counts = 0, []
        for worth in worths:
            inside = (best >= edges) & (best < edges + worth.shape[-1])
            edges += worth.shape[-1]
            counts.append(inside.sum() / best.size)
        return rounded(
            [free * share for share in cast(list[float], mx.stack(counts).tolist())], free, least
        )


def rounded(shares: Sequence[float], whole: int, least: int) -> list[int]:
    """Shares as whole numbers of the same sum, each with `least` more; largest rests round up.

    Args:
        shares: Of the heads.
        whole: Their sum.
        least: What each has in addition.
    """
    counts = [int(share) for share in shares]
    rests = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in rests[: whole - sum(counts)]:
        counts[i] += 1
    return [count + least for count in counts]
