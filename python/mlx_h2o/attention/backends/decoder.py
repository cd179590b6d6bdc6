"""Fused decode steps: their plan, and the interface of what computes them.

A decoder has a layer's arrays in the hands of kernels, which change them in place, step after step,
without asking whether MLX could see that there is no other reference to them (with one token of
look-ahead it could not, and would copy every key and value at every step). `end` hands the arrays
back. c_api/src/cpu/decode_step.h and metal/decode_step.h are the kernels' side of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_h2o.storage.journal import StepBefore
from mlx_h2o.storage.recent_window import RecentStep
from mlx_h2o.storage.remainder import Remainder


class HeadPlan(NamedTuple):
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


class PlannedToken(NamedTuple):
    """What one token does in a layer.

    Attributes:
        offset: The next logical position.
        heads: One plan for each KV head.
        recent: What happens in the recent window, if there is one.
        before: Takes the arrays that the step changes, as they are before it.
        aged_from: The position from which ages count.
    """

    offset: int
    heads: tuple[HeadPlan, ...]
    recent: RecentStep | None = None
    before: StepBefore | None = None
    aged_from: int = 0


class DecodeStep(NamedTuple):
    """One token of a layer.

    Attributes:
        q: `[B, Hq, 1, D]`.
        k: `[B, H, 1, D]`, the new key.
        v: `[B, H, 1, Dv]`, the new value.
        scale: Factor on q.k.
        sinks: Attention-sink logits `[Hq]`.
        token: What the layer planned for it.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    scale: float
    sinks: mx.array | None
    token: PlannedToken


@dataclass
class Lent:
    """The arrays that a layer lends to a decoder, and gets back.

    Attributes:
        fields: Of the slots, `[B, S, ...]` by name.
        remainder: Statistics of the evicted.
        victims: `[B, H, evict_every]` int32.
        window: Of the recent window, `[B, H, size, ...]` by name, or None where there is none.
    """

    fields: dict[str, mx.array]
    remainder: Remainder
    victims: mx.array
    window: dict[str, mx.array] | None = None

    def nbytes(self, remembers: bool) -> int:
        """Bytes of all arrays; of the remainder only where it is kept up."""
        arrays = [*self.fields.values(), *(self.window or {}).values(), self.victims]
        total = sum(array.nbytes for array in arrays)
        return total + (self.remainder.nbytes if remembers else 0)


class Decoder(ABC):
    """A layer whose arrays are with kernels.

    Attributes:
        nbytes: Of all that they hold.
    """

    nbytes: int

    @abstractmethod
    def step(self, step: DecodeStep) -> mx.array:
        """Fold, write, attend, accumulate, choose.

        Returns:
            `[B, Hq, 1, Dv]`.
        """

    @abstractmethod
    def end(self) -> Lent:
        """The arrays, as the last step leaves them."""
