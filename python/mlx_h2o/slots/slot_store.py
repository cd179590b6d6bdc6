"""The store: the slots that hold the rows of a layer's kept tokens.

Each field (keys, values, positions, ...) is one flat buffer `[B, S, ...]`. KV head k owns a range
of slots in it, and the first `length` of them (after `reserved` ones) are in use. With equal
budgets the same memory reads `[B, H, N, ...]`. Neighbouring heads with equal budgets form a run,
and are processed together.

Memory is allocated in steps, and each step copies what is there; `slots/paged_slots.py` has the
store whose slots stay where they are.

A slot's position takes 16 bits while the conversation's positions fit into them, then 32.
Positions are signed, since a pinned token's position is stored as its complement
(`slots/pins.py`). Only the store keeps them narrow: views and all arithmetic are int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

#: The fields of some rows, by name: `[B, heads, N, ...]` each.
Fields = dict[str, mx.array]


def under(prefix: str, arrays: Fields) -> Fields:
    """The arrays whose names begin with a prefix, by the rest of the name."""
    return {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}


# Slots allocated at a time until the budget is reached, as mlx-lm's KVCache grows.
GROWTH_STEP = 256


@dataclass
class Run:
    """Neighbouring KV heads with the same budget.

    Attributes:
        first: First KV head.
        last: One past the last KV head.
        budget: Slots each head may use.
        length: Slots each head uses.
        allocated: Slots each head has memory for.
        start: The index in the flat buffers where the first head's range begins.
        victims: Slots that are named to be overwritten next and are not overwritten yet.
    """

    first: int
    last: int
    budget: int
    length: int = 0
    allocated: int = 0
    start: int = 0
    victims: int = 0

    @property
    def heads(self) -> int:
        return self.last - self.first

    def copy(self) -> Run:
        """Another run with the same numbers."""
        return Run(
            self.first, self.last, self.budget,
            self.length, self.allocated, self.start, self.victims,
        )  # fmt: skip

    def advance(self, evict_every: int) -> int:
        """Take the next slot, for a decoder; return the index of the victim in it, or -1."""
        if self.length < self.budget:
            self.length += 1
            return -1
        self.victims -= 1
        return evict_every - self.victims - 1


def runs_of(budgets: Sequence[int], lengths: Sequence[int] | None = None) -> list[Run]:
    """Group a layer's heads into runs, by budget and slots in use (0 each when not given)."""
    runs: list[Run] = []
    for head, (budget, length) in enumerate(
        zip(budgets, lengths or [0] * len(budgets), strict=True)
    ):
        if runs and (runs[-1].budget, runs[-1].length) == (budget, length):
            runs[-1].last = head + 1
        else:
            runs.append(Run(head, head + 1, budget, length))
    return runs


class SlotStore:
    """Flat buffers of a layer's slots, by field name.

    Attributes:
        runs: The runs of heads, with their ranges.
        reserved: Slots at the start of each range that hold no token (the remainder's plain rows).
        fields: `[B, S, ...]` by name. Positions are narrow until `fit_positions`.

    Args:
        budgets: Slots that each head may use.
        reserved: See above.
    """

    def __init__(self, budgets: Sequence[int], reserved: int = 0):
        self.runs = runs_of(budgets)
        self.reserved = reserved
        self.fields: dict[str, mx.array] = {}
        self._wide = False  # whether positions take 32 bits
        self._sizes: dict[str, tuple[int, int]] = {}  # of fields: sequences, and bytes of a row

    @classmethod
    def of(cls, runs: list[Run], reserved: int, fields: dict[str, mx.array]) -> Self:
        """A store with these runs and fields, which must fit together.

        Args:
            runs: Runs of neighbouring heads with equal budgets.
            reserved: Slots of each head before the others, for the remainder's plain rows.
            fields: `[B, S, ...]` by name.
        """
        budgets = [run.budget for run in runs for _ in range(run.heads)]
        store = cls(budgets, reserved)
        store.runs, store.fields = runs, fields
        store._wide = fields["positions"].dtype == WIDE
        return store

    @property
    def heads(self) -> int:
        return self.runs[-1].last

    @property
    def capacity(self) -> int:
        """Bytes of all fields, those that were lent included."""
        slots = sum(run.heads * run.allocated for run in self.runs)
        return sum(batch * slots * row for batch, row in self._sizes_now().values())

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the fields take."""
        return sum(self.nbytes_of(name) for name in self._sizes_now())

    def nbytes_of(self, name: str) -> int:
        """The same of one field."""
        batch, row = self._sizes_now()[name]
        return batch * row * sum(run.heads * run.allocated for run in self.runs)

    def _sizes_now(self) -> dict[str, tuple[int, int]]:
        """Sequences and bytes of a row, of each field; the last ones while fields are lent."""
        if self.fields:
            self._sizes = {
                name: (field.shape[0], field.nbytes // (field.shape[0] * field.shape[1]))
                for name, field in self.fields.items()
            }
        return self._sizes

    def view(self, run: Run, name: str, with_reserved: bool = False) -> mx.array:
        """The slots in use of a run, `[B, heads, length, ...]`; positions as int32.

        Args:
            run: The run of heads.
            name: The field's name.
            with_reserved: Whether the reserved slots come before them.
        """
        field = self.slots_of(self.fields[name], run, with_reserved)
        return field.astype(WIDE) if name == "positions" else field

    def slots_of(self, field: mx.array, run: Run, with_reserved: bool = False) -> mx.array:
        """The slots in use of a run, of any field laid out as the run says.

        Args:
            field: `[B, S, ...]`.
            run: The run of heads.
            with_reserved: Whether the reserved slots come before them.
        """
        first = 0 if with_reserved else self.reserved
        return self._range(field, run)[:, :, first : self.reserved + run.length]

    def views(self, run: Run) -> dict[str, mx.array]:
        """All fields of the slots in use of a run."""
        return {name: self.view(run, name) for name in self.fields}

    def _range(self, field: mx.array, run: Run) -> mx.array:
        end = run.start + run.heads * run.allocated
        if len(self.runs) > 1:
            field = field[:, run.start : end]
            if run.heads == 1:
                return field[:, None]  # a view; reshape would copy
        return field.reshape(field.shape[0], run.heads, run.allocated, *field.shape[2:])

    def flat_index(self, run: Run, slots: mx.array) -> mx.array:
        """Flat indices of a run's slots `[..., heads, M]`; slot 0 is the first one in use."""
        starts = run.start + self.reserved + run.allocated * mx.arange(run.heads, dtype=mx.int32)
        return slots + starts[:, None]

    def flat_index_of_heads(self, slots: Sequence[mx.array]) -> mx.array:
        """Flat indices `[B, H]` of one slot of each head; `slots` has `[B, heads]` of each run."""
        index = [
            self.flat_index(run, of_run[..., None]).squeeze(-1)
            for run, of_run in zip(self.runs, slots, strict=True)
        ]
        return index[0] if len(index) == 1 else mx.concatenate(index, axis=1)

    def next_index(self, run: Run, count: int) -> mx.array:
        """Flat indices `[heads, count]` of the next unused slots of a run."""
        new = mx.arange(run.length, run.length + count, dtype=mx.int32)
        return self.flat_index(run, mx.broadcast_to(new, (run.heads, count)))

    def reserve(self, extra: int, like: dict[str, mx.array]) -> None:
        """Allocate `extra` more slots for each head, in steps, up to its budget.

        Args:
            extra: Slots that are about to be appended.
            like: Rows `[B, H, M, ...]` by field, whose widths and dtypes new buffers take.
        """
        room = []
        for run in self.runs:
            steps = -(-(run.length + extra) // GROWTH_STEP) * GROWTH_STEP
            room.append(self.reserved + min(run.budget, steps))
        if self.fields and all(r <= run.allocated for r, run in zip(room, self.runs, strict=True)):
            return
        self._grow(room, like)

    def _grow(self, room: Sequence[int], like: dict[str, mx.array]) -> None:
        """Give each run's heads memory for so many slots; arguments as in `reserve`."""
        grown = {}
        for name, of_field in like.items():
            row = self._cast(name, of_field)
            parts = []
            for run, slots in zip(self.runs, room, strict=True):
                slots = max(slots, run.allocated)
                shape = (row.shape[0], run.heads, slots - run.allocated, *row.shape[3:])
                part = mx.zeros(shape, row.dtype)
                if run.allocated:
                    part = mx.concatenate([self._range(self.fields[name], run), part], axis=2)
                parts.append(part)
            grown[name] = self._flatten(parts)
        self._set(grown, [max(r, run.allocated) for r, run in zip(room, self.runs, strict=True)])

    def positions_fit(self, tokens: int) -> bool:
        """Whether positions are as wide as so many tokens need."""
        return self._wide == (position_dtype(tokens) == WIDE)

    def fit_positions(self, tokens: int) -> None:
        """Make positions as wide as so many tokens need."""
        self._wide = position_dtype(tokens) == WIDE
        if self.fields:
            self.fields["positions"] = self.fields["positions"].astype(self._position_dtype)

    @property
    def _position_dtype(self) -> mx.Dtype:
        return WIDE if self._wide else NARROW

    def _cast(self, name: str, rows: mx.array) -> mx.array:
        """Rows of a field as the store keeps them."""
        return rows.astype(self._position_dtype) if name == "positions" else rows

    def lend(self) -> dict[str, mx.array]:
        """Give the fields away; without another reference they can be changed in place."""
        self._sizes_now()
        fields, self.fields = self.fields, {}
        return fields

    def get_back(self, fields: dict[str, mx.array]) -> None:
        """Take the fields back."""
        self.fields = fields

    def append(self, rows: dict[str, mx.array]) -> None:
        """Store rows `[B, H, L, ...]` by field in unused slots."""
        L = rows["positions"].shape[2]
        self.reserve(L, rows)
        index = [self.next_index(run, L).reshape(1, -1) for run in self.runs]
        flat = index[0] if len(index) == 1 else mx.concatenate(index, axis=1)
        self.put(flat, {name: row.flatten(1, 2) for name, row in rows.items()})
        for run in self.runs:
            run.length += L

    def take_slots(self, victims: mx.array | None, batch: int) -> tuple[list[mx.array], list[bool]]:
        """One slot for a new row of each head: the next unused one, or a victim's.

        Args:
            victims: `[B, H, evict_every]`, needed where a run is full.
            batch: Sequences, B.

        Returns:
            The slots, per run `[B, heads]`, counted in each head; for each head whether a row lies
            there.
        """
        slots, overwritten = [], []
        for run in self.runs:
            full = run.length == run.budget
            overwritten += [full] * run.heads
            if full:
                assert victims is not None
                next_victim = victims.shape[2] - run.victims
                slots.append(victims[:, run.first : run.last, next_victim])
                run.victims -= 1
            else:
                slots.append(mx.full((batch, run.heads), run.length, mx.int32))
                run.length += 1
        return slots, overwritten

    def shorten(self, count: int) -> None:
        """Forget the last `count` slots of every head."""
        for run in self.runs:
            run.length -= count

    def return_to(self, runs: Sequence[Run]) -> None:
        """Set lengths and named victims to those of these runs."""
        for run, before in zip(self.runs, runs, strict=True):
            run.length, run.victims = before.length, before.victims

    def put(self, index: mx.array, rows: dict[str, mx.array]) -> None:
        """Overwrite slots, in place if there is no other reference to the buffers.

        Args:
            index: Flat indices `[B or 1, M]`.
            rows: `[B, M, ...]` by field.
        """
        for name, row in rows.items():
            field = self.fields[name]
            where = index.reshape(*index.shape, *[1] * (row.ndim - 2))
            where = mx.broadcast_to(where, row.shape)
            self.fields[name] = mx.put_along_axis(field, where, row.astype(field.dtype), axis=1)

    def put_reserved(self, rows: dict[str, mx.array]) -> None:
        """Fill the reserved slots of all heads, which form one run: `[B, H, reserved, ...]`."""
        run, slots = self.runs[0], mx.arange(-self.reserved, 0, dtype=mx.int32)
        index = self.flat_index(run, mx.broadcast_to(slots, (run.heads, self.reserved)))
        self.put(index.reshape(1, -1), {name: row.flatten(1, 2) for name, row in rows.items()})

    def take(self, index: mx.array, name: str) -> mx.array:
        """Rows `[B, M, ...]` of a field at flat indices `[B or 1, M]`."""
        field = self.fields[name]
        where = index.reshape(*index.shape, *[1] * (field.ndim - 2))
        shape = (field.shape[0], index.shape[1], *field.shape[2:])
        return mx.take_along_axis(field, mx.broadcast_to(where, shape), axis=1)

    def replace(self, rows: Sequence[dict[str, mx.array]], after: Sequence[mx.array] = ()) -> None:
        """Replace all slots.

        Args:
            rows: Each run's new rows by field, `[B, heads, length, ...]`.
            after: What reads the present slots, for a store that overwrites them.
        """
        pad = [(0, 0), (0, 0), (self.reserved, 0)]
        lengths = [next(iter(of_run.values())).shape[2] for of_run in rows]
        fields = {}
        for name in rows[0]:
            parts = [self._cast(name, of_run[name]) for of_run in rows]
            if self.reserved:
                parts = [mx.pad(part, pad + [(0, 0)] * (part.ndim - 3)) for part in parts]
            fields[name] = self._flatten(parts)
        self._set(fields, [self.reserved + length for length in lengths])
        for run, length in zip(self.runs, lengths, strict=True):
            run.length = length

    def leave_range(self) -> None:
        """Copy the rows out of a reserved range that does not pay; here there is none."""

    def regroup(self, budgets: Sequence[int]) -> None:
        """Give the heads new budgets and form new runs; a run may then exceed its budget."""
        if not self.fields:
            self.runs = runs_of(budgets)
            return
        rows = [
            {name: view[:, head : head + 1] for name, view in self.views(run).items()}
            for run in self.runs
            for head in range(run.heads)
        ]
        self.runs = runs_of(budgets, [of_head["positions"].shape[2] for of_head in rows])
        self.replace(
            [
                {
                    name: mx.concatenate([r[name] for r in rows[run.first : run.last]], axis=1)
                    for name in self.fields
                }
                for run in self.runs
            ]
        )

    def write(self, name: str, parts: Sequence[mx.array]) -> None:
        """Replace a field's slots in use; `parts` has `[B, heads, length, ...]` for each run."""
        padded = []
        for run, of_run in zip(self.runs, parts, strict=True):
            part = self._cast(name, of_run)
            tail = run.allocated - self.reserved - run.length
            if tail or self.reserved:
                widths = [(0, 0), (0, 0), (self.reserved, tail), *[(0, 0)] * (part.ndim - 3)]
                part = mx.pad(part, widths)
            padded.append(part)
        self.fields[name] = self._flatten(padded)

    def _flatten(self, parts: Sequence[mx.array]) -> mx.array:
        flat = [part.reshape(part.shape[0], -1, *part.shape[3:]) for part in parts]
        return flat[0] if len(flat) == 1 else mx.concatenate(flat, axis=1)

    def _set(self, fields: dict[str, mx.array], allocated: Sequence[int]) -> None:
        self.fields = fields
        start = 0
        for run, slots in zip(self.runs, allocated, strict=True):
            run.start, run.allocated = start, slots
            start += run.heads * slots


#: The most tokens of a conversation whose positions fit into 16 bits.
FEW = 2**15
NARROW, WIDE = mx.int16, mx.int32


def position_dtype(tokens: int) -> mx.Dtype:
    """The dtype in which a store keeps the positions of so many tokens."""
    return NARROW if tokens <= FEW else WIDE
