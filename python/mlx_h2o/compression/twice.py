"""A prompt is read twice within a bounded cache, and the rows worth most are kept.

All of the prompt's rows are there, packed, while it is read a second time (`second_reading.py`).
Then the rows of each head are ranked by the greatest weight that each received. A head keeps a part
of the slots that its profile gives it; the rows of all layers and heads compete for the others.
Dropped rows go into the remainder, and the kept values are fitted to the attention that
all rows gave (`value_fit.py`). Beside the cache's own bytes this takes those of the prompt's
packed rows and of the queries by which values are fitted.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlx_h2o import _checks
from mlx_h2o.budgets.plan import FEWEST_CHOICES
from mlx_h2o.caches.conversation import bounded_entries
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.compression.second_reading import SecondReading, looking_caches
from mlx_h2o.compression.value_fit import MOST_QUERIES, AllRows, Rows, fit_values
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.hosts.loaded import logits_of
from mlx_h2o.layer.layer import Layer
from mlx_h2o.slots.pins import pinned_from, true_positions

#: The request to the model to repeat a text.
REPEAT = "\n\nRepeat the previous context exactly:\n\n"
#: The greatest anchor's root: values of rows from before the prompt stay as they are.
STAYS = 1e4
#: The part of its slots, beyond the fewest, that a head keeps whatever the others' rows are worth.
#: The profile knows what the head loses on any text, the weights what this text wants of it. With
#: half of the slots SmolLM2 diverges by half as much as with none or all
#: (docs/results/experiments.md).
OWN_PART = 0.5
#: The default number of tokens that go through the model at once.
CHUNK = 256


@dataclass(frozen=True)
class Reading:
    """How a prompt is read.

    Attributes:
        chunk: Tokens that go through the model at once.
        room: Slots of each head that stay free for later tokens.
        within: Whether the room is part of the caches' slots; else it is added to them.
        fitted: Whether kept values are fitted. With a file of rows they never are: it has them as
            they came.
        seconds: What the second reading may take, to judge by the first one; beyond that the prompt
            is read once, and the policy evicts. None: whatever it takes.

    Raises:
        ValueError: One of the numbers is invalid.
    """

    chunk: int = CHUNK
    room: int = 0
    within: bool = False
    fitted: bool = True
    seconds: float | None = None

    def __post_init__(self) -> None:
        _checks.whole("chunk", self.chunk, 1)
        _checks.whole("room", self.room, 0)


def read_twice(
    model: nn.Module, tokenizer: Any, tokens: mx.array, caches: Sequence[Any], reading: Reading
) -> Generator[int, None, bool]:
    """Read a prompt twice, and keep the rows worth most.

    What the caches hold already keeps a part of the slots in proportion to its length, by the
    policy's choice; rows of the prompt share the others out.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        tokens: `[B, T]`.
        caches: The model's caches, bounded ones among them, which go on with the prompt.
        reading: How it is read.

    Yields:
        The tokens read by each call of the model; there are two for each of the prompt's. Then 0
        for each layer that has kept its rows.

    Returns:
        Whether the prompt was read twice: False if that would have taken too long.

    Raises:
        ValueError: As in `require_readable`.
    """
    B, T = tokens.shape
    entries = observable(model, caches)
    whole, least, parts = slots_for(entries, T, reading)
    planned = [slots for entry in entries for slots in planned_slots(entry, T)]
    own = own_slots(planned, whole, least)
    as_planned = [entry.settings for entry in entries]
    repeat = mx.array([tokenizer.encode(REPEAT, add_special_tokens=False)], tokens.dtype)
    request = mx.broadcast_to(repeat, (B, repeat.shape[1]))
    seconds = 0.0  # callers may do other things in between
    try:
        older = make_room(entries, parts, T + reading.room)
        begun = time.monotonic()
        for chunk in first_reading(model, tokens, caches, reading.chunk):
            seconds += time.monotonic() - begun
            yield chunk.size
            begun = time.monotonic()
        if reading.seconds is not None and seconds > reading.seconds:
            yield tokens.size
            return False
        looks = _looks(model, entries, T if reading.fitted else 0)
        for chunk in chunks_of(tokens, reading.chunk):
            again = mx.concatenate([request, chunk], axis=1)
            logits_of(model, again, looking_caches(caches, looks))
            mx.eval([look.state for look in looks])  # the logits are not computed
            yield chunk.size
        yield from keep(entries, looks, older, whole, own, reading.room)
        as_planned = []
        return True
    finally:  # too slow, stopped, or failed: back to the bound
        for entry, settings in zip(entries, as_planned, strict=False):
            with suppress(RuntimeError):  # the cache may be within a step
                entry.follow(settings.grown(entry.offset) or settings)


def first_reading(
    model: nn.Module, tokens: mx.array, caches: Sequence[Any], chunk: int = CHUNK
) -> Iterator[mx.array]:
    """Read a prompt, and yield each chunk when it is read.

    Args:
        model: The model.
        tokens: `[B, T]`.
        caches: Its caches, of any kind.
        chunk: Tokens that go through the model at once.
    """
    for part in chunks_of(tokens, chunk):
        logits_of(model, part, caches)
        mx.eval([entry.state for entry in caches])
        yield part


def chunks_of(tokens: mx.array, chunk: int) -> list[mx.array]:
    """A prompt `[B, T]` in parts of so many tokens."""
    return [tokens[:, i : i + chunk] for i in range(0, tokens.shape[1], chunk)]


def observable(model: nn.Module, caches: Sequence[Any]) -> list[H2OKVCache]:
    """The bounded caches of a list.

    Raises:
        ValueError: A second reading of this model is not observed, or of these settings.
    """
    kinds = layer_kinds(model)
    apart = (k.derived or not k.routed or k.sharers > 1 or k.indexes for k in kinds)
    if not kinds or any(apart):
        raise ValueError(
            "This model's attention does not come through mlx-h2o, so the attention of a second "
            "reading is not observed: its prompts cannot be read twice or compressed."
        )
    entries = cast(list[H2OKVCache], bounded_entries(caches))
    settings = entries[0].settings
    if settings.rope is not None:
        raise ValueError(
            "Rows that are read twice keep the positions where they were read: omit positions."
        )
    if settings.packing.recent is not None:
        raise ValueError("The newest tokens have a width of their own: omit recent_bits.")
    return entries


def require_readable(
    model: nn.Module, caches: Sequence[Any], length: int, reading: Reading
) -> None:
    """Raise ValueError unless caches can read a prompt of `length` tokens twice.

    Args:
        model: The model.
        caches: Its caches.
        length: The prompt's tokens.
        reading: How it is read.

    Raises:
        ValueError: The model's attention does not come through mlx-h2o, or the caches are too
            small.
    """
    slots_for(observable(model, caches), length, reading)


def slots_for(
    entries: Sequence[H2OKVCache], length: int, reading: Reading
) -> tuple[int, int, list[list[int]]]:
    """Slots for the rows of a prompt, of all KV heads and of each at least.

    Slots of what the caches hold already are taken off; those of each layer's heads are the third
    result.

    Args:
        entries: The layers' caches.
        length: The prompt's tokens.
        reading: How it is read.

    Raises:
        ValueError: They are too few.
    """
    policy = entries[0].policy
    budgets = [slots for entry in entries for slots in entry.budgets or ()]
    whole = sum(budgets) - (reading.room * len(budgets) if reading.within else 0)
    pinned = pinned_from(entries[0].pins, policy.sink)
    smallest = policy.least_budget(pinned) + FEWEST_CHOICES
    least = max(smallest - reading.room, policy.sink + pinned + 1)
    parts = list[list[int]]()
    if entries[0].offset:
        part = entries[0].offset / (entries[0].offset + length)
        for entry in entries:
            parts.append([max(int(slots * part), smallest) for slots in entry.budgets or ()])
            whole -= sum(map(min, _lengths(entry), parts[-1]))
        least = 0  # sinks are among the older rows
    if whole < min(least, length) * len(budgets):
        raise ValueError(
            f"{sum(budgets)} slots of {len(budgets)} KV heads are too few to keep {least} rows of "
            f"each, beside room for {reading.room}: give more bytes."
        )
    return whole, least, parts


def make_room(
    entries: Sequence[H2OKVCache], parts: Sequence[Sequence[int]], rows: int
) -> list[list[int]]:
    """Make room for a prompt; the rows of each head from before it.

    Args:
        entries: The layers' caches.
        parts: Slots that each head keeps for rows from before, if there are any.
        rows: Further slots of each head.
    """
    for entry, of_heads in zip(entries, parts, strict=False):
        entry.resize(of_heads)
    older = [_lengths(entry) for entry in entries]
    for entry, lengths in zip(entries, older, strict=True):
        entry.resize([length + rows for length in lengths])
    return older


def query_thinning(model: nn.Module, length: int) -> tuple[int, int]:
    """Query heads of a KV head, and every how many tokens' queries values are fitted by.

    Args:
        model: The model.
        length: The prompt's tokens.
    """
    group = max((kind.group for kind in layer_kinds(model)), default=1)
    return group, -(-length * group // MOST_QUERIES)


def _looks(model: nn.Module, entries: Sequence[H2OKVCache], length: int) -> list[SecondReading]:
    """Second readings, each of one layer, which keep queries of `length` tokens to fit values by.

    A file of rows has them as they came, and rows come back from there, so none is fitted.
    """
    _, every = query_thinning(model, length)
    return [
        SecondReading(cast(Layer, entry.layer), 0 if entry.spill else every) for entry in entries
    ]


def keep(
    entries: Sequence[H2OKVCache],
    looks: Sequence[SecondReading],
    older: Sequence[Sequence[int]],
    whole: int,
    own: npt.NDArray[np.int64],
    room: int,
) -> Iterator[int]:
    """Share the slots out among the rows of a prompt, and keep the best ones.

    Args:
        entries: The layers' caches.
        looks: Their second readings.
        older: The rows of each head from before the prompt.
        whole: Slots for the prompt's rows in all.
        own: Those of each head alone, `[all heads]`.
        room: Slots of each head that stay free.

    Yields:
        0 after each layer.
    """
    worths = [_worths(look, before) for look, before in zip(looks, older, strict=True)]
    length = worths[0][0].shape[1] - older[0][0]
    counts = shared_out([_ordered(of_layer, length) for of_layer in worths], whole, own)
    for i, entry in enumerate(entries):
        budgets = [a + b + room for a, b in zip(older[i], counts[i], strict=True)]
        _cut(entry, looks[i], worths[i], budgets, room)
        yield 0


def _lengths(entry: H2OKVCache) -> list[int]:
    """The rows that each head holds."""
    runs = entry.layer.runs if entry.layer else []
    none = [0] * len(entry.budgets or ())
    return [run.length for run in runs for _ in range(run.heads)] or none


def _worths(look: SecondReading, older: Sequence[int]) -> list[Rows]:
    """The worth of each head's rows, `[B, N]`; infinite for the first ones, which stay.

    Args:
        look: The second reading of the layer.
        older: The rows of each head from before the prompt.
    """
    heads = [worth[:, i] for worth in map(np.array, look.worths) for i in range(worth.shape[1])]
    for worth, count in zip(heads, older, strict=True):
        worth[:, :count] = np.inf
    return heads


def _ordered(heads: Sequence[Rows], length: int) -> Rows:
    """The worths of each head's rows of the prompt, best first, `[H, T]`.

    With several sequences they are means of equal ranks.
    """
    own = np.stack([worth[:, worth.shape[1] - length :] for worth in heads], axis=1)
    best_first: Rows = -np.sort(-own, axis=2).mean(axis=0)
    return best_first


def _cut(
    entry: H2OKVCache,
    look: SecondReading,
    worths: Sequence[Rows],
    budgets: Sequence[int],
    room: int,
) -> None:
    """Keep the rows worth most, and fit their values.

    Args:
        entry: The layer's cache.
        look: Its second reading.
        worths: The worth of each head's rows, `[B, N]`.
        budgets: Slots of each head from now on.
        room: Those of them that stay free.
    """
    layer = cast(Layer, entry.layer)
    before, places = AllRows.of(layer), positions_of(layer)
    entry.keep_best([mx.array(worth) for worth in worths], budgets, room)
    if not look.fits:
        return
    anchors = []
    for worth, at, positions in zip(worths, places, positions_of(layer), strict=True):
        order = np.argsort(at, axis=1)
        where = np.stack(
            [
                row[np.searchsorted(old, new, sorter=row)]
                for row, old, new in zip(order, at, positions, strict=True)
            ]
        )
        anchors.append(np.square(np.minimum(np.take_along_axis(worth, where, axis=1), STAYS)))
    fit_values(layer, before, look.call, anchors)


def positions_of(layer: Layer) -> list[npt.NDArray[np.int32]]:
    """Positions of each head's rows in the order of its slots, `[B, N]`."""
    of_runs = [np.array(true_positions(layer.store.view(r, "positions"))) for r in layer.runs]
    return [of_run[:, i] for of_run in of_runs for i in range(of_run.shape[1])]


def planned_slots(entry: H2OKVCache, length: int) -> Sequence[int]:
    """The slots that each head is to have after so many further tokens."""
    settings = entry.settings
    return (settings.grown(entry.offset + length) or settings).budgets or ()


def own_slots(planned: Sequence[int], whole: int, least: int) -> npt.NDArray[np.int64]:
    """The slots that each head keeps whatever its rows are worth, `[all heads]`.

    Args:
        planned: The slots of each head by the profile.
        whole: Slots that are shared out.
        least: The fewest slots of a head.
    """
    beyond = np.maximum(np.array(planned) - least, 0)
    free = OWN_PART * max(whole - least * len(planned), 0)
    own: npt.NDArray[np.int64] = least + (free * beyond / max(beyond.sum(), 1)).astype(np.int64)
    return own


def shared_out(
    worths: Sequence[npt.NDArray[Any]], whole: int, own: npt.NDArray[np.int64]
) -> list[list[int]]:
    """How many rows each head of each layer keeps: its own slots, and as many as it has among the
    best of the other rows.

    Args:
        worths: The worths of each layer's rows, best first, `[H, T]`.
        whole: Rows kept in all.
        own: Rows that each head keeps (all, if it has no more), `[all heads]`.

    Returns:
        Counts `[layers][H]`, `whole` in all unless there are fewer rows.
    """
    heads = np.concatenate(list(worths))  # [all heads, T]
    T = heads.shape[1]
    counts = np.minimum(own, T)
    free = min(whole, heads.size) - int(counts.sum())
    if free > 0:
        others = np.where(np.arange(T) < counts[:, None], -np.inf, heads)
        best = np.argsort(-others, axis=None, kind="stable")[:free]
        counts += np.bincount(best // T, minlength=len(heads))
    cut = np.cumsum([len(worth) for worth in worths])[:-1]
    return [[int(count) for count in part] for part in np.split(counts, cut)]
