"""The file behind all layers of one conversation, made when every layer's form is known.

A conversation goes on without its file if anything goes wrong with it: one warning, and `failure`
tells why.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Protocol

import mlx.core as mx

from mlx_h2o.spill.layout import LayerForm
from mlx_h2o.spill.page_digests import PageDigests
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.setting import Spill


class Reader(Protocol):
    """One that reads or writes a layer's rows (`layer_rows.LayerRows`).

    Attributes:
        index: The layer.
        first: Positions before it are in the file's care, and may be read.
        offset: The next position that may come.
    """

    index: int
    first: int
    offset: int

    @property
    def follows(self) -> bool:
        """Whether its new rows are added to the file."""

    @property
    def pending(self) -> list[mx.array]:
        """The arrays of rows that are not in the file's care yet."""

    def give(self) -> None:
        """Give rows that came before the file was made to it."""


class SpillStopped(UserWarning):
    """A conversation has no file of its rows, or no more; it goes on without."""


class ConversationRows:
    """The rows of one conversation's layers, in a file.

    Args:
        spill: Where the file is to be.
        layers: How many layers there are.

    Attributes:
        file: The file; None before the first rows of all layers, or if it could not be made.
        digests: The digests of its pages.
    """

    def __init__(self, spill: Spill, layers: int):
        self.spill = spill
        self.file: RowFile | None = None
        self.digests = PageDigests(spill.folder)
        self._failure = ""
        self._warned = False
        self._forms: list[LayerForm | None] = [None] * layers
        # Those that read or write each layer's rows: a cache and its copies.
        self._readers: list[weakref.WeakSet[Reader]] = [weakref.WeakSet() for _ in range(layers)]

    @property
    def failure(self) -> str:
        """Why there is no file, or why it gets no more rows; "" while all is well."""
        return self._failure or (self.file.failure if self.file is not None else "")

    def reads(self, reader: Reader) -> None:
        """Note one that reads or writes a layer's rows, for as long as it lives."""
        self._readers[reader.index].add(reader)

    def others(self, reader: Reader) -> list[Reader]:
        """All others of the same layer."""
        return [other for other in self._readers[reader.index] if other is not reader]

    def come(self, index: int, form: LayerForm) -> None:
        """A layer's rows have this form; the file is made when all layers' are known."""
        self._forms[index] = form
        forms = [form for form in self._forms if form is not None]
        if len(forms) < len(self._forms) or self.file is not None or self.failure:
            return
        try:
            self.file = RowFile(self.spill.folder, forms)
        except OSError as error:
            self.fail(f"no file can be made in {self.spill.folder}: {error}")
            return
        for readers in self._readers:
            following = [reader for reader in readers if reader.follows]
            if len(following) == 1:  # of copies the first that goes on continues the file
                following[0].give()

    def evaluate_pending(self) -> None:
        """Evaluate the rows that wait to be packed: their chunk may go from memory then."""
        mx.eval([reader.pending for readers in self._readers for reader in readers])

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
        in_use = any(form is not None for form in self._forms) or bool(self._failure)
        new = self if in_use else ConversationRows(self.spill, len(self._forms))
        memo[id(self)] = new
        return new
