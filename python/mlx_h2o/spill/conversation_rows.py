"""The file behind all layers of one conversation, made when every layer's form is known.

A conversation goes on without its file if anything goes wrong with it: one warning, and `failure`
tells why.
"""

from __future__ import annotations

import secrets
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import mlx.core as mx

from mlx_h2o.spill.layout import LayerForm
from mlx_h2o.spill.page_digests import PageDigests
from mlx_h2o.spill.parts import Array
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.setting import SUFFIX, Spill, remove_ownerless_once
from mlx_h2o.spill.state_keeping import Keeper, StateKeeping, Transcript


class Reader(Protocol):
    """One that reads or writes a layer's rows (`layer_rows.LayerRows`).

    Attributes:
        index: The layer.
        first: Positions before it are in the file's care, and may be read.
        offset: The next position that may come.
        keeper: A weak reference to the cache whose rows these are.
        transcript: The owner of the conversation, who knows its tokens, if there is one.
    """

    index: int
    first: int
    offset: int
    keeper: Callable[[], Keeper | None]
    transcript: Transcript | None

    @property
    def follows(self) -> bool:
        """Whether its new rows are added to the file."""

    @property
    def held(self) -> list[mx.array]:
        """The arrays of rows that are not in the file's care yet."""

    def give(self) -> None:
        """Give rows that came before the file was made to it."""

    def since(self, first: int) -> dict[str, Array]:
        """The rows of all heads from a position on, `[1, H, M, width]` by field."""


class SpillStopped(UserWarning):
    """A conversation has no file of its rows, or no more; it goes on without."""


#: All conversations with a file, for a process that ends without its interpreter's leave.
_OPEN: weakref.WeakSet[ConversationRows] = weakref.WeakSet()


def close_all() -> None:
    """Close all files: those that are not kept are removed."""
    for rows in list(_OPEN):
        rows.close()


class ConversationRows:
    """The rows of one conversation's layers, in a file.

    Args:
        spill: Where the file is to be.
        layers: How many layers there are.

    Attributes:
        file: The file; None before the first rows of all layers, or if it could not be made.
        digests: The digests of its pages.
        failure: Why there is no file, or why it holds no more rows; "" while all is well.
    """

    def __init__(self, spill: Spill, layers: int):
        self.spill, self.layers = spill, layers
        self.file: RowFile | None = None
        # Digests of sealed keys must not lie on disk in the open.
        self.digests = PageDigests(None if spill.key else spill.folder)
        self._failure = ""
        self._warned = False
        #: Whether the layers are all caches of the conversation, so that its state can be recorded.
        self.is_whole = False
        self._keeping: StateKeeping | None = None
        self._forms: list[LayerForm | None] = [None] * layers
        # Those that read or write each layer's rows: a cache and its copies.
        self._readers: list[weakref.WeakSet[Reader]] = [weakref.WeakSet() for _ in range(layers)]

    @classmethod
    def over(cls, file: RowFile, spill: Spill, position: int, turn: int) -> Self:
        """The rows of a conversation that goes on from a record of its state.

        Args:
            file: Its file, open for writing.
            spill: Where the file is.
            position: The record's position.
            turn: The place that gets the next record, 0 or 1.
        """
        rows = cls(spill, len(file.forms))
        rows._forms, rows.is_whole = list(file.forms), True
        rows._own(file)
        if file.keep:
            rows._keeping = StateKeeping(file, position, turn)
        return rows

    def _own(self, file: RowFile) -> None:
        self.file = file
        self._finalizer = weakref.finalize(self, file.close)
        _OPEN.add(self)
        if file.keep:
            self._keeping = StateKeeping(file)

    def step_begins(self, position: int) -> None:
        """The first layer gets rows next; record the state if it is time to."""
        if self._keeping is None or not self.is_whole or not self._keeping.due(position):
            return
        caches, transcript = [], None
        for readers in self._readers:
            for reader in readers:
                if reader.follows and reader.offset == position:
                    cache = reader.keeper()
                    if cache is not None and cache.offset == position:
                        caches.append(cache)
                        transcript = reader.transcript or transcript
        if len(caches) == self.layers:  # no copies that might differ
            self._keeping.make(position, caches, transcript)

    def record(self, readers: Sequence[Reader], transcript: Transcript | None = None) -> bool:
        """Record the state as it is now, and wait until it is written.

        Called in the thread of the model, between two steps.

        Args:
            readers: Those of the caches whose state it is, of all layers in their order.
            transcript: What the record tells of the tokens.

        Returns:
            Whether it is written. It is not where the file is not kept or has failed, or where the
            caches are not all of the conversation, at one position.
        """
        caches = [cache for reader in readers if (cache := reader.keeper()) is not None]
        offsets = {one.offset for one in readers} | {cache.offset for cache in caches}
        own = all(reader in self._readers[reader.index] for reader in readers)
        if not own or not self.is_whole or len(caches) != self.layers or len(offsets) != 1:
            return False
        if self._keeping is None or not self.well() or not all(one.follows for one in readers):
            return False
        try:
            return self._keeping.record(offsets.pop(), caches, readers, transcript)
        except (OSError, ValueError) as error:
            self.fail(f"a record of the state could not be written: {error}")
            return False

    def state_changed(self) -> None:
        """The caches were changed between two tokens: no record of their state holds any longer."""
        if self._keeping is not None:
            self._keeping.forget_all()

    def taken_back(self, position: int) -> None:
        """Tokens from a position on were taken back."""
        if self._keeping is not None:
            self._keeping.forget(position)

    def close(self) -> None:
        """Close the file; rows that come then are not written."""
        if self.file is not None:
            self._finalizer()

    @property
    def failure(self) -> str:
        return self._failure or (self.file.failure if self.file is not None else "")

    @property
    def begun(self) -> bool:
        """Whether rows came, so that copies of the caches share them."""
        return any(form is not None for form in self._forms) or bool(self._failure)

    def reads(self, reader: Reader) -> None:
        """Note one that reads or writes a layer's rows, for as long as it lives."""
        self._readers[reader.index].add(reader)

    def others(self, reader: Reader) -> list[Reader]:
        """All others of the same layer."""
        return [other for other in self._readers[reader.index] if other is not reader]

    def come(self, index: int, form: LayerForm) -> None:
        """A layer's rows have this form; the file is made when all layers' are known."""
        self._forms[index] = form
        if all(self._forms) and self.file is None and not self.failure:
            self._make()
            for readers in self._readers:
                following = [reader for reader in readers if reader.follows]
                if len(following) == 1:  # of copies the first that goes on continues the file
                    following[0].give()

    def evaluate_held(self) -> None:
        """Evaluate the rows that wait to be packed: their chunk may go from memory then."""
        mx.eval([reader.held for readers in self._readers for reader in readers])

    def _make(self) -> None:
        spill = self.spill
        path = spill.folder / f"{secrets.token_hex(12)}{SUFFIX}"
        forms = [form for form in self._forms if form is not None]
        try:
            remove_ownerless_once(spill.folder)
            self._own(RowFile.create(path, forms, key=spill.key, keep=spill.keep))
        except (OSError, ValueError, ImportError) as error:
            self.fail(f"no file can be made in {spill.folder}: {error}")

    def fail(self, why: str) -> None:
        """Go on without the file."""
        self._failure = self.failure or why
        if self.file is not None:
            self.file.fail(why)
        self.well()

    def well(self) -> bool:
        """Whether nothing has failed; the first failure is told once, in the caller's thread."""
        if self.failure and not self._warned:
            self._warned = True
            if self.file is not None:
                self.file.forget_waiting()
            warnings.warn(
                f"The conversation goes on without a file of its rows: {self.failure}.",
                SpillStopped,
                stacklevel=2,
            )
        return not self.failure

    def __deepcopy__(self, memo: dict[int, Any]) -> ConversationRows:
        """Copies share the rows that came; before any came, each gets a file of its own."""
        new = self if self.begun else ConversationRows(self.spill, self.layers)
        new.is_whole = self.is_whole
        memo[id(self)] = new
        return new
