"""ChunkKV: keep stretches of text instead of single tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlx_h2o import Slots, SnapKV, register_policy
from mlx_h2o.policies import KernelPolicy


@register_policy("chunkkv")
@dataclass(frozen=True)
class ChunkKV(SnapKV):
    """`snapkv`, with prompts cut into chunks that are kept or dropped as wholes.

    Source: Liu et al. 2025, arXiv 2502.00299, section 3: a chunk's worth is the sum of its tokens'
    mass from the observation window, so that a meaning is not torn apart. The paper's reuse of one
    layer's choice in the next is left out: a policy sees one layer at a time. A chunk that has lost
    some tokens is worth the mean of those it still holds, so that it competes as a whole one does.
    While decoding, single tokens are evicted, by `snapkv`'s average.

    Attributes:
        chunk: Tokens of a chunk, counted from the start of the text.
    """

    chunk: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1; got {self.chunk}.")

    def kernel_policy(self) -> KernelPolicy | None:
        # While decoding nothing differs from `snapkv`, so its fused kernels serve here, too.
        return super().kernel_policy()

    def prompt_priority(self, slots: Slots, window_mass: mx.array | None) -> mx.array:
        mass = self.priority(slots) if window_mass is None else window_mass
        return self.weighted(chunk_means(mass, slots.positions // self.chunk), slots)


def chunk_means(values: mx.array, chunks: mx.array) -> mx.array:
    """Each slot's mean over the slots of its chunk, `[B, H, N]`.

    Args:
        values: `[B, H, N]`.
        chunks: `[B, H, N]`, the chunk of each slot.
    """
    B, H, N = values.shape
    most = cast(int, chunks.max().item()) + 1
    flat = chunks.reshape(B * H, N) + most * mx.arange(B * H)[:, None]
    zeros = mx.zeros(B * H * most)
    sums = zeros.at[flat.reshape(-1)].add(values.reshape(-1))
    counts = zeros.at[flat.reshape(-1)].add(mx.ones(B * H * N))
    return (sums / mx.maximum(counts, 1))[flat].reshape(B, H, N)
