"""SnapKV: keep the tokens that the last queries attend to, and their neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.policies.base import KernelPolicy, Observation, Policy, Slots, pooled, value_weighted
from mlx_h2o.policies.registry import register_policy


@register_policy("snapkv")
@dataclass(frozen=True)
class SnapKV(Policy):
    """Keeps the tokens that an observation window of the last `window` queries attends to.

    Source: Li et al. 2024, arXiv 2404.14469, section 4: at the end of a prompt the window's masses
    are summed, and each slot gets the maximum over its `pool` neighbours, so that the neighbours of
    a hit are kept with it. Published for prompts alone: there generated tokens are never evicted.
    Here the window continues while decoding, as an average with the window's decay,
    c <- (1 - 1/window) c + mass/window, and without the pool. Use it where the question is known
    when the prompt is reduced; it keeps little that is unrelated to the question.
    """

    window: int = 32
    pool: int = 7
    recent: int | float = 0.25

    @property
    def decay(self) -> float:
        """The decay of the average that continues the window while decoding."""
        return 1 - 1 / self.window

    def kernel_policy(self) -> KernelPolicy | None:
        return KernelPolicy("ema", "score", decay=self.decay)

    def accumulate(self, scores: mx.array, observation: Observation) -> mx.array:
        for query in observation.per_query():
            scores = self.decay * scores + (1 - self.decay) * query.mass
        return scores

    def mean_mass(self, scores: mx.array, ages: mx.array) -> mx.array:
        return scores

    def prompt_priority(self, slots: Slots, window_mass: mx.array | None) -> mx.array:
        if window_mass is None:
            return self.priority(slots)
        mass = maximum_pool(window_mass, slots.positions, self.pool)
        return value_weighted(mass, slots) if self.value_weighted else mass


def maximum_pool(mass: mx.array, positions: mx.array, width: int) -> mx.array:
    """The maximum of `width` neighbours in order of position.

    Args:
        mass: `[B, H, N]`, at least 0.
        positions: `[B, H, N]`; slots lie in any order.
        width: Odd.
    """
    return pooled(mass, positions, width, window_maxima)


def window_maxima(x: mx.array, width: int) -> mx.array:
    """Maxima over each `width` neighbours: `[..., N]` to `[..., N - width + 1]`."""
    places = x.shape[-1] - width + 1
    most, reach = x, 1
    while 2 * reach <= width:
        most = mx.maximum(most[..., :-reach], most[..., reach:])
        reach *= 2
    return mx.maximum(most[..., :places], most[..., width - reach : width - reach + places])
