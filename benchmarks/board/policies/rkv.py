"""R-KV: keep tokens that are attended to and whose keys are unlike those of other tokens."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o import Slots, SnapKV, register_policy

# The least squared length of a key, for its direction.
NO_LENGTH = 1e-12


@register_policy("r-kv")
@dataclass(frozen=True)
class RKV(SnapKV):
    """Weighs `snapkv`'s importance against redundancy: long reasoning repeats itself.

        importance_weight * importance - (1 - importance_weight) * redundancy

    Both sum to 1 over a head's slots. Source: Cai et al. 2025, arXiv 2505.24133, section 3: a
    slot's redundancy is the softmax of its key's mean cosine with all others. Cosines below
    `least_similarity` do not count, nor does the newest similar one, so that of equal tokens the
    newest stays. All keys are compared with all others, so tokens are evicted `evict_every` at a
    time, op by op. (The paper compresses each 128 new tokens.)

    Attributes:
        importance_weight: The paper's lambda.
        least_similarity: The cosine from which two keys count as similar.
    """

    importance_weight: float = 0.1
    least_similarity: float = 0.5
    evict_every: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.importance_weight <= 1:
            raise ValueError(
                f"importance_weight must be from 0 to 1; got {self.importance_weight}."
            )

    def priority(self, slots: Slots) -> mx.array:
        return self.joint(self.weighted(slots.scores, slots), slots)

    def prompt_priority(self, slots: Slots, window_mass: mx.array | None) -> mx.array:
        if window_mass is None:
            return self.priority(slots)
        return self.joint(super().prompt_priority(slots, window_mass), slots)

    def joint(self, importance: mx.array, slots: Slots) -> mx.array:
        """The priority `[B, H, N]` for importances `[B, H, N]` of any scale."""
        whole = mx.maximum(importance.sum(axis=-1, keepdims=True), NO_LENGTH)
        repeated = redundancy(slots.keys, slots.positions, self.least_similarity)
        own = self.importance_weight
        return own * importance / whole - (1 - own) * repeated


def redundancy(keys: mx.array, positions: mx.array, least: float) -> mx.array:
    """The redundancy of each key: its similarity to the others, summing to 1, `[B, H, N]`.

    Args:
        keys: `[B, H, N, D]`.
        positions: `[B, H, N]`.
        least: The cosine from which two keys are similar.
    """
    k = keys.astype(mx.float32)
    k = k * mx.rsqrt(mx.maximum(mx.square(k).sum(axis=-1, keepdims=True), NO_LENGTH))
    cosines = k @ k.swapaxes(-1, -2)
    N = k.shape[2]
    similar = (cosines >= least) & ~mx.eye(N, dtype=mx.bool_)
    # Row i: the keys similar to i. The newest of them does not count as redundant because of i.
    at = mx.where(similar, positions[..., None, :], -1)
    counted = similar & (at != at.max(axis=-1, keepdims=True))
    mean = mx.where(counted, cosines, 0).sum(axis=-2) / N
    return mx.softmax(mean, axis=-1)
