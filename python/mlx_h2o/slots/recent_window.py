"""The recent window: a layer's newest tokens, stored in more or fewer bits than the others.

They lie in a ring of the same size for all heads: the tokens that every head of the layer protects.
None of them can be a victim, so the ring needs no positions and no choice; when a new token comes,
the oldest one moves to the slots.

A token is quantized once, from full precision: on arrival if the window is packed, on leaving if it
holds the model's own dtype. A token that leaves a packed window keeps its levels
(`PackedRows.with_bits`): wider slots store it exactly, so that no precision comes back; narrower
slots store it without its lowest bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from mlx_h2o.slots.packed import JoinedRows, Pack, PackedRows, Packing, Rows, value_lengths
from mlx_h2o.slots.slot_store import GROWTH_STEP


class RecentStep(NamedTuple):
    """The effect of one new token on the window.

    Attributes:
        slot: The slot of its row.
        length: Tokens held, with the new one.
        leaving: Whether the oldest token, which had that slot, moves to the slots.
    """

    slot: int
    length: int
    leaving: bool


class RecentWindow:
    """A ring of the newest tokens of H KV heads.

    Attributes:
        size: Tokens it can hold.
        length: Tokens it holds.
        oldest: The slot of the oldest token; the others follow, around the end.
        fields: `[B, H, size, ...]` by name: keys, values and their scales and biases, scores if the
            policy accumulates any, lengths of values if it uses them.
    """

    def __init__(
        self,
        size: int,
        packing: Packing,
        scored: bool,
        measured: bool,
        pack: Pack = PackedRows.of,
    ):
        recent = packing.recent
        assert recent is not None
        self.size = size
        self.length = self.oldest = self._lent_rows = 0
        self.fields: dict[str, mx.array] = {}
        self._packing, self._recent, self._pack = packing, recent, pack
        self._scored, self._measured = scored, measured

    @property
    def full(self) -> bool:
        """Whether the next token pushes the oldest one out."""
        return self.length == self.size

    def config(self) -> dict[str, Any]:
        """The window's numbers, as JSON types."""
        return {"size": self.size, "length": self.length, "oldest": self.oldest}

    def push(self, keys: mx.array, values: mx.array, offset: int) -> dict[str, mx.array] | None:
        """Append new rows.

        Args:
            keys: `[B, H, L, D]`.
            values: `[B, H, L, Dv]`.
            offset: The logical position of the first one.

        Returns:
            The rows that leave the window, oldest first, as the slots store them: `[B, H, M, ...]`
            by field, with positions, scores and lengths of values; None if no row leaves.
        """
        L = keys.shape[2]
        leaving = max(self.length + L - self.size, 0)
        first_leaving = offset - self.length
        new = {"keys": keys, "values": values}
        # New rows that leave at once, because even newer ones came with them.
        passing = max(L - self.size, 0)
        parts = []
        if leaving > passing:
            parts.append(self._left(self._oldest_first(leaving - passing)))
        if passing:
            parts.append(
                self._packed(self._packing, {n: r[:, :, :passing] for n, r in new.items()})
            )
        rows = self._packed(self._recent, {n: r[:, :, passing:] for n, r in new.items()})
        if L == 1 and self.full:
            self._put(self.oldest, rows)
            self.oldest = (self.oldest + 1) % self.size
        else:
            self._replace(leaving - passing, rows)
        if not parts:
            return None
        leaving_rows = {
            name: part if len(parts) == 1 else mx.concatenate([p[name] for p in parts], axis=2)
            for name, part in parts[0].items()
        }
        return _placed(leaving_rows, first_leaving)

    def advance(self) -> RecentStep:
        """Make room for one token, whose row a decoder writes."""
        if self.full:
            slot, self.oldest = self.oldest, (self.oldest + 1) % self.size
            return RecentStep(slot, self.size, True)
        self.length += 1
        return RecentStep(self.length - 1, self.length, False)

    def needs_room(self, count: int) -> bool:
        """Whether so many tokens more need new memory."""
        return self._allocated() < min(self.length + count, self.size)

    def lend(self, count: int) -> dict[str, mx.array]:
        """Give the fields away, with memory for so many tokens more."""
        self._reserve(self._rows_for(min(self.length + count, self.size)))
        self._lent_rows = self._allocated()
        fields, self.fields = self.fields, {}
        return fields

    def get_back(self, fields: dict[str, mx.array]) -> None:
        """Take the fields back; their tokens may have changed."""
        self.fields = fields

    def _allocated(self) -> int:
        """Rows that memory is allocated for."""
        return next(iter(self.fields.values())).shape[2] if self.fields else self._lent_rows

    def _rows_for(self, tokens: int) -> int:
        """Rows to allocate for so many tokens: in steps, as the slots grow."""
        return min(-(-tokens // GROWTH_STEP) * GROWTH_STEP, self.size)

    def _reserve(self, rows: int) -> None:
        for name, field in self.fields.items():
            if (missing := rows - field.shape[2]) > 0:
                widths = [(0, 0), (0, 0), (0, missing), *[(0, 0)] * (field.ndim - 3)]
                self.fields[name] = mx.pad(field, widths)

    def views(self, first: int, last: int, offset: int) -> dict[str, mx.array]:
        """The fields of heads first to last - 1, oldest first, with positions.

        Args:
            first: First KV head.
            last: One past the last KV head.
            offset: The next logical position.
        """
        views = {name: field[:, first:last] for name, field in self._oldest_first().items()}
        positions = mx.arange(offset - self.length, offset, dtype=mx.int32)
        shape = (*views["keys"].shape[:2], self.length)
        return {**views, "positions": mx.broadcast_to(positions, shape)}

    def rows(self, name: str, slots: Rows, views: dict[str, mx.array]) -> JoinedRows:
        """Keys or values of all slots: those of the slots proper, then those of the window.

        Args:
            name: "keys" or "values".
            slots: The rows of the slots proper.
            views: The fields of the window, by name.
        """
        return JoinedRows((slots, self._recent.rows(name, views)))

    def write_scores(self, scores: mx.array) -> None:
        """New scores `[B, H, length]`, oldest first."""
        unused = self.fields["scores"][..., self.length :]
        around = mx.roll(scores, self.oldest, 2)
        self.fields["scores"] = mx.concatenate([around, unused], axis=2)

    def trim(self, n: int) -> int:
        """Forget the newest n tokens, or all if there are fewer; return how many were forgotten."""
        n = min(n, self.length)
        if n:
            self.fields, self.oldest = self._oldest_first(self.length - n), 0
            self.length -= n
        return n

    def next_overwritten(self) -> dict[str, mx.array]:
        """What the next token changes: a row `[B, H, ...]` per field if it is full; all scores."""
        changed = {name: field for name, field in self.fields.items() if name == "scores"}
        if self.full:
            at = mx.array(self.oldest)
            # Copied: a view would keep the whole ring.
            changed |= {n: mx.take(f, at, 2) for n, f in self.fields.items() if n not in changed}
        return changed

    def return_to(self, length: int, oldest: int) -> None:
        """Hold as many tokens as before some steps, from the same slot on."""
        self.length, self.oldest = length, oldest

    def put_back(self, oldest: int, changed: dict[str, mx.array]) -> None:
        """Restore the arrays that one token changed.

        Args:
            oldest: The slot of the oldest token before it.
            changed: The result of `next_overwritten` before it.
        """
        for name, before in changed.items():
            if name == "scores":
                unused = self.fields[name][..., before.shape[2] :]
                self.fields[name] = mx.concatenate([before, unused], axis=2)
            else:
                self._put(oldest, {name: before[:, :, None]})

    def resize(self, size: int, offset: int) -> dict[str, mx.array] | None:
        """Change how many tokens it can hold; return the rows that leave, as `push` does."""
        first, leaving = offset - self.length, max(self.length - size, 0)
        leaving_rows = self._left(self._oldest_first(leaving)) if leaving else None
        # Copied: a slice would keep the whole former ring in memory.
        newest = {
            name: mx.contiguous(field[:, :, leaving:])
            for name, field in self._oldest_first().items()
        }
        self.fields, self.oldest = newest, 0
        self.size, self.length = size, self.length - leaving
        return None if leaving_rows is None else _placed(leaving_rows, first)

    def _oldest_first(self, count: int | None = None) -> dict[str, mx.array]:
        """The oldest `count` tokens, or all."""
        count = self.length if count is None else count
        end = self.oldest + count
        if end <= self.length:
            return {name: field[:, :, self.oldest : end] for name, field in self.fields.items()}
        return {
            name: mx.concatenate(
                [field[:, :, self.oldest : self.length], field[:, :, : end - self.length]], axis=2
            )
            for name, field in self.fields.items()
        }

    def _packed(self, packing: Packing, rows: dict[str, Any]) -> dict[str, mx.array]:
        fields: dict[str, mx.array] = {}
        for name in ("keys", "values"):
            fields |= packing.fields(name, rows[name], self._pack)
        if self._scored:
            B, H, L = rows["keys"].shape[:3]
            fields["scores"] = rows.get("scores", mx.zeros((B, H, L)))
        if self._measured:
            lengths = rows.get("value_lengths")
            fields["value_lengths"] = value_lengths(rows["values"]) if lengths is None else lengths
        return fields

    def _left(self, fields: dict[str, mx.array]) -> dict[str, mx.array]:
        """Rows of the window as the slots store them."""
        rows: dict[str, Any] = {n: self._recent.rows(n, fields) for n in ("keys", "values")}
        for name in ("scores", "value_lengths"):
            if name in fields:
                rows[name] = fields[name]
        return self._packed(self._packing, rows)

    def _put(self, slot: int, rows: dict[str, mx.array]) -> None:
        """Overwrite one slot of every head."""
        start = mx.array([slot])
        for name, row in rows.items():
            self.fields[name] = mx.slice_update(self.fields[name], row, start, [2])

    def _replace(self, leaving: int, rows: dict[str, mx.array]) -> None:
        """Drop the oldest rows and append new ones; unused slots come last."""
        staying = self.length - leaving
        old = {}
        if staying:
            ordered = self._oldest_first()
            old = {name: field[:, :, leaving:] for name, field in ordered.items()}
        length = staying + next(iter(rows.values())).shape[2]
        for name, row in rows.items():
            more = self._rows_for(length) - length
            unused = mx.zeros((*row.shape[:2], more, *row.shape[3:]), row.dtype)
            parts = [*([old[name]] if old else []), row, *([unused] if unused.size else [])]
            self.fields[name] = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        self.length, self.oldest = length, 0


def _placed(rows: dict[str, mx.array], first: int) -> dict[str, mx.array]:
    """Rows `[B, H, M, ...]` by field, with consecutive positions from `first` on."""
    shape = rows["keys"].shape[:3]
    positions = mx.arange(first, first + shape[2], dtype=mx.int32)
    return {**rows, "positions": mx.broadcast_to(positions, shape)}
