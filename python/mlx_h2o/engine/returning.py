"""Evicted rows come back: the rows that the last queries want, from the file of all rows.

Before a chunk of queries, and every `EVERY` tokens while decoding, the queries of the layer's
retrieval heads are compared with the digests of all pages (`spill/page_digests.py`). Of the pages
with the largest estimated attention mass the rows themselves are read, and their masses computed.
The rows that got most, and those that follow them, take slots: the remainder loses them
(`Remainder.without`), the policy chooses the rows that leave for them.

A row that comes back has no recent attention to show, and the policy would evict it at once. So its
score starts as if it had always had the mass that was just computed. Half of this credit is taken
back each time that rows come back again, unless the row is still wanted.

Rows return in whole turns of the host: positions and queries are read, which waits for the step
before. While decoding that is one step of `EVERY`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.engine import eviction
from mlx_h2o.engine.array_owner import Fields, marked
from mlx_h2o.engine.layer import Layer
from mlx_h2o.engine.policy_view import rows_of
from mlx_h2o.spill.page_digests import PAGE, Array, PageDigests
from mlx_h2o.storage.packed import dense
from mlx_h2o.storage.pins import true_positions
from mlx_h2o.storage.slot_store import Run

#: Tokens from one return to the next while decoding.
EVERY = 32
#: Queries that say what is wanted: the last ones.
WINDOW = 16
#: Pages whose rows are read for a head, and as many that follow them: a fact may begin in one page
#: and end in the next.
PAGES_READ = 8
#: Rows that come back to a head at once, and the part of its evictable slots that they may take.
MOST, ROOM = 32, 0.5
#: A wanted row makes the AHEAD rows behind it wanted, each FADING times as much as the one before:
#: when the model finds where a fact is told, it reads on from there.
AHEAD, FADING = 16, 0.9


@dataclass
class Credit:
    """What a head's returned rows were given: positions and scores, paired."""

    positions: Array
    scores: Array


class Returning:
    """What one layer needs for rows to come back.

    Args:
        heads: The KV heads for which rows come back.
        digests: The digests of the conversation's pages.

    Attributes:
        rows_read: Rows read from the file so far.
        returned: Rows that came back so far.
    """

    def __init__(self, heads: frozenset[int], digests: PageDigests):
        self.heads, self.digests = heads, digests
        self.queries: list[mx.array] = []
        self.credits: dict[int, Credit] = {}
        self.rows_read = self.returned = 0

    def note(self, q: mx.array) -> None:
        """Keep the last queries `[1, Hq, L, D]`, as they meet the stored keys."""
        kept = [*self.queries, q[:, :, -WINDOW:]]
        while sum(part.shape[2] for part in kept[1:]) >= WINDOW:
            kept.pop(0)
        self.queries = kept

    def is_due(self, layer: Layer, length: int) -> bool:
        """Whether rows come back before the next `length` tokens."""
        spill = layer.spill
        if spill is None or not spill.available or not self.heads:
            return False
        if not layer.policy.needs_attention or layer.settings.rope is not None:
            return False
        if length == 1 and (layer.offset % EVERY or not layer.journal.settled):
            return False
        return any(layer.lost(run) > PAGE for run in layer.runs)


def bring_back(layer: Layer, call: AttentionCall, new_keys: mx.array) -> None:
    """Let the rows that the last queries want come back, and others leave for them.

    Args:
        layer: The layer, before it takes the new tokens in.
        call: The next queries `[1, Hq, L, D]`, as they meet the stored keys. Of a single token's
            query nothing is asked, since reading it would wait for this step.
        new_keys: Their keys `[1, H, L, D]`, as stored.
    """
    back = layer.back
    assert back is not None
    layer.journal.clear()
    _digest_new_pages(layer, back)
    held = layer.memory.attended()
    queries, own = list(back.queries), None
    if call.q.shape[2] > 1:
        queries, own = [*queries, call.q[:, :, -WINDOW:]], new_keys
    if not queries:
        return
    q = mx.concatenate(queries, axis=2)[:, :, -WINDOW:].astype(mx.float32) * call.scale
    logsums = _log_sums(layer, q, held, own, call)
    asked = np.array(q.reshape(layer.store.heads, -1, *q.shape[2:]))  # [H, G, W, D]
    parts = [
        _with_wanted(layer, back, run, fields, asked, logsums, call.softcap)
        for run, fields in zip(layer.runs, held, strict=True)
    ]
    if any(run.budget < part["positions"].shape[2] for run, part in _paired(layer, parts)):
        eviction.settle(layer, parts)
    else:
        layer.keep(parts)
        eviction.choose_victims(layer)


def _paired(layer: Layer, parts: Sequence[Fields]) -> list[tuple[Run, Fields]]:
    return list(zip(layer.runs, parts, strict=True))


def _digest_new_pages(layer: Layer, back: Returning) -> None:
    """Make the digests of pages that were completed since the last time."""
    spill, digests = layer.spill, back.digests
    assert spill is not None
    first, last = digests.count(spill.index), spill.available // PAGE
    if last <= first:
        return
    positions = np.arange(first * PAGE, last * PAGE)
    means = []
    for head in range(layer.store.heads):
        keys = _stored(layer, head, positions, "keys")
        means.append(np.array(keys.reshape(last - first, PAGE, -1).mean(axis=1)))
    digests.append(spill.index, np.stack(means))


def _log_sums(
    layer: Layer, q: mx.array, held: Sequence[Fields], own: mx.array | None, call: AttentionCall
) -> Array:
    """The log-sum-exp of each query over all that is held, `[H, G, W]`."""
    H, W = layer.store.heads, q.shape[2]
    grouped = q.reshape(H, -1, W, q.shape[3])
    sums = []
    for run, fields in _paired(layer, held):
        keys = dense(rows_of(layer, run, fields)[0])[0].astype(mx.float32)
        of_run = grouped[run.first : run.last]
        logits = _capped(of_run @ keys[:, None].swapaxes(-1, -2), call.softcap)
        sums.append(mx.logsumexp(logits, axis=-1))
    total = mx.concatenate(sums)
    if layer.settings.remainder:
        saturation = layer.settings.saturations(H)
        column = layer.evictions.remainder.column(q, 1.0, saturation, call.softcap)
        total = mx.logaddexp(total, column.reshape(total.shape))
    if own is not None:
        L = own.shape[2]
        logits = _capped(grouped @ own[0, :, None].astype(mx.float32).swapaxes(-1, -2), call.softcap)
        sees = mx.arange(L) <= mx.arange(L - W, L)[:, None]
        total = mx.logaddexp(total, mx.logsumexp(mx.where(sees, logits, -mx.inf), axis=-1))
    if call.sinks is not None:
        total = mx.logaddexp(total, call.sinks.astype(mx.float32).reshape(H, -1)[..., None])
    return np.array(total)


def _capped(logits: mx.array, softcap: float) -> mx.array:
    return softcap * mx.tanh(logits / softcap) if softcap else logits


def _with_wanted(
    layer: Layer,
    back: Returning,
    run: Run,
    fields: Fields,
    asked: Array,
    logsums: Array,
    softcap: float,
) -> Fields:
    """A run's fields, with the rows that come back behind the others."""
    spill = layer.spill
    assert spill is not None
    heads = range(run.first, run.last)
    positions = np.array(true_positions(fields["positions"]))[0]
    scores = np.array(fields["scores"])[0].copy()
    evictable = run.budget - layer.policy.sink - layer.policy.recent_slots(layer.budget_of(run))
    most = min(MOST, int(ROOM * evictable), layer.lost_beside(fields) - PAGE)
    if most < 1 or not back.heads & set(heads):
        return fields
    come: list[Array] = []
    for i, head in enumerate(heads):
        absent = np.ones(spill.available, bool)
        absent[positions[i][positions[i] < spill.available]] = False
        wanted = _wanted_of(layer, back, head, asked[head], logsums[head], absent, most, softcap)
        _take_back_credit(layer, back, head, positions[i], scores[i], wanted)
        rank = np.where(absent, wanted, -1.0)
        chosen = np.sort(np.argpartition(-rank, most - 1)[:most])
        _give_credit(layer, back, head, chosen, wanted[chosen])
        come.append(chosen)
    rows = _rows(layer, run, fields, come)
    layer.unfold(rows, run.first)
    back.returned += most * len(come)
    fields = {**fields, "scores": mx.array(scores[None])}
    return {name: mx.concatenate([fields[name], rows[name]], axis=2) for name in fields}


def _wanted_of(
    layer: Layer,
    back: Returning,
    head: int,
    asked: Array,
    logsums: Array,
    absent: Array,
    most: int,
    softcap: float,
) -> Array:
    """How much each position's row is wanted by one head, `[available]`; 0 where none was read.

    Args:
        layer: The layer.
        back: Its pages.
        head: The KV head.
        asked: Its queries `[G, W, D]`, times the attention's scale.
        logsums: Their log-sum-exp over what is held, `[G, W]`.
        absent: Whether each position's row was evicted.
        most: Rows that must be absent in the pages that are read, at least.
        softcap: c of capped logits, or 0.
    """
    spill = layer.spill
    assert spill is not None
    q, lse = asked.reshape(-1, asked.shape[-1]), logsums.reshape(-1, 1)
    digests = back.digests.read(spill.index, head, layer.store.heads, q.shape[1])
    pages = len(digests)
    lost = absent[: pages * PAGE].reshape(pages, PAGE).sum(axis=1)
    with np.errstate(divide="ignore"):
        estimates = (np.log(lost) + q @ digests.astype(np.float32).T - lse).max(axis=0)
    order = np.argsort(-estimates, kind="stable")
    read = set[int]()
    for page in order:
        if len(read) >= PAGES_READ and sum(lost[p] for p in read) >= most:
            break
        read |= {int(page), min(int(page) + 1, pages - 1)}
    at = (np.array(sorted(read))[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
    back.rows_read += len(at)
    logits = q @ np.array(_stored(layer, head, at, "keys")).T
    logits = softcap * np.tanh(logits / softcap) if softcap else logits
    wanted = np.zeros(len(absent), np.float32)
    wanted[at] = np.exp(np.minimum(logits - lse, 0)).max(axis=0)
    spread = wanted.copy()
    for i in range(1, AHEAD + 1):
        spread[i:] = np.maximum(spread[i:], wanted[:-i] * FADING**i)
    # Only rows whose page was read can come.
    known = np.zeros(len(absent), bool)
    known[at] = True
    return np.where(known, np.maximum(spread, 1e-30), 0)


def _ages(layer: Layer, positions: Array) -> Array:
    begun = np.maximum(positions, layer.aged_from)
    return np.maximum(layer.offset - begun, 1).astype(np.float32)


def _give_credit(layer: Layer, back: Returning, head: int, chosen: Array, wanted: Array) -> None:
    """Note the scores with which returned rows begin."""
    given = wanted * _ages(layer, chosen) if layer.policy.sums_mass else wanted
    old = back.credits.get(head)
    if old is not None:
        chosen = np.concatenate([old.positions, chosen])
        given = np.concatenate([old.scores, given])
    back.credits[head] = Credit(chosen, given.astype(np.float32))


def _take_back_credit(
    layer: Layer, back: Returning, head: int, held: Array, scores: Array, wanted: Array
) -> None:
    """Halve the credit of rows that came back before and are not wanted any more.

    Args:
        layer: The layer.
        back: What came back.
        head: The KV head.
        held: Positions of the rows in its slots, `[N]`.
        scores: Their scores `[N]`, which change.
        wanted: How much each position is wanted.
    """
    old = back.credits.get(head)
    if old is None:
        return
    slots = {int(position): slot for slot, position in enumerate(held)}
    still = [i for i, position in enumerate(old.positions) if int(position) in slots]
    positions, given = old.positions[still], old.scores[still]
    now = wanted[positions]
    if layer.policy.sums_mass:
        now = now * _ages(layer, positions)
    kept = np.maximum(given / 2, now)
    at = [slots[int(position)] for position in positions]
    scores[at] = np.maximum(scores[at] - given, 0) + kept
    back.credits[head] = Credit(positions, kept)


def _rows(layer: Layer, run: Run, fields: Fields, come: Sequence[Array]) -> Fields:
    """The fields of the rows that come back to a run, `[1, heads, M, ...]`."""
    heads: list[Fields] = []
    assert layer.spill is not None and layer.back is not None
    for head, positions in zip(range(run.first, run.last), come, strict=True):
        of_head = _in_mlx(layer, layer.spill.rows(head, positions))
        credit = layer.back.credits[head].scores[-len(positions) :]
        of_head["positions"] = mx.array(positions.astype(np.int32))
        of_head["scores"] = mx.array(credit)
        if "value_lengths" in fields:
            values = layer.packing.rows("values", {n: f[None] for n, f in of_head.items()})
            of_head["value_lengths"] = _lengths(dense(values))[0]
        heads.append(of_head)
    rows = {
        name: mx.stack([of_head[name] for of_head in heads])[None].astype(field.dtype)
        for name, field in fields.items()
    }
    return marked(layer.settings, rows) or rows


def _lengths(values: mx.array) -> mx.array:
    from mlx_h2o.storage.packed import value_lengths

    return value_lengths(values)


def _stored(layer: Layer, head: int, positions: Array, name: str) -> mx.array:
    """Keys or values `[M, width]` of rows in the file, dense float32."""
    assert layer.spill is not None
    rows = _in_mlx(layer, layer.spill.rows(head, positions))
    return dense(layer.packing.rows(name, rows)).astype(mx.float32)


def _in_mlx(layer: Layer, rows: dict[str, Array]) -> Fields:
    """A file's fields as arrays of the store's dtypes."""
    found = {}
    for name, rows_of_name in rows.items():
        array, dtype = mx.array(rows_of_name), layer.store.fields[name].dtype
        found[name] = array.view(dtype) if dtype == mx.bfloat16 else array
    return found
