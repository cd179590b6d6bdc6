"""The sensitivity of the model's predictions to each head's error, in nats.

A profile's losses are errors of a head's output relative to the residual stream. The predictions
may feel one head's error ten times as much as another's: the errors of SmolLM2's first layer are
half of all heads' together and move its predictions less than the last layers' do, and the head of
recall-4m that copies counts four times as much as its others. To second order a head's error e
moves the model's predictions by

    KL = 1/2 E_y (g . e)^2        g = the gradient of log p(y) by the head's output

with y drawn from the predictions themselves (the Fisher information; labels of the text would give
another matrix: Kunstner et al., arXiv 1905.12558). One draw for each position and one pass back
give every head's term at once. Terms of two positions are left out: they have mean zero, nearly,
and most of the noise. Related: Fisher pruning (Theis et al., arXiv 1801.05787).

The errors are the policy's own with few slots, as in the trials. A head's sensitivity is its KL
over its loss; a profile's losses times the sensitivities are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o.attention.backends.reference import attention_with_scores
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.profile import SMALLEST_BUDGET
from mlx_h2o.calibration.trials import Rows, tried
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.recorder import (
    HeadWeights,
    LookingCache,
    Watcher,
    full_attention,
    looked_through,
    trained_context,
)
from mlx_h2o.policies import Policy
from mlx_h2o.slots.remainder import SATURATION

#: Tokens of a window. Its logits and all activations are in memory for the pass back.
WINDOW = 512
#: Windows, evenly spaced over the text, with a draw each; in a short text they overlap. On one
#: window of SmolLM2 the logarithm of a head's KL is off by 0.38 with one draw (standard deviation,
#: against limiting each head alone), by 0.30 with four, by 0.28 with six.
WINDOWS = 2
#: A head has one slot for so many tokens of a window: as in the small memories in which shares
#: matter most.
TOKENS_A_SLOT = 16


def sensitivities(
    model: nn.Module,
    tokens: Sequence[int],
    policy: Policy,
    windows: int = WINDOWS,
    progress: Callable[[float], None] | None = None,
) -> np.ndarray | None:
    """KL over loss of each head, `[heads]` float64, the layers one after the other.

    Args:
        model: An mlx-lm model that mlx_h2o can route.
        tokens: A text; a thousand tokens suffice.
        policy: The policy whose errors they are.
        windows: Windows of the text to read.
        progress: Called with the part that is done, from 0 to 1.

    Returns:
        Nats for each unit of loss; None where an operation of the model has no gradient.
    """
    routing.install()
    length = min(WINDOW, trained_context(model), len(tokens))
    starts = np.linspace(0, len(tokens) - length, windows).round().astype(int).tolist()
    tell = progress or (lambda done: None)
    nats = losses = np.zeros(1)
    made: Errors | None = None
    for i, start in enumerate(starts):
        window = mx.array([tokens[start : start + length]])
        if made is None or start != starts[i - 1]:
            made = Errors(model, window, policy)
        tell((i + 0.5) / windows)
        labels = mx.random.categorical(made.logits.astype(mx.float32), key=mx.random.key(i))
        try:
            nats = nats + nats_felt(model, window, labels, made.errors, made.kv_heads)
        except (RuntimeError, ValueError):
            # MLX: "[Primitive::vjp] Not implemented", or a kernel without a gradient.
            return None
        losses = losses + made.losses
        tell((i + 1) / windows)
    # A head that made no error at all is as sensitive as the others are together.
    usual = np.sum(nats) / max(np.sum(losses), np.finfo(float).tiny)
    return np.divide(nats, losses, out=np.full_like(nats, usual), where=losses > 0)


class Errors:
    """Each layer's errors over one window, from a pass of the full model.

    Attributes:
        errors: What few slots change in each layer's output, `[1, Hq, T, Dv]`, evaluated.
        losses: Each head's loss, a sum over the tokens, `[heads]`.
        kv_heads: KV heads of each layer.
        logits: `[1, T, vocabulary]`.
    """

    def __init__(self, model: nn.Module, window: mx.array, policy: Policy):
        slots = max(window.shape[1] // TOKENS_A_SLOT, SMALLEST_BUDGET, policy.least_budget())
        watcher = Watcher()
        self.errors: list[mx.array] = []
        by_layer: list[np.ndarray] = []

        def looking(index: int) -> LookingCache:
            return Limited(policy, slots, watcher, self.errors, by_layer)

        self.logits = looked_through(model, window, watcher, looking)
        mx.eval(self.logits)
        self.losses = np.concatenate(by_layer)
        self.kv_heads = [len(of_layer) for of_layer in by_layer]


class Limited(LookingCache):
    """A looking cache that notes its layer's error with few slots, and gives the full output."""

    knows_softcap = True

    def __init__(
        self,
        policy: Policy,
        slots: int,
        watcher: Watcher,
        errors: list[mx.array],
        losses: list[np.ndarray],
    ):
        self.policy, self.slots, self.watcher = policy, slots, watcher
        self.errors, self.losses = errors, losses

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        rows = Rows(call.q, keys, values, call.scale, call.sinks, call.softcap)
        out = full_attention(call.q, keys, values, call.scale, call.sinks, call.softcap)
        blocks = tried(rows, self.policy, (self.slots,), (SATURATION,), ())
        limited = mx.concatenate([outs[:, 0] for _, outs in blocks], axis=2)
        # Until its slots are full a head has no error; differences are rounding.
        at = mx.arange(rows.length)[:, None]
        error = mx.where(at >= self.slots, limited - out, 0).astype(mx.float32)
        weights = HeadWeights.of(self.watcher, out, keys.shape[1])
        self.losses.append(np.array(weights.errors(error[:, None], 0).sum(axis=(1, 2))))
        mx.eval(error)
        self.errors.append(error)
        return out


class Movable(LookingCache):
    """A looking cache with something added to its layer's output, by operations with gradients."""

    knows_softcap = True

    def __init__(self, added: mx.array):
        self.added = added

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        out, _, _ = attention_with_scores(
            *(call.q, keys, values),
            scale=call.scale,
            mask="causal",
            sinks=call.sinks,
            softcap=call.softcap,
        )
        return (out + self.added).astype(call.q.dtype)


def nats_felt(
    model: nn.Module,
    window: mx.array,
    labels: mx.array,
    errors: Sequence[mx.array],
    kv_heads: Sequence[int],
) -> np.ndarray:
    """1/2 (g . e)^2 of each head, a sum over the tokens, `[heads]`.

    Args:
        model: The model.
        window: `[1, T]`.
        labels: A token drawn from the predictions at each position, `[1, T]`.
        errors: Each layer's errors `[1, Hq, T, Dv]`.
        kv_heads: KV heads of each layer.
    """

    def likelihood(*added: mx.array) -> mx.array:
        logits = looked_through(model, window, Watcher(), lambda i: Movable(added[i]))
        return -nn.losses.cross_entropy(logits.astype(mx.float32), labels, reduction="sum")

    nothing = [mx.zeros_like(error) for error in errors]
    gradients = mx.grad(likelihood, argnums=tuple(range(len(errors))))(*nothing)
    felt = []
    for gradient, error, heads in zip(gradients, errors, kv_heads, strict=True):
        _, Hq, T, Dv = error.shape
        moved = (gradient * error).reshape(heads, Hq // heads, T, Dv).sum(axis=(1, 3))
        felt.append(0.5 * mx.square(moved).sum(axis=-1))
    mx.eval(felt)
    return np.concatenate([np.array(of_layer, np.float64) for of_layer in felt])
