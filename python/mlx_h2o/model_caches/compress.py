"""Compression of a prompt before any question, by the attention of a second reading.

Source: KVzip (Kim et al. 2025, arXiv 2505.23416). The prompt is read with a full cache; then the
model is asked to repeat it, and reads it a second time, chunk by chunk, with the first reading's
keys and values before it. A row that the second reading attends to strongly, with any query, is one
from which the text can be rebuilt, whatever the question; the best rows of all layers and heads are
kept, and no rows of the second reading. Here the softmax runs over the whole prompt, where the
paper's runs over the chunk alone, dropped rows go into the remainder, and the kept values are then
fitted to what attention to all rows gave (`engine/value_fit.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_h2o._utils import checks
from mlx_h2o._utils.cache_lists import entries, replaced
from mlx_h2o.attention.backends.reference import softcapped
from mlx_h2o.attention.call import AttentionCall, Looking
from mlx_h2o.attention.ops import scaled_dot_product_attention_with_mass
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.conversation import bounded_entries
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.engine.value_fit import MOST_QUERIES
from mlx_h2o.integration.layer_probe import layer_kinds
from mlx_h2o.integration.stock_caches import stock_caches
from mlx_h2o.model_caches.make import bounded_caches
from mlx_h2o.model_caches.plan import FEWEST_CHOICES
from mlx_h2o.storage.pins import pinned_from

#: The text at the start of the second reading.
REPEAT = "\n\nRepeat the previous context exactly:\n\n"
#: Tokens of the second reading that go through the model at once.
CHUNK = 256
#: The default size, as a share of a prompt's 16-bit cache.
DEFAULT_SIZE = "30%"

#: Called with the number of further tokens done.
Tell = Callable[[int], None]


class RereadCache(Looking):
    """One layer in the second reading: the first reading's rows, and the attention they receive.

    Args:
        first: The layer's full cache.
        every: One of each so many queries is kept, to fit values by; 0: none is.
    """

    def __init__(self, first: KVCache, every: int):
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
    def asked(self) -> AttentionCall:
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
    asked: list[AttentionCall]


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
        model(part, cache=caches)
        mx.eval([entry.state for entry in caches])
        tell(B * part.shape[1])
    group = max(kind.group for kind in kinds)
    every = -(-T * group // MOST_QUERIES) if keeps_queries else 0
    plain = [RereadCache(entry, every) for _, entry in entries(caches) if type(entry) is KVCache]
    request = mx.broadcast_to(mx.array([list(repeat)], dtype=tokens.dtype), (B, len(repeat)))
    for start in range(0, T, chunk):
        part = tokens[:, start : start + chunk]
        looking = _looking(caches, plain)
        mx.eval(model(mx.concatenate([request, part], axis=1), cache=looking)[:, -1:, :1])
        mx.eval([one.state for one in plain])
        tell(B * part.shape[1])
    queries = T + len(repeat) * -(-T // chunk)
    rates = [one.summed / queries for one in plain]
    rows = [(one.keys, one.values) for one in plain]
    asked = [one.asked for one in plain] if keeps_queries else []
    return Reading(caches, rows, [one.most for one in plain], rates, asked)


def _looking(caches: Sequence[Any], plain: Sequence[RereadCache]) -> list[Any]:
    """A model's list with looking caches; other caches continue from the first reading."""
    again = iter(plain)
    own = [entry if type(entry) is KVCache else copy.deepcopy(entry) for entry in caches]
    return [replaced(entry, lambda: next(again)) for entry in own]


def compress_prompt(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    max_bytes: int | str = DEFAULT_SIZE,
    *,
    room: int = 0,
    chunk: int = CHUNK,
    tell: Tell = lambda _: None,
    fitted: bool = True,
    **settings: Any,
) -> list[Any]:
    """A bounded cache that has read a prompt and kept the rows from which it can be rebuilt.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        prompt: A text, which begins with bos if the model has one; or token ids `[T]`, or `[B, T]`
            of several prompts, which share one layout.
        max_bytes: The size of the rows kept: bytes, "64MB", or "30%" of the prompt's 16-bit cache.
        room: Further slots of each KV head, for the conversation that follows.
        chunk: Tokens that go through the model at once.
        tell: Called with the number of further tokens done; there are two for each of the prompt's.
        fitted: Whether kept values are fitted to the second reading's attention
            (`engine/value_fit.py`); with `spill` they never are.
        settings: Other options of `make_prompt_cache`, such as `bits` or `policy`; the policy
            evicts once the room is used up.

    Raises:
        ValueError: The settings do not suit the model, or the prompt is empty.
    """
    checks.whole("room", room, 0)
    checks.whole("chunk", chunk, 1)
    tokens = _ids(tokenizer, prompt)
    of_size = ModelSettings.of(max_bytes=max_bytes, context=tokens.shape[1], **settings)
    empty = bounded_caches(model, of_size)
    return compress_into(
        empty, model, tokenizer, tokens, room=room, chunk=chunk, tell=tell, fitted=fitted
    )


def compress_into(
    empty: Sequence[Any],
    model: nn.Module,
    tokenizer: Any,
    tokens: mx.array,
    *,
    room: int = 0,
    within: bool = False,
    chunk: int = CHUNK,
    tell: Tell = lambda _: None,
    fitted: bool = True,
) -> list[Any]:
    """Compress a prompt into existing bounded caches, whose slots are shared out anew.

    Args:
        empty: Caches from `make_prompt_cache`, for the prompt alone; they are used up.
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        tokens: `[B, T]`.
        room: As in `compress_prompt`.
        within: Whether the room is part of the caches' size; else it is added to it.
        chunk: As in `compress_prompt`.
        tell: As in `compress_prompt`.
        fitted: As in `compress_prompt`.

    Raises:
        ValueError: They are too small, or the model's attention does not come through mlx-h2o.
    """
    checks.whole("room", room, 0)
    checks.whole("chunk", chunk, 1)
    bounded = cast(list[H2OKVCache], bounded_entries(empty))
    repeat = tokenizer.encode(REPEAT, add_special_tokens=False)
    # A file of rows has them as they came, and resuming reads them there.
    fits = [fitted and entry.spill is None for entry in bounded]
    reading = read_twice(model, tokens, repeat, chunk, tell, any(fits))
    policy = bounded[0].policy
    budgets = [slots for entry in bounded for slots in entry.budgets or ()]
    whole = sum(budgets) - (room * len(budgets) if within else 0)
    pinned = pinned_from(bounded[0].pins, policy.sink)
    least = max(policy.least_budget(pinned) + FEWEST_CHOICES - room, policy.sink + pinned + 1)
    if whole < min(least, tokens.shape[1]) * len(budgets):
        raise ValueError(
            f"{sum(budgets)} slots of {len(budgets)} KV heads are too few to keep {least} rows of "
            f"each, beside room for {room}: give more bytes."
        )
    worths = [np.asarray(worth.mean(axis=0)) for worth in reading.worths]
    shares = shared_out(worths, whole, least)
    for i, (entry, slots) in enumerate(zip(bounded, shares, strict=True)):
        entry.resize([count + room for count in slots])
        entry.hold(*reading.rows[i], reading.worths[i], reading.rates[i], room)
        if fits[i]:
            entry.fit_values(*reading.rows[i], reading.asked[i])
    held = iter(bounded)
    return [replaced(entry, lambda: next(held)) for entry in reading.caches]


def _ids(tokenizer: Any, prompt: str | Sequence[int] | mx.array) -> mx.array:
    """Token ids `[B, T]`.

    Raises:
        ValueError: The prompt is empty.
    """
    given = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    tokens = given if isinstance(given, mx.array) else mx.array(list(given))
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if not tokens.size:
        raise ValueError("The prompt is empty.")
    return tokens


def shared_out(worths: Sequence[np.ndarray[Any, Any]], whole: int, least: int) -> list[list[int]]:
    """How many rows each head of each layer keeps: as many as it has among the best of all.

    Args:
        worths: The worths of each layer's rows, `[H, T]`.
        whole: Rows kept in all.
        least: Rows that every head keeps (all, if it has no more).

    Returns:
        Counts `[layers][H]`, `whole` in all unless there are fewer rows.
    """
    heads = np.concatenate(list(worths))  # [all heads, T]
    T = heads.shape[1]
    least = min(least, T)
    free = min(whole, heads.size) - least * len(heads)
    ordered = -np.sort(-heads, axis=1)  # best first; each head keeps its first `least`
    counts = np.full(len(heads), least)
    if free > 0:
        rest = ordered[:, least:].ravel()
        best = np.argsort(-rest, kind="stable")[:free]
        counts += np.bincount(best // (T - least), minlength=len(heads))
    cut = np.cumsum([len(worth) for worth in worths])[:-1]
    return [[int(count) for count in part] for part in np.split(counts, cut)]
