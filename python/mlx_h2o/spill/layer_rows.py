"""The way of one layer's rows into the file, and back.

Rows come dense from a decode step, or as stored from a chunk. Fewer than `TOGETHER` of them are
held as they came; so many are packed together, by the same function as those in the slots, so that
they are the same bit for bit. A packed row is never unpacked.

A copy of a cache shares the file up to its offset. The first that goes on continues the file; the
others keep what they have and add nothing (`follows` is then false). Nothing that another still
reads is taken out of the file: who takes such tokens back goes on without it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import Pack, Packing
from mlx_h2o.spill.conversation_rows import ConversationRows
from mlx_h2o.spill.layout import Array, LayerForm
from mlx_h2o.spill.parts import bits_of
from mlx_h2o.spill.row_file import WAITING
from mlx_h2o.spill.setting import ENTERED, PASSING, PLAIN, STORED, TOGETHER, Spill

Fields = dict[str, mx.array]
#: The most times that rows may come before the file is made: once for each token of a first chunk
#: that is processed token by token.
MOST_HELD = 2**12


class Pending(NamedTuple):
    """Rows of consecutive positions that are not in the file's care yet.

    Attributes:
        kind: PLAIN, ENTERED, PASSING or STORED.
        length: How many.
        fields: `[1, H, length, ...]` by name; "keys" and "values" unless they are STORED.
    """

    kind: str
    length: int
    fields: Fields

    def part(self, first: int, last: int) -> Pending:
        """Rows first to last - 1."""
        if (first, last) == (0, self.length):
            return self
        cut = {name: rows[:, :, first:last] for name, rows in self.fields.items()}
        return Pending(self.kind, last - first, cut)

    def alone(self) -> Pending:
        """The same rows in arrays of their own: a slice keeps all of its chunk in memory."""
        own = {name: mx.contiguous(rows) for name, rows in self.fields.items()}
        return self._replace(fields=own)


class LayerRows:
    """One layer's rows in a conversation's file.

    Args:
        conversation: The conversation.
        index: The layer's index in its file.
        packing: How its slots store rows.
        frame: Its key scaling, or None.
        pack: The function that packs rows, as the slots'.

    Attributes:
        first: Positions before it were given to the file.
        offset: The next position that may come.
    """

    def __init__(
        self,
        conversation: ConversationRows,
        index: int,
        packing: Packing,
        frame: Frame | None,
        pack: Pack,
    ):
        self.conversation, self.index = conversation, index
        self._packing, self._frame, self._pack = packing, frame, pack
        self.first = self.offset = 0
        self._pending: list[Pending] = []
        self._follows = True
        conversation.reads(self)

    # -- what there is ----------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether new rows are added to the file."""
        return self._follows and not self.conversation.failure

    @property
    def failure(self) -> str:
        """Why new rows are not added to the file, or ""."""
        if self.conversation.failure:
            return self.conversation.failure
        return "" if self._follows else "a copy of this cache continued the file"

    @property
    def available(self) -> int:
        """Positions whose rows `rows` can give: all that came, while all is well."""
        file = self.conversation.file
        in_file = 0 if file is None else min(file.delivered(self.index), self.first)
        return self.offset if self.follows else in_file

    @property
    def waiting(self) -> list[mx.array | Array]:
        """The arrays of the layer's rows that are not in the file yet, here or given to it."""
        file = self.conversation.file
        in_file = [] if file is None else file.waiting(self.index)
        return [*in_file, *self.pending]

    @property
    def pending(self) -> list[mx.array]:
        """The arrays of rows that are not in the file's care yet."""
        return [rows for pending in self._pending for rows in pending.fields.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's rows in memory that are not in the file yet."""
        return sum(int(rows.nbytes) for rows in self.waiting)

    # -- rows come --------------------------------------------------------------------------------

    def take(self, first: int, kind: str, fields: Fields) -> None:
        """Take new rows.

        Args:
            first: The position of the first.
            kind: PLAIN, ENTERED, PASSING or STORED.
            fields: `[1, H, L, ...]` by name: "keys" and "values", or for STORED all of a row's
                fields; further ones are left out.
        """
        if not self.conversation.well() or not self._follows:
            self._pending = []
            return
        batch, _, count, _ = fields["keys"].shape
        if batch > 1:
            self._stop("a cache of several sequences at once has none")
            return
        if first != self.offset:
            self._stop("tokens came before the file was made, or in another order")
            return
        if self.conversation.file is not None:
            self.conversation.file.schedule()
        elif len(self._pending) > MOST_HELD:
            self._stop("some layers got no rows")
            return
        if kind == STORED:
            fields = {name: fields[name] for name in self._names}
        self._pending.append(Pending(kind, count, fields))
        self.offset += count
        if self.conversation.file is None:
            self.conversation.come(self.index, self._form())
        self.give()

    def take_chunk(self, first: int, keys: mx.array, values: mx.array, window: int) -> None:
        """Take new dense rows that go into a recent window.

        Args:
            first: The position of the first.
            keys: `[1, H, L, D]`, after key scaling.
            values: `[1, H, L, Dv]`.
            window: Tokens that the window can hold.
        """
        passing, rows = max(keys.shape[2] - window, 0), {"keys": keys, "values": values}
        if passing:
            passed = {name: array[:, :, :passing] for name, array in rows.items()}
            self.take(first, PASSING, passed)
            rows = {name: array[:, :, passing:] for name, array in rows.items()}
        self.take(first + passing, ENTERED, rows)

    def step_begins(self) -> None:
        """A step begins in this layer."""
        waits = self.offset > 0 and self.conversation.file is None
        if self.index == 0 and waits and self.follows:
            self._stop("some layers got no rows in the first step")

    def _stop(self, why: str) -> None:
        self._pending, self._follows = [], False
        self.conversation.fail(why)

    def give(self) -> None:
        """Give whole packs of `TOGETHER` rows to the file, if it is there."""
        file = self.conversation.file
        count = self.offset // TOGETHER * TOGETHER - self.first
        if file is None or count <= 0:
            return
        if file.delivered(self.index) != self.first:
            self._pending, self._follows = [], False
            return
        first_rows, self._pending = _split(self._pending, count)
        file.append(self.index, self.first, self._packed(first_rows))
        self.first += count
        if count > WAITING and file.complete == self.first:
            self.conversation.evaluate_pending()

    def _packed(self, pending: list[Pending]) -> Fields:
        """The fields of rows as slots store them."""
        stored = [self._stored(kind, fields) for kind, fields in _joined(pending)]
        if len(stored) == 1:
            return stored[0]
        return {name: mx.concatenate([f[name] for f in stored], axis=2) for name in stored[0]}

    def _stored(self, kind: str, fields: Fields) -> Fields:
        """Rows as slots store them, packed as they are when they come or leave the window."""
        if kind == STORED:
            return fields
        packing, recent = self._packing, self._packing.recent
        keys, values = fields["keys"], fields["values"]
        if kind == PLAIN and self._frame is not None:
            keys = self._frame.enter(keys)
        stored: Fields = {}
        for name, dense in (("keys", keys), ("values", values)):
            rows: Any = dense
            if recent is not None and kind != PASSING:
                rows = recent.rows(name, recent.fields(name, dense, self._pack))
            stored |= packing.fields(name, rows, self._pack)
        return stored

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._packing.names("keys"), *self._packing.names("values"))

    def _form(self) -> LayerForm:
        """The form of the rows held."""
        one = self._pending[0].part(0, 1)
        fields = self._stored(one.kind, one.fields)
        heads = fields["keys"].shape[1]
        widths = {
            name: (str(rows.dtype).rpartition(".")[2], rows.shape[-1])
            for name, rows in fields.items()
        }
        return LayerForm.of(heads, widths)

    # -- tokens are taken back --------------------------------------------------------------------

    def trim(self, offset: int) -> None:
        """Forget the rows from a position on."""
        while self._pending and self.offset > offset:
            last = self._pending.pop()
            self.offset -= last.length
            if offset > self.offset:
                self._pending.append(last.part(0, offset - self.offset))
                self.offset = offset
        if offset >= self.first:
            return
        file = self.conversation.file
        self.conversation.digests.truncate(self.index, offset)
        self.first = self.offset = offset
        if file is None or not self._follows:
            return
        if any(other.first > offset for other in self.conversation.others(self)):
            self._follows = False
        else:
            file.truncate(offset)

    # -- rows come back ---------------------------------------------------------------------------

    def rows(self, head: int, positions: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Rows of one KV head, as slots store them.

        Called in the thread of the model.

        Args:
            head: KV head.
            positions: `[M]`, below `available`.

        Returns:
            `[M, width]` by field; bfloat16 as uint16.

        Raises:
            OSError: The file cannot be read.
            ValueError: There is no such row.
        """
        positions = np.asarray(positions, np.int64).reshape(-1)
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.available:
            raise ValueError(f"There are rows of positions 0 to {self.available - 1} only.")
        file = self.conversation.file
        late = positions >= self.first
        if file is not None and not late.any():
            return file.rows(self.index, head, positions)
        pending = self._packed(self._pending)
        rows = {name: np.asarray(bits_of(array))[0, head] for name, array in pending.items()}
        if file is None or late.all():
            return {name: array[positions - self.first] for name, array in rows.items()}
        early = file.rows(self.index, head, positions[~late])
        rows_at = {}
        for name, array in early.items():
            rows_at[name] = np.empty((len(positions), array.shape[1]), array.dtype)
            rows_at[name][~late] = array
            rows_at[name][late] = rows[name][positions[late] - self.first]
        return rows_at

    @property
    def digested(self) -> int:
        """Pages of this layer that have digests."""
        return self.conversation.digests.count(self.index)

    def digest(self, digests: Array) -> None:
        """Keep the digests `[heads, pages]` of the next pages, of the heads that ask.

        Raises:
            OSError: There is no room for them on the disk.
        """
        self.conversation.digests.append(self.index, digests)

    def digests(self, head: int, width: int) -> Iterator[tuple[int, Array]]:
        """The digests of one head's pages, in parts: the first page, and `[pages]`.

        Some may be beyond `available`.

        Args:
            head: The head's place among those that ask.
            width: Width of a key, D.
        """
        return self.conversation.digests.read(self.index, head, width)

    # -- copies -----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerRows:
        """A copy that shares the file up to here; the first that goes on continues it."""
        new = object.__new__(LayerRows)
        vars(new).update(vars(self))
        memo[id(self)] = new
        shared = self.conversation
        new.conversation = memo.get(id(shared)) or copy.deepcopy(shared, memo)
        new._pending = list(self._pending)
        new.conversation.reads(new)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # another process goes on without the file


def spilling(
    spill: Spill, forms: list[tuple[Packing, Frame | None]], pack: Pack
) -> list[LayerRows]:
    """The way into one new file for each layer of a conversation.

    Args:
        spill: Where the file is to be.
        forms: Packing and key scaling of each layer.
        pack: The function that packs rows.
    """
    conversation = ConversationRows(spill, len(forms))
    return [LayerRows(conversation, i, *form, pack) for i, form in enumerate(forms)]


def _split(pending: list[Pending], count: int) -> tuple[list[Pending], list[Pending]]:
    """The first `count` rows, and the others in arrays of their own."""
    front, rest = list[Pending](), list[Pending]()
    for one in pending:
        here = min(one.length, count)
        if here:
            front.append(one.part(0, here))
        if here < one.length:
            rest.append(one.part(here, one.length).alone())
        count -= here
    return front, rest


def _joined(pending: list[Pending]) -> list[tuple[str, Fields]]:
    """Rows of the same kind that follow each other, together."""
    groups: list[tuple[str, list[Fields]]] = []
    for kind, _, fields in pending:
        if groups and groups[-1][0] == kind != STORED:
            groups[-1][1].append(fields)
        else:
            groups.append((kind, [fields]))
    return [(kind, _concatenated(parts)) for kind, parts in groups]


def _concatenated(parts: list[Fields]) -> Fields:
    if len(parts) == 1:
        return parts[0]
    return {n: mx.concatenate([part[n] for part in parts], axis=2) for n in ("keys", "values")}
