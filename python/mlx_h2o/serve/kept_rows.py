"""Conversations in files of rows that a server left, which go on from records of their state.

With a folder for sessions the server keeps its files of rows (`spill/`). Each record of a
conversation's state holds its tokens, its settings and its pins too, so it stands for itself: it is
found by the tokens that a prompt begins with, and it and its rows have one checksum. What has no
such record is continued from the session's own files (`sessions.py`).
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_h2o._utils import checks
from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.conversation import way_into_file
from mlx_h2o.caches.resume import resume, resume_apart, told_by
from mlx_h2o.serve.marks import Mark, mark
from mlx_h2o.serve.sessions import DAY, key_of, token_count, tokens_of
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.setting import SUFFIX, Spill, spill_setting
from mlx_h2o.spill.state_keeping import EVERY
from mlx_h2o.spill.state_record import paths_of
from mlx_h2o.storage.pins import checked_spans

#: Tokens that are rather read again from a record than taken from caches without a file, to which
#: evicted rows do not come back: the older of two records, and rows that were not written yet.
NEAR = 2 * EVERY + 64

# Errors that foreign or damaged files may raise.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, OverflowError, RuntimeError)


@dataclass
class Told:
    """The tokens of a running conversation, for the records of its state.

    Attributes:
        model: The model's name.
        mark: The mark of its settings and requested pins.
        tokens: Its tokens so far; the one who runs it adds to them.
        prompt: How many of them are its prompt's; the others are the answer's.
        ended: Whether they are a whole turn, whose answer has ended.
    """

    model: str
    mark: Mark
    tokens: list[int]
    prompt: int
    ended: bool = False

    def until(self, position: int) -> dict[str, Any] | None:
        """What a record tells of the tokens before a position; None if they are not known yet."""
        if position > len(self.tokens):
            return None
        key = key_of(self.tokens[:position])
        return {
            "model": self.model,
            "label": self.mark.label,
            "pins": self.mark.pins,
            "tokens": base64.b64encode(key).decode(),
            "prompt": min(self.prompt, position),
            "ended": self.ended and position == len(self.tokens),
        }


@dataclass(frozen=True)
class Left:
    """A record of a conversation's state in the folder.

    Attributes:
        path: The file of rows.
        mark: The mark of its settings and requested pins.
        key: The key of its tokens.
        prompt: How many of its tokens were the prompt's.
        newest: The key of the newest record of the same file.
        newest_ended: Whether that is of a turn whose answer has ended.
    """

    path: Path
    mark: Mark
    key: bytes
    prompt: int
    newest: bytes
    newest_ended: bool

    @property
    def is_newest(self) -> bool:
        """Whether no later record of the file exists."""
        return self.key == self.newest

    def goes_on_for(self, key: bytes) -> bool:
        """Whether a prompt goes on in the file from here, in the place of any later record.

        It does if this is the newest record, or if the prompt ends before the newest does and its
        answer had not ended: then its client asks again what was being answered. Otherwise the
        conversation of the newest record may go on.

        Args:
            key: The key of the prompt's tokens.
        """
        return self.is_newest or (self.newest.startswith(key) and not self.newest_ended)


class KeptRows:
    """The files of rows in a folder that no conversation in memory uses.

    Args:
        spill: The folder, whose files are kept.
        model: The model's name: files of other models are ignored.
        most_bytes: The most bytes of all such files of this model, or None.
        most_days: The days for which a file is kept without a new row, or None.
    """

    def __init__(
        self,
        spill: Spill,
        model: str,
        most_bytes: int | None = None,
        most_days: float | None = None,
    ):
        self.spill, self.model = spill, model
        self._most_bytes, self._most_days = most_bytes, most_days
        self._left: dict[Path, list[Left]] = {}
        self._unread = {p for p in spill.folder.glob(f"*{SUFFIX}") if not p.is_symlink()}
        self._look()

    @property
    def left(self) -> list[Left]:
        """All records, those of a file from the newest on."""
        return [left for of_file in self._left.values() for left in of_file]

    def let_go(self, cache: Sequence[Any], own: Mark, key: bytes | None) -> bool:
        """A conversation leaves memory: its file may be gone on with later, from its end.

        Args:
            cache: Its caches.
            own: Their mark.
            key: The key of its tokens; None if no record of these caches is wanted.

        Returns:
            Whether it can be gone on with from its very end.
        """
        rows = way_into_file(cache)
        if rows is None or not rows.follows or rows.conversation.file is None:
            return False
        if any(other.offset >= rows.offset for other in rows.conversation.others(rows)):
            return False  # a running request or a later turn goes on in it
        return self._close(cache, own, key)

    def end(self, left: Sequence[tuple[Sequence[Any], Mark, bytes | None]]) -> None:
        """The server ends, and no request runs: all files can be gone on with, from their ends.

        Args:
            left: The arguments of `let_go` for each conversation, the longest first.
        """
        closed = set[int]()
        for cache, own, key in left:
            rows = way_into_file(cache)
            if rows is not None and rows.follows and id(rows.conversation) not in closed:
                closed.add(id(rows.conversation))
                self._close(cache, own, key)

    def _close(self, cache: Sequence[Any], own: Mark, key: bytes | None) -> bool:
        recorded = key is not None and self.record(cache, own, key)
        rows = way_into_file(cache)
        if rows is None or rows.conversation.file is None:
            return False
        # mlx-lm's loop may still hold the caches, until it gets another request.
        rows.conversation.close()
        self._unread.add(rows.conversation.file.path)
        return recorded

    def record(self, cache: Sequence[Any], own: Mark, key: bytes) -> bool:
        """Record the state of a conversation as it is; whether its file has it now.

        Args:
            cache: Its caches.
            own: Their mark.
            key: The key of its tokens.
        """
        ways = [e.spill for _, e in entries(cache) if isinstance(e, BoundedKVCache)]
        readers = [way for way in ways if way is not None]
        if not readers or token_count(key) != readers[0].offset:
            return False
        before = readers[0].transcript
        prompt = before.prompt if isinstance(before, Told) else token_count(key)
        told = Told(self.model, own, tokens_of(key), prompt, ended=True)
        return readers[0].conversation.record(readers, told)

    def has(self, own: Mark, key: bytes) -> bool:
        """Whether a file that no conversation uses has a record of just these tokens."""
        self._look()
        return any(left.key == key and left.mark == own for left in self.left)

    def _look(self) -> None:
        """Read the records of files that were not read yet."""
        unread = len(self._unread)
        for path in sorted(self._unread):
            try:
                found = told_by(path, self.spill.key)
            except BlockingIOError:
                continue  # still used; looked at again with the next prompt
            except _DAMAGE as error:
                if not isinstance(error, FileNotFoundError):
                    logging.warning("Left aside %s: %s", path.name, error)
                found = []
            self._unread.discard(path)
            self._left.pop(path, None)
            try:
                of_file = [self._of_record(path, *one) for one in found]
                ended = [bool(told.get("ended")) for _, told in found]
            except _DAMAGE as error:
                logging.warning("Left aside %s: %r", path.name, error)
                continue
            own = [one for one in of_file if one is not None]
            if own:
                newest = own[0][1], ended[of_file.index(own[0])]
                self._left[path] = [Left(path, *one, *newest) for one in own]
        if len(self._unread) < unread:
            self._prune()

    def _of_record(
        self, path: Path, position: int, told: dict[str, Any]
    ) -> tuple[Mark, bytes, int] | None:
        """The mark and tokens that a record tells, and how many are the prompt's.

        None if it is of another model.
        """
        if told.get("model") != self.model:
            return None
        key = base64.b64decode(told["tokens"], validate=True)
        if token_count(key) != position or len(key) % 8:
            raise ValueError("a record tells of other tokens than its rows'")
        own = Mark(str(told["label"]), checked_spans("pins", told["pins"]))
        return own, key, checks.whole("prompt", told["prompt"], 0, position)

    def longest_before(self, wanted: Mark, key: bytes) -> Left | None:
        """The longest record that these tokens, with a mark, continue."""
        self._look()
        before = [
            left
            for left in self.left
            if len(left.key) < len(key)
            and key.startswith(left.key)
            and left.mark.serves(wanted, token_count(left.key))
        ]
        return max(before, key=lambda left: len(left.key), default=None)

    def beside(self, left: Left) -> list[Left]:
        """All records of the same file, this one too."""
        return self._left.get(left.path, [])

    def load(self, left: Left, key: bytes) -> list[Any] | None:
        """The caches of a record; None if it cannot be continued.

        They go on in their file, or without one (`Left.goes_on_for`).

        Args:
            left: The record.
            key: The key of the prompt's tokens.
        """
        return self._loaded(left, left.goes_on_for(key))

    def load_apart(self, left: Left) -> list[Any] | None:
        """The caches of a record, without their file; None if it cannot be read."""
        return self._loaded(left, False)

    def _loaded(self, left: Left, goes_on: bool) -> list[Any] | None:
        try:
            position = token_count(left.key)
            if goes_on:
                cache = resume(left.path, self.spill.key, keep=True, position=position)
                self._left.pop(left.path, None)
            else:
                cache = resume_apart(left.path, position, self.spill.key)
        except BlockingIOError:
            return None
        except _DAMAGE as error:
            logging.warning("Cannot continue %s: %s", left.path.name, error)
            self._left.pop(left.path, None)
            return None
        mark(cache, left.mark)
        return cache

    def _prune(self) -> None:
        """Remove files that are too old, then the oldest beyond the bytes."""
        most_bytes, most_days = self._most_bytes, self._most_days
        sizes = {path: _sizes(path) for path in self._left if path.exists()}
        total, now = sum(size for size, _ in sizes.values()), time.time()
        for path, (size, written) in sorted(sizes.items(), key=lambda one: one[1][1]):
            old = most_days is not None and now - written > most_days * DAY
            if old or (most_bytes is not None and total > most_bytes):
                del self._left[path]
                if _removed(path, self.spill.key):
                    logging.warning("Removed the file of rows %s.", path.name)
                    total -= size


def _sizes(path: Path) -> tuple[int, float]:
    """Bytes of a file of rows with its records, and when it was written."""
    stats = [file.stat() for file in (path, *paths_of(path)) if file.exists()]
    return sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats)


def _removed(path: Path, key: bytes | None) -> bool:
    """Remove a file of rows with its records, unless another uses it."""
    try:
        RowFile.open(path, key=key, keep=False).close()
    except (OSError, ValueError):
        return False
    return True


def goes_on_in_file(cache: Sequence[Any]) -> bool:
    """Whether the caches' next rows are added to a file."""
    rows = way_into_file(cache)
    return rows is not None and rows.follows


def tell(cache: Sequence[Any], told: Told) -> None:
    """Let the records of a conversation's state hold its tokens."""
    rows = way_into_file(cache)
    if rows is not None:
        rows.transcript = told


def told_of(cache: Sequence[Any]) -> Told | None:
    """The tokens that records of these caches hold, if their owner tells them."""
    rows = way_into_file(cache)
    transcript = rows.transcript if rows is not None else None
    return transcript if isinstance(transcript, Told) else None


def kept(settings: dict[str, Any]) -> tuple[dict[str, Any], Spill | None]:
    """A server's settings of caches, whose files of rows are kept, and where; None: there are none.

    Args:
        settings: As `ModelSettings.of` takes them.
    """
    spill = spill_setting(settings.get("spill"))
    if spill is None:
        return settings, None
    spill = Spill(spill.folder, True, spill.key, spill.returns)
    return {**settings, "spill": spill}, spill
