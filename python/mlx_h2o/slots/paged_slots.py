"""Slots that stay where they are: a store whose fields lie in a reserved range.

Every head's slots begin at a fixed place with room for the largest budget, so nothing moves while
heads grow and shrink, and the pages that no slot uses take no memory
(`slots/reserved_range.py`). Where a range does not pay or cannot be had, this is a `SlotStore`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_h2o.slots import reserved_range
from mlx_h2o.slots.slot_store import Fields, SlotStore, runs_of


class PagedSlotStore(SlotStore):
    """Slots in a reserved range; arguments as for `SlotStore`."""

    def __init__(self, budgets: Sequence[int], reserved: int = 0):
        super().__init__(budgets, reserved)
        self._tries_range = True  # False once no range could be had
        self._stride = 0  # slots that each head has in the range, or 0 outside of one

    def nbytes_of(self, name: str) -> int:
        """Bytes of the pages that a field uses."""
        if not self._stride:
            return super().nbytes_of(name)
        batch, row = self._sizes_now()[name]
        used = [
            (run.start + head * run.allocated, self.reserved + run.length)
            for run in self.runs
            for head in range(run.heads)
        ]
        slots = sum(run.heads * run.allocated for run in self.runs)
        return reserved_range.bytes_taken(row, slots, batch, used)

    def _grow(self, room: Sequence[int], like: Fields) -> None:
        if not self._enter_range(like):
            super()._grow(room, like)

    def _enter_range(self, like: Fields) -> bool:
        """Move what is held into a range with room for all budgets; False where that cannot be."""
        if self.fields and (self._stride or self.reserved):
            return False
        views = [self.views(run) for run in self.runs] if self.fields else None
        if not self._open_range(like, max(run.budget for run in self.runs)):
            return False
        if views:
            self._put_all(views)
        return True

    def _open_range(self, like: Fields, slots: int) -> bool:
        """Lay out zeros in a new range, where one is wanted, pays and can be had.

        Args:
            like: Rows `[B, heads, M, ...]` by field, whose widths and dtypes the fields take.
            slots: The slots that each head needs, without the reserved ones.
        """
        slots += self.reserved
        if not self._tries_range or not pays(like, slots):
            return False
        if self.heads * slots > reserved_range.MOST_SLOTS:
            return False
        shapes: dict[str, tuple[Sequence[int], mx.Dtype]] = {}
        for name, rows in like.items():
            dtype = self._position_dtype if name == "positions" else rows.dtype
            shapes[name] = (rows.shape[0], self.heads * slots, *rows.shape[3:]), dtype
        fields = reserved_range.zeros(shapes)
        if fields is None:
            self._tries_range = False
            return False
        self.fields, self._stride = fields, slots
        self._place()
        return True

    def _place(self) -> None:
        """Let every run begin where its first head's slots in the range do."""
        for run in self.runs:
            run.start, run.allocated = run.first * self._stride, self._stride

    def _put_all(self, rows: Sequence[Fields], after: Sequence[mx.array] = ()) -> None:
        """Overwrite all slots; memory that is not used then is given back."""
        index, unused = [], []
        for run, of_run in zip(self.runs, rows, strict=True):
            length = next(iter(of_run.values())).shape[2]
            slots = mx.broadcast_to(mx.arange(length, dtype=mx.int32), (run.heads, length))
            index.append(self.flat_index(run, slots).reshape(1, -1))
            first = self.reserved + length
            starts = range(run.start, run.start + run.heads * self._stride, self._stride)
            unused += [(start + first, start + self._stride) for start in starts]
        flat = {name: self._flatten([of_run[name] for of_run in rows]) for name in rows[0]}
        at = mx.concatenate(index, axis=1)
        if after:
            at = mx.depends(at, after)
        self.fields |= reserved_range.put_rows(self.fields, at, flat, unused)

    def fit_positions(self, tokens: int) -> None:
        """Make positions as wide as so many tokens need."""
        if not self._stride or not self.fields:
            super().fit_positions(tokens)
            return
        rows = [self.view(run, "positions") for run in self.runs]
        super().fit_positions(tokens)
        positions = self.fields["positions"]
        zeros = reserved_range.zeros({"positions": (positions.shape, positions.dtype)})
        if zeros is not None:
            self.fields |= zeros
            self.write("positions", rows)

    def put(self, index: mx.array, rows: Fields) -> None:
        """Overwrite slots; as in `SlotStore`."""
        if not self._stride:
            super().put(index, rows)
            return
        self.fields |= reserved_range.put_rows(self.fields, index, rows)

    def replace(self, rows: Sequence[Fields], after: Sequence[mx.array] = ()) -> None:
        """Replace all slots.

        Args:
            rows: Each run's new rows by field, `[B, heads, length, ...]`.
            after: What reads the present slots. It is evaluated before they are overwritten, since
                with a read still to come all of them would be copied.
        """
        lengths = [next(iter(of_run.values())).shape[2] for of_run in rows]
        slots = max(max(lengths), *(run.budget for run in self.runs))
        if self._stride < self.reserved + slots and not self._open_range(rows[0], slots):
            self._stride = 0
            super().replace(rows, after)
            return
        self._place()
        self._put_all(rows, after)
        for run, length in zip(self.runs, lengths, strict=True):
            run.length = length

    def regroup(self, budgets: Sequence[int]) -> None:
        """Give the heads new budgets and form new runs; a run may then exceed its budget."""
        lengths = [run.length for run in self.runs for _ in range(run.heads)]
        if self.fields and self._stride >= self.reserved + max(*budgets, *lengths):
            self.runs = runs_of(budgets, lengths)
            self._place()
            return
        super().regroup(budgets)

    def leave_range(self) -> None:
        """Copy the rows out of a range that does not pay for the present budgets."""
        rows = [self.views(run) for run in self.runs]
        slots = self.reserved + max(run.budget for run in self.runs)
        if self._stride and not pays(rows[0], slots):
            self._stride = 0
            super().replace(rows)

    def write(self, name: str, parts: Sequence[mx.array]) -> None:
        """Replace a field's slots in use; `parts` has `[B, heads, length, ...]` for each run."""
        if not self._stride:
            super().write(name, parts)
            return
        index = [self.next_index(replace(run, length=0), run.length) for run in self.runs]
        flat = mx.concatenate([of_run.reshape(1, -1) for of_run in index], axis=1)
        rows = {name: self._flatten(parts)}
        self.fields |= reserved_range.put_rows(self.fields, flat, rows)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copy's state; a pickle's arrays come back outside of any range."""
        vars(self).update(state)
        if self._stride and any(reserved_range.is_elsewhere(f) for f in self.fields.values()):
            self._stride, self._tries_range = 0, False


def pays(like: Fields, slots: int) -> bool:
    """Whether a range pays for so many slots of each head, with rows as these."""
    keys = like["keys"]
    row: int = keys.itemsize * math.prod(keys.shape[3:])
    return slots * row >= reserved_range.FEWEST_BYTES
