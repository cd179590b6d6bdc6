"""Fused decode steps: their plan, and the interface of decoders.

A decoder gives a layer's arrays to kernels, which change them in place, step after step, whether or
not MLX could see that there is no other reference to them (with one token of look-ahead it could
not, and would copy every key and value at every step). `end` gives the arrays back. The kernels'
side of this is c_api/src/cpu/decode_step.h and metal/decode_step.h.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import mlx.core as mx

from mlx_h2o.slots.journal import StepBefore
from mlx_h2o.slots.remainder import Remainder

if TYPE_CHECKING:
    from mlx_h2o.slots.recent_window import RecentStep


class HeadPlan(NamedTuple):
    """The plan of one KV head for a step.

    Attributes:
        start: The head's first slot in the flat buffers.
        length: The head's slots in use, the new one included.
        victim: The index of the named victim to overwrite, or -1 while there are unused slots.
        recent: How many of the last positions are protected.
        evicted: Tokens that the head has evicted, this step's victim included.
        choose: Whether the step names the next victims.
    """

    start: int
    length: int
    victim: int
    recent: int
    evicted: int
    choose: bool


class TokenPlan(NamedTuple):
    """The plan of one token in a layer.

    Attributes:
        offset: The next logical position.
        heads: One plan for each KV head.
        recent: The effect on the recent window, or None without one.
        before: The journal's entry for the step, or None; it takes the arrays that change, from a
            decoder that keeps them itself when it ends.
        aged_from: The position from which ages count.
    """

    offset: int
    heads: tuple[HeadPlan, ...]
    recent: RecentStep | None = None
    before: StepBefore | None = None
    aged_from: int = 0

    @property
    def evicts(self) -> bool:
        """Whether any head has evicted a token."""
        return any(head.evicted > 0 for head in self.heads)


class DecodeStep(NamedTuple):
    """The operands and plans of L tokens in a layer; more than one on the CPU alone.

    Attributes:
        q: `[B, Hq, L, D]`.
        k: `[B, H, L, D]`, the new keys.
        v: `[B, H, L, Dv]`, the new values.
        scale: Factor on q.k.
        sinks: Attention-sink logits `[Hq]`.
        tokens: The layer's plan for each token.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    scale: float
    sinks: mx.array | None
    tokens: Sequence[TokenPlan]


@dataclass
class Lent:
    """The arrays that a layer lends to a decoder and gets back.

    Attributes:
        fields: Fields of the slots, `[B, S, ...]` by name.
        remainder: The statistics of evicted tokens.
        victims: `[B, H, evict_every]` int32.
        window: Fields of the recent window, `[B, H, size, ...]` by name, or None without one.
    """

    fields: dict[str, mx.array]
    remainder: Remainder
    victims: mx.array
    window: dict[str, mx.array] | None = None

    def nbytes(self, remembers: bool) -> int:
        """Bytes of all arrays; the remainder's only if the layer keeps one (`remembers`)."""
        arrays = [*self.fields.values(), *(self.window or {}).values(), self.victims]
        total = sum(array.nbytes for array in arrays)
        return total + (self.remainder.nbytes if remembers else 0)


class Decoder(ABC):
    """A layer whose arrays kernels hold.

    Attributes:
        on_gpu: Whether the kernels are a GPU's.
        nbytes: Bytes of all its arrays.
    """

    on_gpu: ClassVar[bool]
    nbytes: int

    @property
    def journal_bytes(self) -> int:
        """Bytes of what the decoder itself keeps so that steps can be taken back."""
        return 0

    def take_back(self, count: int) -> bool:
        """Undo the last `count` steps in place, or return False where `end` must come first."""
        return False

    @abstractmethod
    def step(self, step: DecodeStep) -> mx.array:
        """Fold the victim, write the new row, attend, accumulate scores, choose the next victims.

        Returns:
            `[B, Hq, L, Dv]`.
        """

    @abstractmethod
    def end(self) -> Lent:
        """The arrays after the last step."""
