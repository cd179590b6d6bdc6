"""Ada-KV: a layer's heads get slots in proportion to their tokens among the layer's best."""

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
    """`snapkv`, with a layer's slots shared out among its KV heads when a prompt is reduced.

    Source: Feng et al. 2024, arXiv 2407.11550, algorithm 1: the tokens of all heads of a layer are
    ranked together, and a head gets as many slots as it has tokens among the best. Every head keeps
    a part of its even share (`least_share`, the paper's safeguard). The storage is real: a head
    with few slots takes few bytes, and the layer's bytes are those of even shares. While decoding,
    shares stay as the last prompt chunk set them. A model's own profile shares slots out by
    measured losses, over all layers; this policy needs no calibration.

    Attributes:
        least_share: The part of the even share that every head keeps.
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
        """Slots of each head by its tokens among the best, as many in all as `budgets`.

        Args:
            worths: The worths of each KV head's tokens `[B, N]`, minus infinity for protected
                tokens.
            budgets: The slots of each head so far.
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
    """Shares as whole numbers of the same sum, plus `least` each; the largest remainders round up.

    Args:
        shares: The heads' shares.
        whole: The sum of the shares.
        least: Slots that each head gets in addition.
    """
    counts = [int(share) for share in shares]
    rests = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in rests[: whole - sum(counts)]:
        counts[i] += 1
    return [count + least for count in counts]
