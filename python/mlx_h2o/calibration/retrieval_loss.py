"""Per-head retrieval loss: what predictions lose where a text repeats tokens that heads evicted.

Prose rarely needs tokens of long ago. Heads that copy from far back look idle in it and would get
few slots; a fact that a later question needs would then be lost. So stretches of a text are
repeated further on. Over such a repetition (an echo) a head's output changes by e if the head no
longer holds the first occurrence. With a part a of every head's e in its output, predictions
diverge from the full cache's by KL(a), and a head's retrieval loss is its part of that divergence:

    KL(1) = integral over a of sum_h g_h(a) . e_h        g_h: the gradient of KL by h's output

This is integrated gradients (Sundararajan et al., arXiv 1703.01365), in a network's parts
attribution patching (Syed et al., arXiv 2310.10348). A head's error relative to the residual stream
would not do, whatever predictions feel in prose: it misses the heads of early layers which match a
question's words with the fact's (docs/results/experiments.md). Only the heads' proportions count,
since how far predictions diverge without any memory says little about what a fact is worth.

No policy can know what a later query needs: a head of b slots is assumed to have evicted the first
occurrence with probability 1 - b/n after n tokens (`budgets/profile.py`). Related: retrieval heads
(Wu et al., arXiv 2404.15574) and DuoAttention (2410.10819), which finds them by passkeys planted in
prose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.calibration.sensitivity import WINDOW, Movable
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.recorder import (
    HeadWeights,
    LookingCache,
    Watcher,
    block_attention,
    full_attention,
    looked_through,
    profiled_kinds,
    trained_context,
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
#: Pages that are read. The parts of SmolLM2's heads in one and in another correlate by 0.96,
#: those of Qwen2.5-Coder-1.5B's by 0.65.
PAGES = 2
#: The part a of the changes at which gradients are taken, in the place of the integral.
MIDDLE = 0.5
#: The retrieval loss of all heads together, in nats of a token. `ECHO_PART` weighs it beside prose.
TOTAL = 0.25


@dataclass(frozen=True)
class Echo:
    """A stretch of `ECHO` tokens that occurs twice.

    Attributes:
        first: Position of its first token.
        again: Position of its first token where it is repeated.
    """

    first: int
    again: int

    @property
    def counted(self) -> slice:
        """Positions of the repetition that count."""
        return slice(self.again + LEAD, self.again + ECHO)


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


def retrieval_losses(
    model: nn.Module,
    tokens: Sequence[int],
    with_gradients: bool = True,
    progress: Callable[[float], None] | None = None,
) -> np.ndarray:
    """The retrieval loss of each head, `[heads]` float32, the layers one after the other.

    Args:
        model: An mlx-lm model that mlx_h2o can route.
        tokens: A text; a thousand tokens suffice. One shorter than a period has no echoes and no
            loss.
        with_gradients: Whether all operations of the model have gradients.
        progress: Called with the part that is done, from 0 to 1.

    Returns:
        Nats, `TOTAL` in all. Without gradients each head's error over echoes relative to the
        residual stream, E ||W_o e||^2 / ||residual after attention||^2.
    """
    routing.install()
    pages = pages_of(tokens, min(WINDOW, trained_context(model)))[:PAGES]
    losses = np.zeros(sum(kind.heads for kind in profiled_kinds(model)))
    if not echoes_in(pages.shape[1]):
        return losses.astype(np.float32)
    tell = progress or (lambda done: None)
    for i, page in enumerate(pages):
        changes = Changes(model, mx.array(page[None]), weigh=not with_gradients)
        tell((i + 0.5) / len(pages))
        if with_gradients:
            losses = losses + np.maximum(changes.attributed(model, MIDDLE), 0)
        else:
            losses = losses + changes.errors / len(pages)
        tell((i + 1) / len(pages))
    if with_gradients:
        losses = TOTAL * losses / max(losses.sum(), np.finfo(float).tiny)
    return losses.astype(np.float32)


class Changes:
    """What a page's heads compute otherwise if they lost the first occurrence of each echo.

    Args:
        model: The model.
        page: `[1, T]`, with at least one echo.
        weigh: Whether to compute `errors`.

    Attributes:
        page: As given.
        outputs: The change e of each layer's output, `[1, Hq, T, Dv]`, evaluated.
        kv_heads: KV heads of each layer.
        errors: Each head's mean error over echoes relative to the residual stream, `[heads]`.
    """

    def __init__(self, model: nn.Module, page: mx.array, weigh: bool = False):
        self.page = page
        watcher, made = Watcher(), list[Hiding]()
        echoes = echoes_in(page.shape[1])

        def hiding(index: int) -> LookingCache:
            made.append(Hiding(echoes, watcher, weigh))
            return made[-1]

        logits = looked_through(model, page, watcher, hiding)
        positions = np.arange(page.shape[1])
        self._counted = mx.array(np.concatenate([positions[echo.counted] for echo in echoes]))
        self._logp = self._log_probabilities(logits)
        mx.eval(self._logp)
        self.outputs = [layer.change for layer in made]
        self.kv_heads = [len(layer.errors) for layer in made]
        self.errors = np.concatenate([layer.errors for layer in made])

    def attributed(self, model: nn.Module, part: float) -> np.ndarray:
        """Each head's part of the divergence, `[heads]`, a sum over the positions that count.

        Args:
            model: The model.
            part: The part a of the changes at which the gradients are taken.

        Raises:
            RuntimeError, ValueError: An operation of the model has no gradient.
        """
        at = [part * change for change in self.outputs]
        every = tuple(range(len(at)))
        gradients = mx.grad(partial(self.divergence, model), argnums=every)(*at)
        nats = []
        for gradient, change, heads in zip(gradients, self.outputs, self.kv_heads, strict=True):
            nats.append((gradient * change).reshape(heads, -1).sum(axis=-1))
        mx.eval(nats)
        return np.concatenate([np.array(of_layer, np.float64) for of_layer in nats])

    def divergence(self, model: nn.Module, *added: mx.array) -> mx.array:
        """KL from the full cache's predictions to those with changed outputs, in nats.

        Args:
            model: The model.
            added: What is added to each layer's output, `[1, Hq, T, Dv]`.
        """
        logits = looked_through(model, self.page, Watcher(), lambda i: Movable(added[i]))
        apart = self._logp - self._log_probabilities(logits)
        return (mx.exp(self._logp) * apart).sum()

    def _log_probabilities(self, logits: mx.array) -> mx.array:
        """Log probabilities at the positions that count, `[n, vocabulary]` float32."""
        of_echoes = logits[0, self._counted].astype(mx.float32)
        return of_echoes - mx.logsumexp(of_echoes, axis=-1, keepdims=True)


class Hiding(LookingCache):
    """A looking cache that notes what its layer computes without first occurrences.

    Args:
        echoes: The page's echoes.
        watcher: Sees the blocks.
        weigh: Whether to compute `errors`, which takes the layer's output projection.

    Attributes:
        change: The change of the layer's output, `[1, Hq, T, Dv]`, evaluated.
        errors: Each head's mean error over echoes, relative to the residual stream `[H]`; 0 if they
            are not weighed.
    """

    knows_softcap = True
    change: mx.array
    errors: np.ndarray

    def __init__(self, echoes: Sequence[Echo], watcher: Watcher, weigh: bool = False):
        self.echoes, self.watcher, self.weigh = echoes, watcher, weigh

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        out = full_attention(call.q, keys, values, call.scale, call.sinks, call.softcap)
        change = mx.zeros(out.shape)
        for echo in self.echoes:
            counted, end = echo.counted, echo.again + ECHO
            at = mx.arange(end)
            first = (at >= echo.first) & (at < echo.first + ECHO)
            without = block_attention(
                *(call.q[:, :, counted], keys[:, :, :end], values[:, :, :end]),
                mask=(at <= at[counted, None]) & ~first,
                scale=call.scale,
                sinks=call.sinks,
                softcap=call.softcap,
            )
            change[:, :, counted] = without - out[:, :, counted]
        mx.eval(change)
        self.change, self.errors = change, np.zeros(keys.shape[1])
        if self.weigh:
            weights = HeadWeights.of(self.watcher, out, keys.shape[1])
            for echo in self.echoes:
                errors = weights.errors(change[:, None, :, echo.counted], echo.counted.start)
                self.errors += np.array(errors.mean(axis=(1, 2))) / len(self.echoes)
        return out
