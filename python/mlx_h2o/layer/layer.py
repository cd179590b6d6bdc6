"""The state of one layer (slots, recent window, remainder, victims) and all changes to it.

During fused decode steps a decoder has the layer's arrays, and changes them in place. Whatever
reads or changes an array takes all of them back first; lengths are current at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from mlx_h2o.attention.backends.choice import decoder_for, is_on_device, pack
from mlx_h2o.attention.backends.decoder import Decoder, HeadPlan, Lent, TokenPlan
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.slots.journal import Journal, put_back
from mlx_h2o.slots.packed import dense, value_lengths
from mlx_h2o.slots.pins import stored_positions
from mlx_h2o.slots.remainder import Remainder
from mlx_h2o.slots.slot_store import Fields, Run, SlotStore
from mlx_h2o.spill.setting import STORED

if TYPE_CHECKING:
    from mlx_h2o.layer.return_state import ReturnState
    from mlx_h2o.slots.recent_window import RecentWindow
    from mlx_h2o.spill.layer_rows import LayerRows


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
        new = RowType.of(rows)
        if new != self:
            raise ValueError(
                f"This cache holds {name} of (batch, heads, width, dtype) {tuple(self)}; "
                f"the new ones are {tuple(new)}."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        *sizes, dtype = self  # a dtype cannot be pickled
        return _row_type, (*sizes, str(dtype).rpartition(".")[2])


def _row_type(batch: int, heads: int, width: int, dtype: str) -> RowType:
    return RowType(batch, heads, width, getattr(mx, dtype))


class Layer:
    """The bounded memory of one layer; its first rows determine its row types.

    Attributes:
        settings: The layer's settings; its budgets are known.
        types: The row types of "keys" and "values".
        window: The newest tokens, or None if they are stored as all others.
        decoder: The decoder that has the arrays now, or None.
        offset: The next logical position.
        aged_from: The position from which scores count (`layer/pins_and_turns.py`).
        journal: The last steps, for `trim`.
        spill: The way of its rows into a file, or None (`spill/layer_rows.py`).
        back: What rows need to come back from the file, or None (`layer/returning.py`).
    """

    def __init__(
        self,
        settings: CacheSettings,
        types: dict[str, RowType],
        store: SlotStore,
        remainder: Remainder,
        window: RecentWindow | None = None,
        victims: mx.array | None = None,
        offset: int = 0,
        aged_from: int = 0,
    ):
        self.settings, self.types, self.window = settings, types, window
        self.policy, self.packing = settings.policy, settings.packing
        self.offset, self.aged_from = offset, aged_from
        self.journal = Journal(settings.undo)
        self.decoder: Decoder | None = None
        self.spill: LayerRows | None = None
        self.back: ReturnState | None = None
        self._store, self._remainder, self._victims = store, remainder, victims

    # -- the rows held ----------------------------------------------------------------------------

    @property
    def layout(self) -> SlotStore:
        """The slots' runs, places and lengths; their fields may be with the decoder."""
        return self._store

    @property
    def runs(self) -> list[Run]:
        """The runs of neighbouring heads with equal budgets."""
        return self._store.runs

    @property
    def store(self) -> SlotStore:
        """The slots with their fields."""
        self.take_back()
        return self._store

    @property
    def remainder(self) -> Remainder:
        """The statistics of evicted tokens."""
        self.take_back()
        return self._remainder

    @property
    def victims(self) -> mx.array | None:
        """Slots to overwrite next, `[B, H, evict_every]` int32; None until some are named.

        Each run knows how many of them are left.
        """
        self.take_back()
        return self._victims

    def arrays(self) -> dict[str, mx.array]:
        """Every array held, by name."""
        arrays = {f"slots.{name}": field for name, field in self.store.fields.items()}
        if self.settings.remembers:
            of_remainder = self._remainder.arrays.items()
            arrays |= {f"remainder.{name}": array for name, array in of_remainder}
        if self._victims is not None:
            arrays["victims"] = self._victims
        if self.window is not None:
            arrays |= {f"recent.{name}": field for name, field in self.window.fields.items()}
        return arrays

    @property
    def array_bytes(self) -> int:
        """Bytes of all arrays, and of slots in a reserved range those in use."""
        slots = self._store.nbytes
        if self.decoder is not None:
            return self.decoder.nbytes - self._store.capacity + slots
        beside = self.arrays().items()
        return slots + sum(a.nbytes for name, a in beside if not name.startswith("slots."))

    def attended(self, beyond: Fields | None = None) -> list[Fields]:
        """For each run, all fields of its slots, then of rows beyond its budget."""
        store = self.store
        if beyond is None:
            return [store.views(run) for run in store.runs]
        parts = []
        for run in store.runs:
            new = {name: row[:, run.first : run.last] for name, row in beyond.items()}
            if run.length:
                old = store.views(run)
                new = {name: mx.concatenate([old[name], new[name]], axis=2) for name in new}
            parts.append(new)
        return parts

    @property
    def nbytes(self) -> int:
        """Bytes of everything held, with steps to undo and rows that wait for a file."""
        beside = sum(part.nbytes for part in (self.spill, self.back) if part is not None)
        return self.array_bytes + self.journal_bytes + beside

    @property
    def journal_bytes(self) -> int:
        """Bytes of the steps that can be taken back."""
        lent = self.decoder.journal_bytes if self.decoder is not None else 0
        return self.journal.nbytes + lent

    @property
    def window_length(self) -> int:
        """Tokens in the recent window."""
        return self.window.length if self.window else 0

    @property
    def length(self) -> int:
        """Tokens held by the head that holds the most."""
        return self.window_length + max(run.length for run in self.runs)

    def lost(self, run: Run) -> int:
        """Tokens that each head of a run has evicted."""
        return self.offset - run.length - self.window_length

    def lost_beside(self, attended: Fields) -> int:
        """The same for a run that attends to slots with these fields, some beyond its budget."""
        return self.offset - self.window_length - int(attended["positions"].shape[2])

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
        self.fit_positions(first + L)
        self.take_back()
        self._note(L)
        rows: Fields | None
        if self.window is None:
            rows = marked(self.settings, new_fields(self.settings, keys, values, first))
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
        return self.attended(beyond)

    def _note(self, L: int) -> None:
        """Note in the journal what L new tokens will change, if they can be taken back."""
        if not self.settings.undo:
            return
        if L > 1:
            self.journal.clear()
        else:
            store, window = self.store, self.window
            self.journal.begin(store, window, self.offset).note(store, window, self._victims)

    def _write_one(self, rows: Fields) -> None:
        """Store one row per head in the next unused slot, or over a victim, which is folded."""
        store = self.store
        store.reserve(1, rows)
        slots, overwritten = store.take_slots(self._victims, rows["keys"].shape[0])
        flat = store.flat_index_of_heads(slots)
        remembers = self.settings.remembers
        if any(overwritten) and (remembers or self.settings.undo):
            old = {name: store.take(flat, name) for name in rows}
            read: list[mx.array] = []
            if self.settings.undo:
                remainder = self._remainder if remembers else None
                read += self.journal.note_overwritten(slots, old, remainder)
            if remembers:
                weights = None if all(overwritten) else mx.array(overwritten, mx.float32)
                self.fold(
                    {name: row[:, :, None] for name, row in old.items()},
                    weights if weights is None else weights[None, :, None],
                )
                read += self._remainder.arrays.values()
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
        remainder = self.remainder
        keys, values = (dense(self.packing.rows(name, rows)) for name in ("keys", "values"))
        if first is None:
            self._remainder = remainder.fold(keys, values, weights)
            return
        part = remainder.heads(first, first + keys.shape[1]).fold(keys, values, weights)
        self._remainder = remainder.with_heads(first, part)

    def unfold(self, rows: Fields, first: int) -> None:
        """Take rows that come back out of the remainder.

        Args:
            rows: Fields `[B, heads, M, ...]` of rows that were folded in before.
            first: The first of these heads.
        """
        if not self.settings.remembers:
            return
        remainder = self.remainder
        keys, values = (dense(self.packing.rows(name, rows)) for name in ("keys", "values"))
        part = remainder.heads(first, first + keys.shape[1]).without(keys, values)
        self._remainder = remainder.with_heads(first, part)

    # -- results of attention and eviction --------------------------------------------------------

    def write_scores(self, parts: Sequence[mx.array]) -> None:
        """Replace the scores of the slots in use: `[B, heads, length]` for each run."""
        self.store.write("scores", parts)

    def write_newest_scores(self, scores: mx.array) -> None:
        """Replace the scores of the recent window, `[B, H, length]`."""
        assert self.window is not None
        self.window.write_scores(scores)

    def keep(self, fields: Sequence[Fields]) -> None:
        """Replace all slots by fields `[B, heads, length, ...]` for each run."""
        folded = self.remainder.arrays.values() if self.settings.remembers else ()
        self.store.replace(fields, list(folded))
        self.forget_victims()

    def name_victims(self, due: Sequence[Run], victims: mx.array) -> None:
        """Name the slots to overwrite next.

        Args:
            due: The runs with new victims.
            victims: Victims of all heads, `[B, H, evict_every]` int32.
        """
        self.take_back()
        for run in due:
            run.victims = victims.shape[2]
        self._victims = victims

    def forget_victims(self) -> None:
        """Make every full run choose its victims anew."""
        self.take_back()
        for run in self.runs:
            run.victims = 0
        self._victims = None

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
            length = [store.view(run, "positions") for run in store.runs]
            store.write("positions", [stored_positions(of_run, settings.pins) for of_run in length])
        self.settings = settings
        self.forget_victims()

    def begin_turn(self, aged_from: int) -> None:
        """Make scores count from a position on; earlier steps cannot be taken back."""
        self.take_back()
        self.journal.clear()
        self.aged_from = aged_from

    def resize_window(self, size: int) -> Fields | None:
        """Change how many tokens the recent window holds; return rows that leave, or None."""
        self.take_back()
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
            self._undo(undone)
        older = n - undone
        if older:  # no token was evicted before these steps
            store = self.store
            self.offset -= older
            store.shorten(older - (self.window.trim(older) if self.window else 0))
            self.forget_victims()
        self.fit_positions(self.offset)
        if self.spill is not None:
            self.spill.trim(self.offset)

    def _undo(self, count: int) -> None:
        """Take back the last `count` steps of the journal, in place if the decoder did them all."""
        in_place = self.decoder is not None and self.decoder.take_back(count)
        steps = self.journal.pop(count)
        if not in_place:
            self.take_back()
        first = steps[-1]
        self.offset = first.offset
        self._store.return_to(first.runs)
        if self.window is not None and first.window is not None:
            self.window.return_to(*first.window)
        if not in_place:
            remainder, victims = put_back(steps, self._store, self.window)
            self._remainder = remainder or self._remainder
            self._victims = self._victims if victims is None else victims

    # -- fused steps ------------------------------------------------------------------------------

    def planned(self, keys: mx.array, values: mx.array) -> tuple[Decoder, list[TokenPlan]]:
        """The decoder and the plans of the next L tokens, which the layer counts from now on.

        Args:
            keys: `[B, H, L, D]`, or other rows like these.
            values: `[B, H, L, Dv]`, or other rows like these.
        """
        count = keys.shape[2]
        self.fit_positions(self.offset + count)
        decoder = self._lend(keys, values)
        return decoder, [self._planned_token() for _ in range(count)]

    def _planned_token(self) -> TokenPlan:
        store, window = self._store, self.window
        before = self.journal.begin(store, window, self.offset) if self.settings.undo else None
        self.offset += 1
        recent = window.advance() if window is not None else None
        stays = recent is not None and not recent.leaving
        heads = list[HeadPlan]()
        for run in store.runs:
            heads += self._advanced(run, stays)
        return TokenPlan(self.offset, tuple(heads), recent, before, self.aged_from)

    def _advanced(self, run: Run, stays: bool) -> list[HeadPlan]:
        """A run's plans for one token; where the token `stays` in the window, slots get no row."""
        every = self.policy.evict_every
        victim = -1 if stays else run.advance(every)
        choose = self.slots_are_next and run.length == run.budget and run.victims == 0
        if choose:
            run.victims = every
        protected, lost = self.policy.recent_slots(self.budget_of(run)), self.lost(run)
        starts = range(run.start, run.start + run.heads * run.allocated, run.allocated)
        return [HeadPlan(s, run.length, victim, protected, lost, choose) for s in starts]

    def _lend(self, keys: mx.array, values: mx.array) -> Decoder:
        """Give the arrays, with room for these rows, to the default device's decoder."""
        window, count = self.window, keys.shape[2]
        slots_short = any(
            run.allocated < min(run.length + count, run.budget) for run in self._store.runs
        )
        short = slots_short or (window is not None and window.needs_room(count))
        if self.decoder is not None and not short and is_on_device(self.decoder):
            return self.decoder
        self.take_back()
        if slots_short:
            self._store.reserve(count, new_fields(self.settings, keys, values, 0))
        victims, self._victims = self._victims, None
        if victims is None:
            shape = (keys.shape[0], self._store.heads, self.policy.evict_every)
            victims = mx.zeros(shape, mx.int32)
        recent = window.lend(count) if window is not None else None
        # The decoder gets the only references, so that it writes in place.
        lent = Lent(self._store.lend(), self._remainder, victims, recent)
        del self._remainder
        self.decoder = decoder_for(lent, self.settings)
        return self.decoder

    def take_back(self) -> None:
        """Take all arrays back from the decoder."""
        if self.decoder is None:
            return
        lent = self.decoder.end()
        self._store.get_back(lent.fields)
        if self.window is not None and lent.window is not None:
            self.window.get_back(lent.window)
        self._remainder, self._victims, self.decoder = lent.remainder, lent.victims, None

    def fit_positions(self, tokens: int) -> None:
        """Make positions as wide as so many tokens need."""
        if not self._store.positions_fit(tokens):
            self.store.fit_positions(tokens)

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copy; steps planned ahead are kept, so that they go on alike."""
        self.take_back()
        return vars(self)


def new_fields(settings: CacheSettings, keys: mx.array, values: mx.array, first: int) -> Fields:
    """New rows `[B, H, L, ...]` by field, for the positions from `first` on.

    Args:
        settings: The layer's settings.
        keys: `[B, H, L, D]`.
        values: `[B, H, L, Dv]`.
        first: The position of the first row.
    """
    B, H, L, _ = keys.shape
    new = mx.arange(first, first + L, dtype=mx.int32)
    fields = {
        **settings.packing.fields("keys", keys, pack),
        **settings.packing.fields("values", values, pack),
        "positions": mx.broadcast_to(new, (B, H, L)),
    }
    if settings.policy.needs_attention:
        fields["scores"] = mx.zeros((B, H, L))
    if settings.policy.keeps_value_lengths(settings.packing):
        fields["value_lengths"] = value_lengths(values)
    return fields


def marked(settings: CacheSettings, rows: Fields | None) -> Fields | None:
    """Rows with positions as slots store them, which mark pins."""
    if rows is None or not settings.pins:
        return rows
    return {**rows, "positions": stored_positions(rows["positions"], settings.pins)}
