"""Evicted rows come back: the rows that the last queries want, from the file of all rows.

Before a chunk of queries, and every few tokens while decoding, the last queries of the layer's
retrieval heads are compared with the digests of all pages (`spill/page_digests.py`). Of the pages
that have the rows with the largest estimated attention mass the rows themselves are read, and their
masses computed.
The rows that got most, and those that follow them, take slots: the remainder loses them
(`Remainder.without`), and the policy chooses the rows that leave for them.

A row that comes back has no recent attention to show, and the policy would evict it at once. So it
gets a lease: its score is raised to that of a row that always had the mass just computed. At the
next return the raise is taken back, and leased rows compete with the evicted ones. Those that are
still wanted get a new lease, the others are judged by the attention that they got.

Positions and queries are read by the host, which waits for the step before. While decoding that is
one step of `Returns.every`, and no step waits for its own queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_h2o.attention.backends.reference import softcapped
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.layer import eviction
from mlx_h2o.layer.layer import Layer, marked
from mlx_h2o.layer.policy_view import rows_of
from mlx_h2o.layer.return_state import Credit, ReturnState
from mlx_h2o.slots.packed import dense, value_lengths
from mlx_h2o.slots.pins import true_positions
from mlx_h2o.slots.rope import without_gaps
from mlx_h2o.slots.slot_store import Fields, Run
from mlx_h2o.spill.layer_rows import LayerRows
from mlx_h2o.spill.layout import Array
from mlx_h2o.spill.page_digests import PAGE, TRACT, digests_of
from mlx_h2o.spill.parts import of_bits

#: A wanted row makes the rows behind it wanted, each by this factor less than the one before: when
#: the model finds where a fact is told, it reads on from there.
FADING = 0.9
#: A row is wanted if some query gives it this part of its attention. In prose queries spread less
#: than this over many old rows, and rows that came for it would cost more than they bring
#: (docs/results/experiments.md). How much it is wanted is the mean over all queries, as in scores.
LEAST_WANTED = 0.1


class Probe(NamedTuple):
    """The queries that say what is wanted.

    Attributes:
        queries: `[H, G * W, D]` float32, times the attention's scale.
        logsums: Their log-sum-exp over all that is held, `[H, G * W, 1]`.
        softcap: c of capped logits, or 0.
    """

    queries: Array
    logsums: Array
    softcap: float

    def logits(self, head: int, keys: Array) -> Array:
        """One head's logits `[G * W, M]` for keys `[M, D]`."""
        return np.array(softcapped(mx.array(self.queries[head] @ keys.T), self.softcap))


class Change(NamedTuple):
    """What a return changes in a run of heads.

    Attributes:
        rows: The rows that come back, fields `[1, heads, M, ...]`; None: no row does.
        scores: The scores of the rows in the slots, `[1, heads, N]`.
        credits: By KV head.
    """

    rows: Fields | None
    scores: mx.array
    credits: dict[int, Credit]


def is_due(back: ReturnState, layer: Layer, length: int) -> bool:
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
    if not layer.policy.needs_attention:  # it has no use for a lease
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
        queries, own = [*queries, back.newest(call.q, H)], new_keys
    if not queries:
        return
    q = mx.concatenate(queries, axis=2)[:, :, -back.settings.window :].astype(mx.float32)
    q = back.of_all(q, H)
    if (frame := layer.settings.frame) is not None:
        q, own = frame.enter_queries(q), None if own is None else frame.enter(own)
    q = q.astype(mx.float32) * call.scale
    slots = layer.attended()
    probe = _probe(layer, q, slots, own, call)
    try:
        _digest_new_pages(layer, back, spill)
        changes = [
            _change(layer, back, run, fields, probe) if back.has(run) else None
            for run, fields in zip(layer.runs, slots, strict=True)
        ]
    except (OSError, ValueError) as error:
        spill.conversation.fail(f"rows cannot be read from the file: {error}")
        return
    if any(changes):
        _take_in(layer, back, slots, changes)


def _take_in(
    layer: Layer, back: ReturnState, slots: Sequence[Fields], changes: Sequence[Change | None]
) -> None:
    """Give slots to the rows that come back; the policy evicts as many others."""
    layer.journal.clear()
    parts = []
    for run, fields, change in zip(layer.runs, slots, changes, strict=True):
        if change is not None:
            back.credits |= change.credits
            fields, rows = {**fields, "scores": change.scores}, change.rows
            if rows is not None:
                back.returned += rows["positions"].size
                layer.unfold(rows, run.first)
                fields = {name: mx.concatenate([of, rows[name]], 2) for name, of in fields.items()}
        parts.append(fields)
    lengths = [fields["positions"].shape[2] for fields in parts]
    if any(run.budget < n for run, n in zip(layer.runs, lengths, strict=True)):
        eviction.settle(layer, parts)
    else:
        layer.keep(parts)
        eviction.choose_victims(layer)


# -- what is wanted ----------------------------------------------------------------------------


def _probe(
    layer: Layer, q: mx.array, slots: Sequence[Fields], own: mx.array | None, call: AttentionCall
) -> Probe:
    """The queries and their log-sum-exp over slots, remainder, new keys and attention sinks."""
    H, W = layer.store.heads, q.shape[2]
    grouped = q.reshape(H, -1, W, q.shape[3])
    sums = []
    for run, fields in zip(layer.runs, slots, strict=True):
        keys = dense(rows_of(layer, run, fields)[0])
        if layer.settings.rope is not None:
            places = true_positions(fields["positions"])
            keys = without_gaps(keys, places, layer.offset, layer.settings.rope)
        keys = keys[0].astype(mx.float32)
        logits = grouped[run.first : run.last] @ keys[:, None].swapaxes(-1, -2)
        sums.append(mx.logsumexp(softcapped(logits, call.softcap), axis=-1))
    total = mx.concatenate(sums)
    if layer.settings.remainder:
        saturation = layer.settings.saturations(H)
        column = layer.remainder.column(q, 1.0, saturation, call.softcap)
        total = mx.logaddexp(total, column.reshape(total.shape))
    if own is not None:
        L = own.shape[2]
        logits = grouped @ own[0, :, None].astype(mx.float32).swapaxes(-1, -2)
        sees = mx.arange(L) <= mx.arange(L - W, L)[:, None]
        logits = mx.where(sees, softcapped(logits, call.softcap), -mx.inf)
        total = mx.logaddexp(total, mx.logsumexp(logits, axis=-1))
    if call.sinks is not None:
        total = mx.logaddexp(total, call.sinks.astype(mx.float32).reshape(H, -1)[..., None])
    flat = grouped.reshape(H, -1, q.shape[3])
    return Probe(np.array(flat), np.array(total.reshape(H, -1, 1)), call.softcap)


def _change(
    layer: Layer, back: ReturnState, run: Run, fields: Fields, probe: Probe
) -> Change | None:
    """What a return changes in a run of heads, or None; nothing changes yet."""
    spill, settings = layer.spill, back.settings
    assert spill is not None
    slots = np.array(true_positions(fields["positions"]))[0]
    recent = np.arange(layer.offset - layer.window_length, layer.offset)
    present = [np.concatenate([of_head, recent]) for of_head in slots]
    end = spill.available // PAGE * PAGE
    absent = min(end - int((of_head < end).sum()) for of_head in present)
    evictable = run.budget - layer.policy.sink - layer.policy.recent_slots(layer.budget_of(run))
    most = min(settings.rows, int(settings.room * evictable), absent)
    if most < 1:
        return None
    heads = range(run.first, run.last)
    scores, candidates, credits = np.array(fields["scores"])[0].copy(), list[Candidates](), {}
    for i, head in enumerate(heads):
        places = {position: slot for slot, position in enumerate(slots[i].tolist())}
        leased = _end_leases(layer, back.credits.get(head), places, scores[i])
        candidates.append(
            _candidates(layer, back, head, probe, present[i], leased[leased < end], most)
        )
        credits[head] = _lease(layer, candidates[-1], most, places, scores[i])
    # Each head of a run gets as many rows: those that it wants, and others without a lease.
    count = max(
        int((~np.isin(credits[head].positions, of_head)).sum())
        for head, of_head in zip(heads, slots, strict=True)
    )
    if not count:
        had = any(head in back.credits and len(back.credits[head].positions) for head in heads)
        return Change(None, mx.array(scores[None]), credits) if had else None
    rows = [
        _rows(layer, fields, candidates[i], credits[head], count) for i, head in enumerate(heads)
    ]
    joined = {name: mx.concatenate([of_head[name] for of_head in rows], axis=1) for name in fields}
    return Change(marked(layer.settings, joined) or joined, mx.array(scores[None]), credits)


class Candidates(NamedTuple):
    """The rows that were read, of whole pages, in the order of their positions: `[M]` each.

    Attributes:
        positions: Their positions.
        rows: Their fields, as the file has them.
        absent: Whether they were evicted.
        masses: How much they are wanted: the mean attention mass that queries give them, or to a
            row before them. 0 for rows that are held without a lease.
    """

    positions: Array
    rows: dict[str, Array]
    absent: Array
    masses: Array


def _candidates(
    layer: Layer,
    back: ReturnState,
    head: int,
    probe: Probe,
    present: Array,
    leased: Array,
    most: int,
) -> Candidates:
    """How much one head wants the rows of the pages that seem to be wanted most.

    Args:
        layer: The layer.
        back: What it keeps.
        head: The KV head.
        probe: The queries.
        present: Positions of the rows that it holds.
        leased: Positions of those that had a lease until now.
        most: How many absent rows are read, at least.
    """
    at = _positions_of(_pages_read(layer, back, probe, head, present, leased, most))
    back.rows_read += len(at)
    assert layer.spill is not None
    rows = layer.spill.rows(head, at)
    logits = probe.logits(head, _visible_at(layer, np.array(_keys_of(layer, rows)), at, present))
    absent = ~np.isin(at, present)
    # Absent rows would have their part of the softmax, as those that are held have.
    of_absent = np.where(absent, logits, -np.inf)
    lse = np.logaddexp(probe.logsums[head], np.logaddexp.reduce(of_absent, 1, keepdims=True))
    weights = np.exp(np.minimum(logits - lse, 0))
    own = np.where((weights.max(axis=0) >= LEAST_WANTED) & back.asks(head), weights.mean(axis=0), 0)
    masses = own.copy()
    for i in range(1, min(back.settings.ahead, len(at) - 1) + 1):
        behind = np.where(at[i:] - at[:-i] == i, own[:-i] * FADING**i, 0)
        masses[i:] = np.maximum(masses[i:], behind)
    return Candidates(at, rows, absent, np.where(absent | np.isin(at, leased), masses, 0))


def _pages_read(
    layer: Layer,
    back: ReturnState,
    probe: Probe,
    head: int,
    present: Array,
    leased: Array,
    most: int,
) -> list[int]:
    """The pages whose rows are read, ascending: those of the rows with the largest estimated mass.

    Args:
        layer: The layer.
        back: What it keeps.
        probe: The queries.
        head: The KV head.
        present: Positions of the rows that it holds.
        leased: Positions of those that had a lease until now.
        most: How many absent rows are in these pages, at least.
    """
    spill = layer.spill
    assert spill is not None
    pages = spill.available // PAGE
    absent = np.ones(pages * PAGE, bool)
    absent[present[present < pages * PAGE]] = False
    lost: Array = absent.reshape(pages, PAGE).sum(axis=1)
    absent[leased] = True
    candidates: Array = absent.reshape(pages, PAGE)
    estimates = np.where(candidates.any(axis=1), 0, -np.inf).astype(np.float32)
    if back.asks(head):
        place = back.asking_heads(layer.store.heads).index(head)
        width = probe.queries.shape[2]
        for first, digests in spill.digests(place, width):
            part = slice(first, min(first + len(digests), pages))
            digests = digests[: part.stop - first]
            keys = digests["keys"].astype(np.float32) * digests["scale"][:, None, None]
            at = np.arange(part.start * PAGE, part.stop * PAGE)
            visible = _visible_at(layer, keys.reshape(-1, width), at, present)
            masses = (probe.logits(head, visible) - probe.logsums[head]).max(axis=0)
            masses = np.where(candidates[part], masses.reshape(-1, PAGE), -np.inf)
            estimates[part] = masses.max(axis=1)
    return sorted(pages_to_read(estimates, lost, back.settings.pages, most))


def _visible_at(layer: Layer, keys: Array, positions: Array, present: Array) -> Array:
    """Keys `[M, D]` as queries would see them, were their rows held.

    With rolling positions each is turned by the tokens after it that the head has forgotten, as the
    keys of its slots are (`slots/rope.py`).

    Args:
        layer: The layer.
        keys: The keys as they came, `[M, D]` float32.
        positions: Their positions, `[M]`.
        present: Positions of the rows that the head holds.
    """
    rope = layer.settings.rope
    if rope is None:
        return keys
    held_after = len(present) - np.searchsorted(np.sort(present), positions, side="right")
    forgotten = layer.offset - 1 - positions - held_after
    turned = rope.turned(mx.array(keys)[None, None], mx.array(forgotten)[None, None])
    return np.array(turned[0, 0])


def _positions_of(pages: Sequence[int]) -> Array:
    """The positions of whole pages."""
    return (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)


def pages_to_read(estimates: Array, lost: Array, pages: int, most: int) -> set[int]:
    """The pages that are read: those of the largest estimates, and each one's next.

    Args:
        estimates: The logarithm of the largest estimated mass of a page's rows that may get a
            lease.
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


# -- leases ------------------------------------------------------------------------------------


def _end_leases(
    layer: Layer, credit: Credit | None, places: dict[int, int], scores: Array
) -> Array:
    """Take the credit of a head's leased rows back.

    Args:
        layer: The layer.
        credit: What their scores were raised by; None: no row of the head had a lease.
        places: The slot of each position that it holds.
        scores: The scores of its slots `[N]`, which change.

    Returns:
        The positions of those that are still held.
    """
    if credit is None:
        return np.zeros(0, np.int32)
    still = [i for i, position in enumerate(credit.positions.tolist()) if position in places]
    if layer.policy.sums_mass:  # other scores forget by themselves
        at = [places[position] for position in credit.positions[still].tolist()]
        scores[at] = np.maximum(scores[at] - credit.scores[still], 0)
    return credit.positions[still]


def _lease(
    layer: Layer, candidates: Candidates, most: int, places: dict[int, int], scores: Array
) -> Credit:
    """Give leases to the rows that are wanted most.

    Args:
        layer: The layer.
        candidates: What the head wants.
        most: How many get one, at most.
        places: The slot of each position that the head holds.
        scores: The scores of its slots `[N]`, which change where they get one.

    Returns:
        What the scores are raised by. Those of absent rows are 0 before.
    """
    best = most_wanted(candidates.masses, most)
    best = best[candidates.masses[best] > 0]
    positions, raised = candidates.positions[best].astype(np.int32), candidates.masses[best]
    if layer.policy.sums_mass:
        raised = raised * np.maximum(layer.offset - np.maximum(positions, layer.aged_from), 1)
    raised = raised.astype(np.float32)
    for i, position in enumerate(positions.tolist()):
        if (slot := places.get(position)) is not None:
            raised[i] = max(raised[i] - scores[slot], 0)
            scores[slot] += raised[i]
    return Credit(positions, raised)


# -- rows of the file --------------------------------------------------------------------------


def _digest_new_pages(layer: Layer, back: ReturnState, spill: LayerRows) -> None:
    """Make the digests of pages that were completed since the last time.

    Other heads than those that ask have none, and queries of zeros: a head whose neighbours in its
    run ask gets some rows back, too, and any will do. They have no lease, and are the first to
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
    layer: Layer, fields: Fields, candidates: Candidates, credit: Credit, count: int
) -> Fields:
    """The fields of the rows that come back to a head, `[1, 1, count, ...]`.

    Args:
        layer: The layer.
        fields: The fields of the slots, whose names and dtypes the rows take.
        candidates: What the head wants.
        credit: The credit of its rows with a lease.
        count: How many come: those with a lease that are absent, and further absent ones.
    """
    best = most_wanted(np.where(candidates.absent, candidates.masses, -1.0), count)
    rows = _in_mlx(layer, {name: of_name[best] for name, of_name in candidates.rows.items()})
    at = candidates.positions[best].astype(np.int32)
    raised = dict(zip(credit.positions.tolist(), credit.scores.tolist(), strict=True))
    scores = [raised.get(position, 0.0) for position in at.tolist()]
    rows |= {"positions": mx.array(at), "scores": mx.array(scores)}
    if "value_lengths" in fields:
        rows["value_lengths"] = value_lengths(dense(layer.packing.rows("values", rows)))
    return {name: rows[name][None, None].astype(field.dtype) for name, field in fields.items()}


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
