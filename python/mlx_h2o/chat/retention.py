"""Retention: which tokens of a text a bounded cache kept, which it evicted when, and their scores.

`trace` feeds a text through a model and looks into the caches after every step; `Trace.html` shows
the result as one page that needs nothing but a browser.

`tokens_by_layer` gives the same of a conversation in progress: how many KV heads of each layer
still hold each token.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_h2o._byte_size import size_text
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.loaded import logits_of
from mlx_h2o.loading.identity import architecture
from mlx_h2o.loading.load import PACKAGE
from mlx_h2o.slots.slot_store import Run

# The page's template, with {{names}} to fill in.
PAGE = PACKAGE / "data" / "inspect.html"

# Tokens decoded before a token to learn its text: a character takes at most four byte tokens.
DECODE_CONTEXT = 4
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Head:
    """One KV head of a trace.

    Attributes:
        layer: Its layer's place in the cache list ("3", or "3.1" within a CacheList).
        head: KV head within the layer.
        budget: The most slots that it may use.
        recent: Number of the last positions that it protects.
    """

    layer: str
    head: int
    budget: int
    recent: int


@dataclass(frozen=True)
class Trace:
    """The contents of a model's caches while it read a text of T tokens; R KV heads in all.

    Attributes:
        model: The model's name.
        policy: The policy's name.
        settings: The policy's fields.
        remainder: Whether evicted tokens are kept as a remainder.
        sink: Number of the first positions that every head protects.
        prefill: Tokens read as one chunk before those read one by one.
        nbytes: Bytes of all bounded layers at the end.
        texts: Each token's text, T of them.
        heads: R heads, by layer and then by number.
        dropped_at: `[R, T]` the number of tokens read when a token was found evicted; -1 if it was
            held to the end.
        last_score: `[R, T]` the score that the policy had accumulated for it when last held; NaN if
            the policy accumulates nothing, or if the prompt's chunk was reduced without it.
        last_priority: `[R, T]` its priority when last held, with NaN as above; the lowest is
            evicted first.
    """

    model: str
    policy: str
    settings: dict[str, Any]
    remainder: bool
    sink: int
    prefill: int
    nbytes: int
    texts: list[str]
    heads: list[Head]
    dropped_at: NDArray[np.int32]
    last_score: NDArray[np.float32]
    last_priority: NDArray[np.float32]

    def presence(self, read: int | None = None) -> NDArray[np.bool_]:
        """The tokens that each head held after `read` of them (all by default), `[R, T]`."""
        T = len(self.texts)
        read = T if read is None else read
        read_so_far = np.arange(T) < read
        return read_so_far & ((self.dropped_at < 0) | (self.dropped_at > read))

    @property
    def share(self) -> float:
        """The share of the text that is held at the end, mean over heads."""
        return float(self.presence().mean())

    def by_layer(self) -> dict[str, float]:
        """Tokens held at the end in each layer, mean over its KV heads."""
        counts: dict[str, list[int]] = {}
        for head, tokens in zip(self.heads, self.presence().sum(axis=1).tolist(), strict=True):
            counts.setdefault(head.layer, []).append(tokens)
        return {layer: sum(of) / len(of) for layer, of in counts.items()}

    def old_words(self, count: int) -> list[tuple[str, float]]:
        """The best-remembered words among those that a plain window would have lost in any head.

        Args:
            count: The most words to return.

        Returns:
            Words with the share of heads that hold their best token; ties go to the oldest.
        """
        T = len(self.texts)
        shares = self.presence().mean(axis=0)
        old = range(min(self.sink, T), max(0, T - max(head.budget for head in self.heads)))
        owner = [i for i, text in enumerate(self.texts) for _ in text]  # each character's token
        words: dict[str, float] = {}
        for word in re.finditer(r"\w[\w'’-]*", "".join(self.texts)):
            tokens = owner[word.start() : word.end()]
            if tokens[0] in old:
                best = float(shares[tokens].max())
                words[word[0]] = max(best, words.get(word[0], 0.0))
        return sorted(words.items(), key=lambda item: -item[1])[:count]

    def as_dict(self) -> dict[str, Any]:
        """The trace as JSON types; scores have three digits, NaN is None."""
        plain = {name: value for name, value in vars(self).items() if name not in ARRAYS}
        return plain | {
            "heads": [asdict(head) for head in self.heads],
            "dropped_at": self.dropped_at.tolist(),
            "last_score": three_digits(self.last_score),
            "last_priority": three_digits(self.last_priority),
        }

    def html(self) -> str:
        """The page: the text shaded by the heads that hold each token, per head and step."""
        data = self.as_dict()
        del data["texts"]  # the page's own text contains them
        budgets = [head.budget for head in self.heads]
        budget = f"{min(budgets):,}" + (f" to {max(budgets):,}" if len(set(budgets)) > 1 else "")
        parts = {
            "title": f"What {self.model} remembers",
            "policy": self.policy + (" with remainder" if self.remainder else ", no remainder"),
            "budget": f"{budget} slots per KV head",
            "heads": f"{len(self.heads)} KV heads in {len(self.by_layer())} layers",
            "length": f"{len(self.texts):,} tokens",
            "share": f"{self.share:.1%}",
            "nbytes": size_text(self.nbytes),
        }
        parts = {name: html.escape(part) for name, part in parts.items()}
        parts["text"] = "".join(f"<span>{html.escape(text)}</span>" for text in self.texts)
        # "</script" ends a script element, whatever stands around it.
        parts["data"] = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], PAGE.read_text())


ARRAYS = ("dropped_at", "last_score", "last_priority")


def trace(
    model: nn.Module,
    tokenizer: Any,
    tokens: Sequence[int],
    cache: list[Any],
    *,
    prefill: int = 64,
    name: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Read a text and note after every step which tokens each KV head still holds.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        tokens: The text, T tokens.
        cache: A fresh list from `make_prompt_cache`.
        prefill: Tokens read as the first chunk; the others follow one by one.
        name: The model's name to show (default: its folder's or its architecture's).
        progress: Called with the tokens read and T after every step.

    Raises:
        ValueError: No tokens, a prefill below 1, or a cache that is used or has no bounded layer.
    """
    layers = bounded_layers(cache)
    if not layers or not all(entry.empty() for _, entry in layers):
        raise ValueError("Pass a fresh cache from make_prompt_cache, with a layer to look into.")
    if not tokens or prefill < 1:
        raise ValueError("Give at least one token of text, and a prefill of at least 1.")
    T, read = len(tokens), 0
    history: _History | None = None
    while read < T:
        chunk = tokens[read : read + (1 if read else prefill)]
        logits_of(model, mx.array([chunk]), cache)
        looks = [look(entry, run) for _, entry in layers for run in runs_of(entry)]
        mx.eval(looks, [entry.state for entry in cache])
        read += len(chunk)
        if history is None:
            history = _History([h for layer, entry in layers for h in heads_of(layer, entry)], T)
        history.note(looks, read)
        if progress is not None:
            progress(read, T)
    assert history is not None
    entry = layers[0][1]
    return Trace(
        model=name or model_name(model),
        policy=entry.policy.name,
        settings=asdict(entry.policy),
        remainder=entry.answers,
        sink=entry.policy.sink,
        prefill=min(prefill, T),
        nbytes=sum(entry.nbytes for _, entry in layers),
        texts=token_texts(tokenizer, tokens),
        heads=history.heads,
        dropped_at=history.dropped_at,
        last_score=history.last_score,
        last_priority=history.last_priority,
    )


class _History:
    """The tokens held so far while a text of T tokens is read; arrays as in `Trace`."""

    def __init__(self, heads: list[Head], T: int):
        self.heads = heads
        self.dropped_at = np.full((len(heads), T), -1, np.int32)
        self.last_score = np.full((len(heads), T), np.nan, np.float32)
        self.last_priority = self.last_score.copy()

    def note(self, looks: Sequence[tuple[mx.array, mx.array, mx.array]], read: int) -> None:
        """Note what all heads hold after `read` tokens, from `look` at each run."""
        present = np.zeros(self.dropped_at.shape, bool)
        first = 0
        for positions, scores, priority in looks:
            rows = slice(first, first + positions.shape[0])
            at = np.array(positions)
            np.put_along_axis(present[rows], at, True, axis=1)
            np.put_along_axis(self.last_score[rows], at, np.array(scores), axis=1)
            np.put_along_axis(self.last_priority[rows], at, np.array(priority), axis=1)
            first = rows.stop
        gone = ~present & (np.arange(present.shape[1]) < read)
        self.dropped_at[(self.dropped_at < 0) & gone] = read


def bounded_layers(cache: Sequence[Any]) -> list[tuple[str, BoundedKVCache]]:
    """The bounded caches of a model, CacheList members too, with their places in the list."""
    return [(layer, entry) for layer, entry in entries(cache) if isinstance(entry, BoundedKVCache)]


def runs_of(cache: BoundedKVCache) -> list[Run]:
    """The runs of a cache that has seen tokens."""
    assert cache.store is not None
    return cache.store.runs


def heads_of(layer: str, cache: BoundedKVCache) -> list[Head]:
    """The heads of a layer that has seen tokens."""
    return [
        Head(layer, head, cache.budget_of(run), cache.policy.recent_slots(cache.budget_of(run)))
        for run in runs_of(cache)
        for head in range(run.first, run.last)
    ]


def look(cache: BoundedKVCache, run: Run) -> tuple[mx.array, mx.array, mx.array]:
    """Positions, scores and priorities of the slots of a run, `[heads, length]` each."""
    slots = cache.slots(run)
    sees_attention = cache.policy.needs_attention
    scores = slots.scores if sees_attention else mx.full(slots.positions.shape, mx.nan)
    return slots.positions[0], scores[0], cache.policy.priority(slots)[0].astype(mx.float32)


def model_name(model: nn.Module) -> str:
    """The name of the model's folder, or of its architecture."""
    folder = getattr(model, "mlx_h2o_folder", None)
    return Path(folder).name if folder else architecture(model)


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Each token's part of the text; a character of several tokens belongs to its last one."""
    texts = []
    for i in range(len(tokens)):
        start = max(0, i - DECODE_CONTEXT)
        before = tokenizer.decode(tokens[start:i]).rstrip(REPLACEMENT)
        after = tokenizer.decode(tokens[start : i + 1]).rstrip(REPLACEMENT)
        texts.append(after[len(before) :])
    return texts


def three_digits(values: NDArray[np.float32]) -> list[list[float | None]]:
    """Rows of numbers, as short as JSON can write them."""
    return [[float(f"{v:.3g}") if np.isfinite(v) else None for v in row] for row in values.tolist()]


@dataclass(frozen=True)
class LayerMemory:
    """The tokens that one layer holds, of T.

    Attributes:
        layer: Its place in the cache list ("3", or "3.1" within a CacheList).
        heads: Its KV heads.
        holders: `[T]` the number of heads that hold each token.
    """

    layer: str
    heads: int
    holders: NDArray[np.int64]


def tokens_by_layer(cache: Sequence[Any], T: int) -> list[LayerMemory]:
    """The tokens of the first sequence that each bounded layer holds; empty layers are left out.

    Args:
        cache: The model's caches, one for each layer.
        T: Tokens of the conversation.
    """
    layers = []
    for place, entry in bounded_layers(cache):
        if entry.empty():
            continue
        holders, heads = np.zeros(T, np.int64), 0
        for run in runs_of(entry):
            positions = np.asarray(entry.slots(run).positions)[0]  # [heads, N]
            holders += np.bincount(positions.ravel(), minlength=T)[:T]
            heads += len(positions)
        layers.append(LayerMemory(place, heads, holders))
    return layers
