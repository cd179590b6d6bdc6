"""Per-head retrieval loss: a head's error where the text repeats tokens that it no longer holds.

Prose rarely needs tokens of long ago. Heads that copy from far back look idle in it and would get
few slots; a fact that a later question needs would then be lost. So stretches of a text are
repeated further on, and the loss of a head over such a repetition (an echo) is

    E ||W_o (o - o')||^2 / ||residual after attention||^2

with o its full attention output and o' the output without the first occurrence. No policy can know
what a later query needs: a head of b slots is assumed to have evicted the first occurrence with
probability 1 - b/n after n tokens (`budgets/profile.py`). Related: retrieval heads (Wu et al.,
arXiv 2404.15574) and DuoAttention (2410.10819), which finds them by passkeys planted in prose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.recorder import (
    HeadWeights,
    LookingCache,
    Watcher,
    block_attention,
    full_attention,
    looked_through,
)

#: Of each PERIOD tokens, ECHO are an echo.
PERIOD, ECHO = 128, 24
#: Tokens of an echo before it can be recognised as one; they are not counted.
LEAD = 4
#: Tokens left out at the start of each period's prose, since the first of all are sinks. The rest
#: is cut into stretches for echoes without a remainder.
FIRST = (PERIOD - ECHO) % ECHO
STRETCHES = (PERIOD - ECHO) // ECHO
# Multiples of this, modulo 1, are spread evenly, however many there are.
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Echo:
    """A stretch of `ECHO` tokens that occurs twice.

    Attributes:
        first: Position of its first token.
        again: Position of its first token where it is repeated.
    """

    first: int
    again: int


def echoes_in(length: int) -> list[Echo]:
    """The echoes in a page of so many tokens: each stretch once, from near and far."""
    out: list[Echo] = []
    used = [0] * (length // PERIOD)
    for k in range(length // PERIOD):
        period = int(k * GOLDEN % 1 * (k + 1))
        while used[period] == STRETCHES:
            period = (period + 1) % (k + 1)
        first = period * PERIOD + FIRST + used[period] * ECHO
        used[period] += 1
        out.append(Echo(first, (k + 1) * PERIOD - ECHO))
    return out


def pages_of(tokens: Sequence[int], length: int) -> np.ndarray:
    """As many pages `[B, length]` as the text fills, each with its stretches repeated.

    Args:
        tokens: Tokens of the text; the echoes take the place of as many at its end.
        length: Tokens of a page. A shorter text makes one page of its own length.
    """
    length = min(length, len(tokens))
    echoes = echoes_in(length)
    prose = [t for t in range(length) if not any(0 <= t - e.again < ECHO for e in echoes)]
    pages = np.zeros((len(tokens) // max(length, 1), length), np.int32)
    rest = np.array(tokens[: len(pages) * len(prose)], np.int32)
    pages[:, prose] = rest.reshape(len(pages), len(prose))
    for echo in echoes:
        pages[:, echo.again : echo.again + ECHO] = pages[:, echo.first : echo.first + ECHO]
    return pages


def echo_losses(
    model: nn.Module,
    tokens: Sequence[int],
    length: int,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """The retrieval loss of each head, `[heads]`: its error over echoes it no longer holds.

    Args:
        model: An mlx-lm model that mlx_h2o can route.
        tokens: A text; some 4000 tokens.
        length: The most tokens of a page. A page shorter than a period has no echoes, and no loss.
        progress: Called with the number of layers done.

    Returns:
        The heads of the model's layers in order, in the units of a profile's losses.
    """
    routing.install()
    pages, watcher = pages_of(tokens, length), Watcher()
    echoes = echoes_in(pages.shape[1])
    losses: dict[int, np.ndarray] = {}

    def looking(index: int) -> Echoing:
        return Echoing(index, echoes, watcher, losses, progress)

    looked_through(model, mx.array(pages), watcher, looking)
    return np.concatenate([losses[i] for i in range(len(losses))])


class Echoing(LookingCache):
    """A looking cache that hides first occurrences from its layer's heads."""

    knows_softcap = True

    def __init__(
        self,
        index: int,
        echoes: Sequence[Echo],
        watcher: Watcher,
        losses: dict[int, np.ndarray],
        progress: Callable[[int], None] | None,
    ):
        self.index, self.echoes, self.watcher = index, echoes, watcher
        self.losses, self.progress = losses, progress

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        out = full_attention(call.q, keys, values, call.scale, call.sinks, call.softcap)
        H = keys.shape[1]
        weights = HeadWeights.of(self.watcher, out, H)
        total = np.zeros(H)
        for echo in self.echoes:
            start, end = echo.again + LEAD, echo.again + ECHO
            at = mx.arange(end)
            first = (at >= echo.first) & (at < echo.first + ECHO)
            without = block_attention(
                *(call.q[:, :, start:end], keys[:, :, :end], values[:, :, :end]),
                mask=(at <= mx.arange(start, end)[:, None]) & ~first,
                scale=call.scale,
                sinks=call.sinks,
                softcap=call.softcap,
            )
            difference = out[:, None, :, start:end] - without[:, None]
            total += np.array(weights.errors(difference, start).mean(axis=(1, 2)))
        self.losses[self.index] = (total / max(len(self.echoes), 1)).astype(np.float32)
        if self.progress:
            self.progress(self.index + 1)
        return out
