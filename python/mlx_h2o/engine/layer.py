"""The state of one layer (slots, recent window, remainder, victims) and all changes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_h2o.attention.backends.decoder import Decoder, HeadPlan, PlannedToken
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.engine.array_owner import Evictions, Fields, Memory, fields_of, marked
from mlx_h2o.engine.return_state import ReturnState
from mlx_h2o.spill.layer_rows import STORED, LayerRows
from mlx_h2o.storage.journal import Journal
from mlx_h2o.storage.packed import dense
from mlx_h2o.storage.pins import stored_positions
from mlx_h2o.storage.recent_window import RecentWindow
from mlx_h2o.storage.slot_store import Run, SlotStore


class RowType(NamedTuple):
    """The type of a layer's keys or values; rows of another type are refused.

    Attributes:
        batch: Sequences, B.
        heads: KV heads, H.
        width: Width of a row, D or Dv.
        dtype: The rows' dtype before they are packed.
    """

    batch: int
    heads: int
    width: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, rows: mx.array) -> RowType:
        """The type of rows `[B, H, L, width]`."""
        batch, heads, _, width = rows.shape
        return cls(batch, heads, width, rows.dtype)

    def require(self, name: str, rows: mx.array) -> None:
        """Raise ValueError unless rows are of this type."""
        come = RowType.of(rows)
        if come != self:
            raise ValueError(
                f"This cache holds {name} of (batch, heads, width, dtype) {tuple(self)}; "
                f"the new ones are {tuple(come)}."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        *sizes, dtype = self  # a dtype cannot be pickled
        return _row_type, (*sizes, str(dtype).rpartition(".")[2])


def _row_type(batch: int, heads: int, width: int, dtype: str) -> RowType:
    return RowType(batch, heads, width, getattr(mx, dtype))


class Layer:
    """The bounded memory of one layer; its first rows determine its row types.

    Args:
        settings: The layer's settings; its budgets are known.
        types: The row types of "keys" and "values".
        memory: The layer's arrays.
        offset: The next logical position.
        aged_from: The position from which scores count (`engine/pins_and_turns.py`).
    """

    def __init__(
        self,
        settings: CacheSettings,
        types: dict[str, RowType],
        memory: Memory,
        offset: int = 0,
        aged_from: int = 0,
    ):
        self.settings, self.policy, self.packing = settings, settings.policy, settings.packing
        self.offset, self.aged_from = offset, aged_from
        self.journal = Journal(settings.undo)
        self.memory = memory
        self.types = types
        #: The way of its rows into a file, or None (`spill/layer_rows.py`).
        self.spill: LayerRows | None = None
        #: What rows need to come back from the file, or None (`engine/returning.py`).
        self.back: ReturnState | None = None

    # -- the rows held ----------------------------------------------------------------------------

    @property
    def runs(self) -> list[Run]:
        """The runs of neighbouring heads with equal budgets."""
        return self.memory.runs

    @property
    def window(self) -> RecentWindow | None:
        """The newest tokens, or None if they are stored as all others."""
        return self.memory.window

    @property
    def store(self) -> SlotStore:
        """The slots with their arrays."""
        return self.memory.store

    @property
    def evictions(self) -> Evictions:
        """The remainder and the victims."""
        return self.memory.evictions

    def arrays(self) -> dict[str, mx.array]:
        """Every array held, by name."""
        return self.memory.arrays(self.settings.remembers)

    @property
    def nbytes(self) -> int:
        """Bytes of everything held, with steps to undo and rows that wait for a file."""
        beside = sum(part.nbytes for part in (self.spill, self.back) if part is not None)
        return self.memory.nbytes(self.settings.remembers) + self.journal.nbytes + beside

    @property
    def recently_held(self) -> int:
        """Tokens in the recent window."""
        return self.window.length if self.window else 0

    @property
    def held(self) -> int:
        """Tokens held by the head that holds the most."""
        return self.recently_held + max(run.length for run in self.runs)

    def lost(self, run: Run) -> int:
        """Tokens that each head of a run has evicted."""
        return self.offset - run.length - self.recently_held

    def lost_beside(self, attended: Fields) -> int:
        """The same for a run that attends to slots with these fields, some beyond its budget."""
        return self.offset - self.recently_held - int(attended["positions"].shape[2])

    @property
    def slots_are_next(self) -> bool:
        """Whether the next token takes a slot, or pushes an older one into a slot."""
        return self.window is None or self.window.full

    def budget_of(self, run: Run) -> int:
        """Tokens that each head of a run may hold, including the newest."""
        return run.budget + (self.window.size if self.window else 0)

    def side_state(self) -> list[mx.array]:
        """All arrays, to evaluate with the output.

        Else the graph would grow from step to step, and what is lazy can be evaluated only in the
        thread of this step.
        """
        arrays = [*self.arrays().values(), *self.newest_queries()]
        return arrays + self.journal.newest() if self.settings.undo else arrays

    def newest_queries(self) -> list[mx.array]:
        """The newest queries that are kept so that rows can come back, to evaluate with the step.

        Only a copy of a part of the step's queries is kept, which until then holds all of them.
        """
        return [] if self.back is None else self.back.queries[-1:]

    # -- new tokens -------------------------------------------------------------------------------

    def check_rows(self, keys: mx.array, values: mx.array) -> None:
        """Raise ValueError unless new rows have the layer's row types."""
        for name, rows in (("keys", keys), ("values", values)):
            self.types[name].require(name, rows)

    def take_in(self, keys: mx.array, values: mx.array) -> list[Fields]:
        """Store new rows; those beyond the budget are held until attention shows what to evict.

        Args:
            keys: `[B, H, L, D]`.
            values: `[B, H, L, Dv]`.

        Returns:
            For each run, the fields of all slots to attend to, `[B, heads, N, ...]`, with the new
            ones last. Where N exceeds the run's budget, the caller must reduce them (`keep`).
        """
        L, first = keys.shape[2], self.offset
        self.memory.fit_positions(first + L)
        self.memory.take_back()
        self._note(L)
        rows: Fields | None
        if self.window is None:
            rows = marked(self.settings, fields_of(self.settings, keys, values, first))
        else:
            rows = marked(self.settings, self.window.push(keys, values, first))
        if self.spill is not None and self.window is not None:
            self.spill.take_chunk(first, keys, values, self.window.size)
        elif self.spill is not None and rows is not None:
            self.spill.take(first, STORED, rows)
        self.offset += L
        beyond = None
        if rows is not None and L == 1:  # victims for it are already named
            self._write_one(rows)
        elif rows is not None:
            count = rows["positions"].shape[2]
            if all(run.length + count <= run.budget for run in self.runs):
                self.store.append(rows)
            else:
                beyond = rows
        return self.memory.attended(beyond)

    def _note(self, L: int) -> None:
        """Note in the journal what L new tokens will change, if they can be taken back."""
        if not self.settings.undo:
            return
        if L > 1:
            self.journal.clear()
        else:
            store, victims = self.store, self.evictions.victims
            self.journal.begin(store, self.window, self.offset).note(store, self.window, victims)

    def _write_one(self, rows: Fields) -> None:
        """Store one row per head in the next unused slot, or over a victim, which is folded."""
        store, evictions = self.store, self.evictions
        store.reserve(1, rows)
        slots, overwritten = store.take_slots(evictions.victims, rows["keys"].shape[0])
        flat = store.flat_index_of_heads(slots)
        remembers = self.settings.remembers
        if any(overwritten) and (remembers or self.settings.undo):
            old = {name: store.take(flat, name) for name in rows}
            read: list[mx.array] = []
            if self.settings.undo:
                remainder = evictions.remainder if remembers else None
                read += self.journal.note_overwritten(slots, old, remainder)
            if remembers:
                weights = None if all(overwritten) else mx.array(overwritten, mx.float32)
                self.fold(
                    {name: row[:, :, None] for name, row in old.items()},
                    weights if weights is None else weights[None, :, None],
                )
                read += evictions.remainder.arrays.values()
            # Read first: with a read still to come the write would copy the whole buffer.
            flat = mx.depends(flat, read)
        store.put(flat, {name: row.squeeze(2) for name, row in rows.items()})

    def fold(self, rows: Fields, weights: mx.array | None, first: int | None = None) -> None:
        """Fold rows into the remainder.

        Args:
            rows: Fields `[B, heads, M, ...]` of evicted rows.
            weights: The count of each row, broadcastable to `[B, heads, M]`.
            first: The first of these heads; None if they are all of the layer's.
        """
        evictions = self.evictions
        keys, values = (dense(self.packing.rows(name, rows)) for name in ("keys", "values"))
        if first is None:
            evictions.remainder = evictions.remainder.fold(keys, values, weights)
            return
        part = evictions.remainder.heads(first, first + keys.shape[1]).fold(keys, values, weights)
        evictions.remainder = evictions.remainder.with_heads(first, part)

    def unfold(self, rows: Fields, first: int) -> None:
        """Take rows that come back out of the remainder.

        Args:
            rows: Fields `[B, heads, M, ...]` of rows that were folded in before.
            first: The first of these heads.
        """
        if not self.settings.remembers:
            return
        evictions = self.evictions
        keys, values = (dense(self.packing.rows(name, rows)) for name in ("keys", "values"))
        part = evictions.remainder.heads(first, first + keys.shape[1]).without(keys, values)
        evictions.remainder = evictions.remainder.with_heads(first, part)

    # -- results of attention and eviction --------------------------------------------------------

    def write_scores(self, parts: Sequence[mx.array]) -> None:
        """Replace the scores of the slots in use: `[B, heads, length]` for each run."""
        self.store.write("scores", parts)

    def write_newest_scores(self, scores: mx.array) -> None:
        """Replace the scores of the recent window, `[B, H, length]`."""
        assert self.window is not None
        self.window.write_scores(scores)

    def keep(self, kept: Sequence[Fields]) -> None:
        """Replace all slots by fields `[B, heads, length, ...]` for each run."""
        folded = self.evictions.remainder.arrays.values() if self.settings.remembers else ()
        self.store.replace(kept, list(folded))
        self.forget_victims()

    def name_victims(self, due: Sequence[Run], victims: mx.array) -> None:
        """Name the slots to overwrite next.

        Args:
            due: The runs with new victims.
            victims: Victims of all heads, `[B, H, evict_every]` int32.
        """
        for run in due:
            self.store.name_victims(run, victims.shape[2])
        self.evictions.victims = victims

    def forget_victims(self) -> None:
        """Make every full run choose its victims anew."""
        self.evictions.victims = None
        self.store.forget_victims()

    def regroup(self, settings: CacheSettings, budgets: Sequence[int]) -> None:
        """Give the heads other budgets, which a run may exceed; earlier steps cannot be taken back.

        Args:
            settings: The settings with these budgets.
            budgets: Slots of each head, without those of the recent window.
        """
        self.journal.clear()
        self.settings = settings
        self.store.regroup(budgets)
        self.forget_victims()

    def mark_pins(self, settings: CacheSettings) -> None:
        """Apply the pins of other settings, otherwise equal; earlier steps cannot be taken back."""
        self.journal.clear()
        if (store := self.store).fields:
            held = [store.view(run, "positions") for run in store.runs]
            store.write("positions", [stored_positions(of_run, settings.pins) for of_run in held])
        self.settings = settings
        self.forget_victims()

    def begin_turn(self, aged_from: int) -> None:
        """Make scores count from a position on; earlier steps cannot be taken back."""
        self.journal.clear()
        self.aged_from = aged_from

    def resize_window(self, size: int) -> Fields | None:
        """Change how many tokens the recent window holds; return rows that leave, or None."""
        self.memory.take_back()
        assert self.window is not None
        return marked(self.settings, self.window.resize(size, self.offset))

    def put_plain_rows(self, rows: tuple[mx.array, mx.array]) -> None:
        """Write the remainder's plain rows `[B, H, R, ...]` into the reserved slots."""
        self.store.put_reserved(dict(zip(("keys", "values"), rows, strict=True)))

    # -- taking tokens back -----------------------------------------------------------------------

    @property
    def trimmable(self) -> int:
        """How many of the newest tokens `trim` can take back now."""
        return self.journal.trimmable(self.offset, any(self.lost(run) for run in self.runs))

    def trim(self, n: int) -> None:
        """Take back the newest n tokens, at most `trimmable`; pins stay with their positions."""
        self.journal.settle()
        self.aged_from = min(self.aged_from, max(self.offset - n - 1, 0))
        undone = min(n, len(self.journal))
        if undone:
            evictions = self.evictions
            before = self.journal.take_back(undone, self.store, self.window)
            self.offset, remainder, victims = before
            evictions.remainder = remainder or evictions.remainder
            evictions.victims = evictions.victims if victims is None else victims
        older = n - undone
        if older:  # no token was evicted before these steps
            store = self.store
            self.offset -= older
            store.shorten(older - (self.window.trim(older) if self.window else 0))
            self.forget_victims()
        self.memory.fit_positions(self.offset)
        if self.spill is not None:
            self.spill.trim(self.offset)

    # -- fused steps ------------------------------------------------------------------------------

    def planned(self, keys: mx.array, values: mx.array) -> tuple[Decoder, PlannedToken]:
        """The decoder and the plan of the next token, which the layer counts from now on.

        Args:
            keys: `[B, H, 1, D]`, or other rows like these.
            values: `[B, H, 1, Dv]`, or other rows like these.
        """
        memory, window = self.memory, self.memory.window
        memory.fit_positions(self.offset + 1)
        decoder = memory.lent(self.settings, keys, values)
        before = None
        if self.settings.undo:
            before = self.journal.begin(memory.plan, window, self.offset)
        self.offset += 1
        recent = window.advance() if window is not None else None
        stays = recent is not None and not recent.leaving
        heads = tuple(head for run in memory.runs for head in self._advanced(run, stays))
        return decoder, PlannedToken(self.offset, heads, recent, before, self.aged_from)

    def _advanced(self, run: Run, stays: bool) -> list[HeadPlan]:
        """A run's plans for one token; where the token `stays` in the window, slots get no row."""
        every = self.policy.evict_every
        victim = -1 if stays else self.memory.plan.advance(run, every)
        choose = self.slots_are_next and run.length == run.budget and run.victims == 0
        if choose:
            self.memory.plan.name_victims(run, every)
        protected, lost = self.policy.recent_slots(self.budget_of(run)), self.lost(run)
        starts = range(run.start, run.start + run.heads * run.allocated, run.allocated)
        return [HeadPlan(s, run.length, victim, protected, lost, choose) for s in starts]
