"""The second reading of a prompt: the attention that its rows receive when it is repeated.

Source: KVzip (Kim et al. 2025, arXiv 2505.23416). The prompt is read with a full cache; then the
model is asked to repeat it, and reads it a second time, chunk by chunk, with the first reading's
keys and values before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.attention.backends.reference import softcapped
from mlx_h2o.attention.call import AttentionCall, Looking
from mlx_h2o.attention.ops import scaled_dot_product_attention_with_mass
from mlx_h2o.hosts.cache_lists import entries, replaced
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.hosts.loaded import is_plain, logits_of
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.layer.value_fit import MOST_QUERIES

#: The text at the start of the second reading.
REPEAT = "\n\nRepeat the previous context exactly:\n\n"

#: Called with the number of further tokens done.
Tell = Callable[[int], None]


class RereadCache(Looking):
    """One layer in the second reading: the first reading's rows, and the attention they receive.

    Args:
        first: The layer's full cache.
        every: One of each so many queries is kept, to fit values by; 0: none is.
    """

    def __init__(self, first: Any, every: int):
        self.offset = first.offset
        # The cache's buffers are longer than the rows it holds.
        assert first.keys is not None
        assert first.values is not None
        self.keys = first.keys[..., : self.offset, :]
        self.values = first.values[..., : self.offset, :]
        B, H, T, _ = self.keys.shape
        self.most, self.summed = mx.zeros((B, H, T)), mx.zeros((B, H, T))
        self._every, self._calls = every, list[AttentionCall]()

    @property
    def call(self) -> AttentionCall:
        """A call with the queries that were kept."""
        q = mx.concatenate([call.q for call in self._calls], axis=2)
        return self._calls[-1].with_queries(q)

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> None:
        """None, whatever the arguments: `attend` determines the mask."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The same rows."""
        return keys, values

    @property
    def state(self) -> list[mx.array]:
        """The results of the second reading."""
        return [self.most, self.summed, *(call.q for call in self._calls)]

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Attend to the whole prompt and, causally, to the chunk itself.

        Args:
            call: Queries `[B, Hq, L, D]`; its mask is not read.
            keys: Keys of the chunk, `[B, Hk, L, D]`.
            values: Values of the chunk, `[B, Hk, L, Dv]`.

        Returns:
            `[B, Hq, L, Dv]`.
        """
        q = call.q
        B, Hq, L, D = q.shape
        H, T = self.keys.shape[1], self.offset
        # MLX's exp on a CPU takes most of the time of a softmax written out: the kernels attend and
        # sum the mass, and here only each row's largest weight goes through exp.
        out, mass, lse = scaled_dot_product_attention_with_mass(
            q,
            mx.concatenate([self.keys, keys], axis=2),
            mx.concatenate([self.values, values], axis=2),
            scale=call.scale,
            mask="causal",
            sinks=call.sinks,
            softcap=call.softcap,
        )
        queries = q.astype(mx.float32).reshape(B, H, -1, D) * call.scale
        # Every query attends to the whole prompt, so these need no mask.
        logits = softcapped(queries @ self.keys.astype(mx.float32).swapaxes(-1, -2), call.softcap)
        above = logits - lse.reshape(B, H, -1, 1)
        self.most = mx.maximum(self.most, mx.exp(above.max(axis=2)))
        self.summed = self.summed + mass[..., :T]
        if self._every:
            few = mx.contiguous(q[:, :, :: self._every])  # a view would keep all of them
            self._calls.append(call.with_queries(few))
        tied: mx.array = mx.depends(out, self.state)
        return tied


@dataclass(frozen=True)
class Reading:
    """A prompt that was read twice.

    Attributes:
        caches: The model's own full caches; the plain ones are to be reduced.
        rows: Keys and values of each plain cache, `[B, H, T, ...]`.
        worths: Worths of each plain cache's rows `[B, H, T]`: the greatest weight from any query.
        rates: Rates of each plain cache's rows `[B, H, T]`: the mean mass from a query.
        asked: Queries of each plain cache, if they were to be kept; else empty.
    """

    caches: list[Any]
    rows: list[tuple[mx.array, mx.array]]
    worths: list[mx.array]
    rates: list[mx.array]
    calls: list[AttentionCall]


def read_twice(
    model: nn.Module,
    tokens: mx.array,
    repeat: Sequence[int],
    chunk: int,
    tell: Tell,
    keeps_queries: bool = True,
) -> Reading:
    """Read a prompt, then read it again as if to repeat it.

    Args:
        model: An mlx-lm model.
        tokens: `[B, T]`.
        repeat: Token ids of the request to repeat it.
        chunk: Tokens that go through the model at once.
        tell: Called with the number of further tokens done.
        keeps_queries: Whether some queries are kept, to fit values to their attention.

    Raises:
        ValueError: The model does not attend to its cached rows through this library.
    """
    kinds = layer_kinds(model)
    apart = (k.derived or not k.routed or k.sharers > 1 or k.indexes for k in kinds)
    if not kinds or any(apart):
        raise ValueError(
            "This model's attention does not come through mlx-h2o, so the attention of a second "
            "reading is not observed: its prompts cannot be compressed."
        )
    B, T = tokens.shape
    caches = stock_caches(model)
    for start in range(0, T, chunk):
        part = tokens[:, start : start + chunk]
        logits_of(model, part, caches)
        mx.eval([entry.state for entry in caches])
        tell(B * part.shape[1])
    group = max(kind.group for kind in kinds)
    every = -(-T * group // MOST_QUERIES) if keeps_queries else 0
    plain = [RereadCache(entry, every) for _, entry in entries(caches) if is_plain(entry)]
    request = mx.broadcast_to(mx.array([list(repeat)], dtype=tokens.dtype), (B, len(repeat)))
    for start in range(0, T, chunk):
        part = tokens[:, start : start + chunk]
        looking = looking_caches(caches, plain)
        again = mx.concatenate([request, part], axis=1)
        mx.eval(logits_of(model, again, looking)[:, -1:, :1])
        mx.eval([one.state for one in plain])
        tell(B * part.shape[1])
    queries = T + len(repeat) * -(-T // chunk)
    rates = [one.summed / queries for one in plain]
    rows = [(one.keys, one.values) for one in plain]
    calls = [one.call for one in plain] if keeps_queries else []
    return Reading(caches, rows, [one.most for one in plain], rates, calls)


def looking_caches(caches: Sequence[Any], plain: Sequence[Looking]) -> list[Any]:
    """A model's list with looking caches; other caches continue from the first reading.

    Args:
        caches: The model's own caches, which have read the prompt; they stay as they are.
        plain: A cache in the place of each plain one.
    """
    again = iter(plain)
    own = [entry if is_plain(entry) else copy.deepcopy(entry) for entry in caches]
    return [replaced(entry, lambda: next(again)) for entry in own]
