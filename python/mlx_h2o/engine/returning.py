"""Evicted rows come back: the rows that the last queries want, from the file of all rows.

Before a chunk of queries, and every few tokens while decoding, the last queries of the layer's
retrieval heads are compared with the digests of all pages (`spill/page_digests.py`). Of the pages
that have the rows with the largest estimated attention mass the rows themselves are read, and their
masses computed.
The rows that got most, and those that follow them, take slots: the remainder loses them
(`Remainder.without`), and the policy chooses the rows that leave for them.

A row that comes back has no recent attention to show, and the policy would evict it at once. So its
score starts as if it had always had the mass that was just computed. At each later return half of
this credit is taken back, unless the row is still wanted.

Positions and queries are read by the host, which waits for the step before. While decoding that is
one step of `Returns.every`, and no step waits for its own queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.engine import eviction
from mlx_h2o.engine.array_owner import Fields, marked
from mlx_h2o.engine.layer import Layer
from mlx_h2o.engine.policy_view import rows_of
from mlx_h2o.engine.returns_kept import Credit, Returning
from mlx_h2o.spill.layer_rows import LayerRows
from mlx_h2o.spill.layout import DamagedFile
from mlx_h2o.spill.page_digests import PAGE, TRACT, digests_of
from mlx_h2o.spill.parts import Array, of_bits
from mlx_h2o.storage.packed import dense, value_lengths
from mlx_h2o.storage.pins import true_positions
from mlx_h2o.storage.rope import without_gaps
from mlx_h2o.storage.slot_store import Run

#: A wanted row makes the rows behind it wanted, each by this factor less than the one before: when
#: the model finds where a fact is told, it reads on from there.
FADING = 0.9


class Asked(NamedTuple):
    """The queries that say what is wanted.

    Attributes:
        queries: `[H, G * W, D]` float32, times the attention's scale.
        logsums: Their log-sum-exp over all that is held, `[H, G * W, 1]`.
        softcap: c of capped logits, or 0.
    """

    queries: Array
    logsums: Array
    softcap: float


class Come(NamedTuple):
    """The rows that come back to a run of heads, and the scores of its slots afterwards.

    Attributes:
        rows: Fields `[1, heads, M, ...]`.
        scores: `[1, heads, N]`.
        credits: By KV head.
    """

    rows: Fields
    scores: mx.array
    credits: dict[int, Credit]


def is_due(back: Returning, layer: Layer, length: int) -> bool:
    """Whether rows come back before a layer's next tokens.

    Args:
        back: What the layer keeps.
        layer: The layer.
        length: How many tokens come.
    """
    if length == 1 and (layer.offset % back.settings.every or not layer.journal.settled):
        return False
    if layer.spill is None or layer.spill.available < PAGE:
        return False
    if not layer.policy.needs_attention:  # it has no use for a credit
        return False
    return any(layer.lost(run) for run in layer.runs)


def bring_back(layer: Layer, call: AttentionCall, new_keys: mx.array) -> None:
    """Let the rows that the last queries want come back, and others leave for them.

    Where the file cannot be read, nothing changes, and the conversation goes on without it.

    Args:
        layer: The layer, before it takes the new tokens in.
        call: The next queries `[1, Hq, L, D]`. A single token's query asks for nothing, since
            reading it would wait for this step.
        new_keys: Their keys `[1, H, L, D]`. Neither has key scaling.
    """
    back, spill = layer.back, layer.spill
    assert back is not None
    assert spill is not None
    H = layer.store.heads
    queries, own = list(back.queries), None
    if call.q.shape[2] > 1:
        queries, own = [*queries, back.asking(call.q, H)], new_keys
    if not queries:
        return
    q = mx.concatenate(queries, axis=2)[:, :, -back.settings.window :].astype(mx.float32)
    q = back.of_all(q, H)
    if (frame := layer.settings.frame) is not None:
        q, own = frame.enter_queries(q), None if own is None else frame.enter(own)
    q = q.astype(mx.float32) * call.scale
    held = layer.memory.attended()
    asked = _asked(layer, q, held, own, call)
    try:
        _digest_new_pages(layer, back, spill)
        come = [
            _come(layer, back, run, fields, asked) if back.has(run) else None
            for run, fields in zip(layer.runs, held, strict=True)
        ]
    except (OSError, ValueError, DamagedFile) as error:
        spill.conversation.fail(f"rows cannot be read from the file: {error}")
        return
    _take_in(layer, back, held, come)


def _take_in(
    layer: Layer, back: Returning, held: Sequence[Fields], come: Sequence[Come | None]
) -> None:
    """Give slots to the rows that come back; the policy evicts as many others."""
    layer.journal.clear()
    parts = []
    for run, fields, of_run in zip(layer.runs, held, come, strict=True):
        if of_run is not None:
            back.credits |= of_run.credits
            back.returned += of_run.rows["positions"].size
            layer.unfold(of_run.rows, run.first)
            fields = {**fields, "scores": of_run.scores}
            rows = of_run.rows
            fields = {name: mx.concatenate([fields[name], rows[name]], axis=2) for name in fields}
        parts.append(fields)
    lengths = [fields["positions"].shape[2] for fields in parts]
    if any(run.budget < n for run, n in zip(layer.runs, lengths, strict=True)):
        eviction.settle(layer, parts)
    else:
        layer.keep(parts)
        eviction.choose_victims(layer)


# -- what is wanted ----------------------------------------------------------------------------


def _asked(
    layer: Layer, q: mx.array, held: Sequence[Fields], own: mx.array | None, call: AttentionCall
) -> Asked:
    """The queries and their log-sum-exp over slots, remainder, new keys and attention sinks."""
    H, W = layer.store.heads, q.shape[2]
    grouped = q.reshape(H, -1, W, q.shape[3])
    sums = []
    for run, fields in zip(layer.runs, held, strict=True):
        keys = dense(rows_of(layer, run, fields)[0])
        if layer.settings.rope is not None:
            places = true_positions(fields["positions"])
            keys = without_gaps(keys, places, layer.offset, layer.settings.rope)
        keys = keys[0].astype(mx.float32)
        logits = grouped[run.first : run.last] @ keys[:, None].swapaxes(-1, -2)
        sums.append(mx.logsumexp(_capped(logits, call.softcap), axis=-1))
    total = mx.concatenate(sums)
    if layer.settings.remainder:
        saturation = layer.settings.saturations(H)
        column = layer.evictions.remainder.column(q, 1.0, saturation, call.softcap)
        total = mx.logaddexp(total, column.reshape(total.shape))
    if own is not None:
        L = own.shape[2]
        logits = grouped @ own[0, :, None].astype(mx.float32).swapaxes(-1, -2)
        sees = mx.arange(L) <= mx.arange(L - W, L)[:, None]
        logits = mx.where(sees, _capped(logits, call.softcap), -mx.inf)
        total = mx.logaddexp(total, mx.logsumexp(logits, axis=-1))
    if call.sinks is not None:
        total = mx.logaddexp(total, call.sinks.astype(mx.float32).reshape(H, -1)[..., None])
    flat = grouped.reshape(H, -1, q.shape[3])
    return Asked(np.array(flat), np.array(total.reshape(H, -1, 1)), call.softcap)


def _capped(logits: mx.array, softcap: float) -> mx.array:
    return softcap * mx.tanh(logits / softcap) if softcap else logits


def _come(layer: Layer, back: Returning, run: Run, fields: Fields, asked: Asked) -> Come | None:
    """The rows that come back to a run of heads, or None; nothing changes yet."""
    spill, settings = layer.spill, back.settings
    assert spill is not None
    slots = np.array(true_positions(fields["positions"]))[0]
    recent = np.arange(layer.offset - layer.recently_held, layer.offset)
    held = [np.concatenate([of_head, recent]) for of_head in slots]
    end = spill.available // PAGE * PAGE
    absent = min(end - int((of_head < end).sum()) for of_head in held)
    evictable = run.budget - layer.policy.sink - layer.policy.recent_slots(layer.budget_of(run))
    most = min(settings.rows, int(settings.room * evictable), absent)
    if most < 1:
        return None
    heads = range(run.first, run.last)
    scores, credits, chosen = np.array(fields["scores"])[0].copy(), {}, []
    for i, head in enumerate(heads):
        wanted = _wanted(layer, back, head, asked, held[i], most)
        kept = _kept_credit(layer, back, head, slots[i], scores[i], wanted)
        of_absent = np.where(wanted.absent, wanted.masses, -1.0)
        best = most_wanted(of_absent, most)
        at = wanted.positions[best]
        chosen.append({name: of_name[best] for name, of_name in wanted.rows.items()})
        given = _as_scores(layer, at, wanted.masses[best])
        credits[head] = Credit(
            np.concatenate([kept.positions, at]).astype(np.int32),
            np.concatenate([kept.scores, given]),
        )
    rows = _rows(layer, fields, chosen, [credits[head] for head in heads])
    return Come(rows, mx.array(scores[None]), credits)


class Wanted(NamedTuple):
    """The rows that were read, of whole pages, in the order of their positions: `[M]` each.

    Attributes:
        positions: Their positions.
        rows: Their fields, as the file has them.
        absent: Whether they were evicted.
        masses: How much they are wanted: their attention mass, or that of a row before them.
    """

    positions: Array
    rows: dict[str, Array]
    absent: Array
    masses: Array


def _wanted(
    layer: Layer, back: Returning, head: int, asked: Asked, held: Array, most: int
) -> Wanted:
    """How much one head wants the rows of the pages that seem to be wanted most.

    Args:
        layer: The layer.
        back: What it keeps.
        head: The KV head.
        asked: The queries.
        held: Positions of the rows that it holds.
        most: How many absent rows are read, at least.
    """
    q, lse = asked.queries[head], asked.logsums[head]
    at = _positions_of(_pages_read(layer, back, q, lse, head, held, most))
    back.rows_read += len(at)
    assert layer.spill is not None
    rows = layer.spill.rows(head, at)
    logits = q @ _seen_at(layer, np.array(_keys_of(layer, rows)), at, held).T
    if asked.softcap:
        logits = asked.softcap * np.tanh(logits / asked.softcap)
    absent = ~np.isin(at, held)
    # Absent rows would have their part of the softmax, as those that are held have.
    of_absent = np.where(absent, logits, -np.inf)
    lse = np.logaddexp(lse, np.logaddexp.reduce(of_absent, axis=1, keepdims=True))
    own = np.exp(np.minimum(logits - lse, 0)).max(axis=0)
    if not back.asks(head):
        own = np.zeros_like(own)
    masses = own.copy()
    for i in range(1, min(back.settings.ahead, len(at) - 1) + 1):
        behind = np.where(at[i:] - at[:-i] == i, own[:-i] * FADING**i, 0)
        masses[i:] = np.maximum(masses[i:], behind)
    return Wanted(at, rows, absent, masses)


def _pages_read(
    layer: Layer, back: Returning, q: Array, lse: Array, head: int, held: Array, most: int
) -> list[int]:
    """The pages whose rows are read, ascending: those of the rows with the largest estimated mass.

    Args:
        layer: The layer.
        back: What it keeps.
        q: The head's queries `[G * W, D]`, times the scale.
        lse: Their log-sum-exp over all that is held, `[G * W, 1]`.
        head: The KV head.
        held: Positions of the rows that it holds.
        most: How many absent rows are in these pages, at least.
    """
    spill = layer.spill
    assert spill is not None
    pages = spill.available // PAGE
    is_absent = np.ones(pages * PAGE, bool)
    is_absent[held[held < pages * PAGE]] = False
    absent: Array = is_absent.reshape(pages, PAGE)
    lost = absent.sum(axis=1)
    estimates = np.where(lost > 0, 0, -np.inf).astype(np.float32)
    if back.asks(head):
        asking = back.asking_heads(layer.store.heads)
        place, width = asking.index(head), q.shape[1]
        for first, digests in spill.digests(place, len(asking), width):
            part = slice(first, min(first + len(digests), pages))
            digests = digests[: part.stop - first]
            keys = digests["keys"].astype(np.float32) * digests["scale"][:, None, None]
            at = np.arange(part.start * PAGE, part.stop * PAGE)
            seen = _seen_at(layer, keys.reshape(-1, width), at, held)
            logits = (seen @ q.T).reshape(len(digests), PAGE, -1) - lse.T
            logits = np.where(absent[part], logits.max(axis=2), -np.inf)
            estimates[part] = logits.max(axis=1)
    return sorted(pages_to_read(estimates, lost, back.settings.pages, most))


def _seen_at(layer: Layer, keys: Array, positions: Array, held: Array) -> Array:
    """Keys `[M, D]` as queries would see them, were their rows held.

    With rolling positions each is turned by the tokens after it that the head has forgotten, as the
    keys of its slots are (`storage/rope.py`).

    Args:
        layer: The layer.
        keys: The keys as they came, `[M, D]` float32.
        positions: Their positions, `[M]`.
        held: Positions of the rows that the head holds.
    """
    rope = layer.settings.rope
    if rope is None:
        return keys
    held_after = len(held) - np.searchsorted(np.sort(held), positions, side="right")
    forgotten = layer.offset - 1 - positions - held_after
    turned = rope.turned(mx.array(keys)[None, None], mx.array(forgotten)[None, None])
    return np.array(turned[0, 0])


def _positions_of(pages: Sequence[int]) -> Array:
    """The positions of whole pages."""
    return (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)


def pages_to_read(estimates: Array, lost: Array, pages: int, most: int) -> set[int]:
    """The pages that are read: those of the largest estimates, and each one's next.

    Args:
        estimates: The logarithm of the largest estimated mass of a page's evicted rows.
        lost: How many of its rows were evicted.
        pages: So many are read, and as many behind them.
        most: How many evicted rows are read, at least.
    """
    read = set[int]()
    for page in np.argsort(-estimates, kind="stable").tolist():
        if len(read) >= 2 * pages and sum(lost[p] for p in read) >= most:
            break
        read |= {page, min(page + 1, len(lost) - 1)}  # a fact may end in the next page
    return read


def most_wanted(rank: Array, most: int) -> Array:
    """The positions of the `most` largest numbers of `rank`, in order; of equals the first."""
    at: Array = np.sort(np.argsort(-rank, kind="stable")[:most])
    return at


# -- credit ------------------------------------------------------------------------------------


def _as_scores(layer: Layer, positions: Array, wanted: Array) -> Array:
    """The scores `[M]` of rows that always had the mass `wanted`."""
    if not layer.policy.sums_mass:
        return np.asarray(wanted, np.float32)
    begun = np.maximum(positions, layer.aged_from)
    given: Array = (wanted * np.maximum(layer.offset - begun, 1)).astype(np.float32)
    return given


def _kept_credit(
    layer: Layer, back: Returning, head: int, held: Array, scores: Array, wanted: Wanted
) -> Credit:
    """The credit that a head's returned rows keep: half, or more where they are still wanted.

    Args:
        layer: The layer.
        back: What it keeps.
        head: The KV head.
        held: Positions of the rows in its slots, `[N]`.
        scores: Their scores `[N]`, from which the rest of the credit is taken.
        wanted: What the head wants.
    """
    old = back.credits.get(head, Credit(np.zeros(0, np.int64), np.zeros(0, np.float32)))
    slots = {position: slot for slot, position in enumerate(held.tolist())}
    masses = dict(zip(wanted.positions.tolist(), wanted.masses.tolist(), strict=True))
    still = [i for i, position in enumerate(old.positions.tolist()) if position in slots]
    positions, given = old.positions[still], old.scores[still]
    now = np.array([masses.get(position, 0.0) for position in positions.tolist()])
    kept = np.maximum(given / 2, _as_scores(layer, positions, now))
    at = [slots[position] for position in positions.tolist()]
    scores[at] = np.maximum(scores[at] - given, 0) + kept
    return Credit(positions, kept)


# -- rows of the file --------------------------------------------------------------------------


def _digest_new_pages(layer: Layer, back: Returning, spill: LayerRows) -> None:
    """Make the digests of pages that were completed since the last time.

    Other heads than those that ask have none, and queries of zeros: a head whose neighbours in its
    run ask gets some rows back, too, and any will do. They have no credit, and are the first to
    leave again.
    """
    last = spill.available // PAGE
    heads = back.asking_heads(layer.store.heads)
    while (first := spill.digested) < last:
        pages = min(last - first, TRACT)
        positions = np.arange(first * PAGE, (first + pages) * PAGE)
        keys = [np.array(_keys_of(layer, spill.rows(head, positions))) for head in heads]
        spill.digest(digests_of(np.stack(keys).reshape(len(heads), pages, PAGE, -1)))


def _rows(
    layer: Layer, fields: Fields, come: Sequence[dict[str, Array]], credits: Sequence[Credit]
) -> Fields:
    """The fields of the rows that come back to a run, `[1, heads, M, ...]`.

    Args:
        layer: The layer.
        fields: The fields of the run's slots, whose names and dtypes the rows take.
        come: Each head's rows, as the file has them, `[M, ...]` by name.
        credits: Each head's credit, whose last M positions and scores are theirs.
    """
    heads: list[Fields] = []
    for of_file, credit in zip(come, credits, strict=True):
        of_head, M = _in_mlx(layer, of_file), len(of_file["keys"])
        of_head["positions"] = mx.array(credit.positions[-M:].astype(np.int32))
        of_head["scores"] = mx.array(credit.scores[-M:])
        if "value_lengths" in fields:
            of_head["value_lengths"] = value_lengths(dense(layer.packing.rows("values", of_head)))
        heads.append(of_head)
    rows = {
        name: mx.stack([of_head[name] for of_head in heads])[None].astype(field.dtype)
        for name, field in fields.items()
    }
    return marked(layer.settings, rows) or rows


def _keys_of(layer: Layer, rows: dict[str, Array]) -> mx.array:
    """Keys `[M, D]` of rows as the file has them, float32."""
    return dense(layer.packing.rows("keys", _in_mlx(layer, rows))).astype(mx.float32)


def _in_mlx(layer: Layer, rows: dict[str, Array]) -> Fields:
    """A file's fields as arrays of the store's dtypes."""
    dtypes = {name: field.dtype for name, field in layer.store.fields.items()}
    return {
        name: of_bits(of_name, bfloat16=dtypes[name] == mx.bfloat16)
        for name, of_name in rows.items()
    }
