"""A decode step as the cache plans it, and what the kernels' side of it looks like.

python/src/decode_step.h and metal/decode_step.h are its counterparts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.recent import RecentStep
from mlx_h2o.remainder import Remainder
from mlx_h2o.store import SlotStore


@dataclass(frozen=True)
class HeadStep:
    """What one KV head does in a step.

    Attributes:
        start: Its first slot in the flat buffers.
        length: Its slots in use, the new one included.
        victim: Which of its named victims makes room, or -1 while there are unused slots.
        recent: How many of the last positions are protected.
        evicted: Tokens it has lost, this step's victim included.
        choose: Whether the next victims are to be named.
    """

    start: int
    length: int
    victim: int
    recent: int
    evicted: int
    choose: bool


class Decoding(ABC):
    """A layer whose arrays are with kernels.

    Attributes:
        nbytes: Of all that they hold.
    """

    nbytes: int

    @abstractmethod
    def step(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        offset: int,
        heads: list[HeadStep],
        recent: RecentStep | None = None,
    ) -> mx.array:
        """One token: fold, write, attend, accumulate, choose.

        Args:
            q: `[B, Hq, 1, D]`.
            k: `[B, H, 1, D]`, the new key.
            v: `[B, H, 1, Dv]`, the new value.
            scale: Factor on q.k.
            sinks: Attention-sink logits `[Hq]`.
            offset: The next logical position.
            heads: One plan for each KV head.
            recent: What happens in the recent zone, if there is one.

        Returns:
            `[B, Hq, 1, Dv]`.
        """

    @abstractmethod
    def end(self, store: SlotStore) -> tuple[Remainder, mx.array]:
        """Put the fields back into the store; the remainder and the victims."""
