"""The one store of conversations: caches that no request uses now, found by the prompt's tokens.

Caches that have evicted tokens serve only their own continuation, except for the last steps that
can be undone; the pins with which they were read must be the prompt's pins, no more and no less.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.conversation import bounded_entries, bounded_members
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.models.resize import resize
from mlx_h2o.serve.keys import Place, common_tokens, key_of, token_count, tokens_of
from mlx_h2o.serve.sessions import Sessions, Turn

#: What caches end with: a shared system prompt, a prompt, or an answer.
KINDS = ("system", "prompt", "turn")
#: The part of its bytes that an idle conversation keeps when it shrinks.
SHRUNK = 0.5
#: The most answers by whose names one conversation is found.
MAX_TURNS = 16
#: The most characters and bytes of texts and tokens that are remembered.
MAX_TEXTS = 64 << 20
#: The most conversations that one prompt may continue.
MAX_SPELLINGS = 4
#: The most entries where there is no bound for their bytes.
MAX_ENTRIES = 32


@dataclass(eq=False)
class Conversation:
    """Caches that no request uses now.

    Attributes:
        place: Their settings, pins and tokens.
        cache: The caches, one for each layer.
        kind: One of KINDS.
        pieces: Their bytes by array identity (`BoundedKVCache.pieces`).
        used: The order of last use: a larger number is later.
        passed: Whether a longer conversation has gone on from it.
        shrunk: Whether it was made smaller.
        turns: The answers that ended here: several, if clients got the same one.
    """

    place: Place
    cache: list[Any]
    kind: str
    pieces: dict[int, int]
    used: int
    passed: bool = False
    shrunk: bool = False
    turns: tuple[Turn, ...] = ()

    @property
    def count(self) -> int:
        """The number of its tokens."""
        return token_count(self.place.key)

    @property
    def nbytes(self) -> int:
        """The bytes of its caches."""
        return sum(self.pieces.values())

    @property
    def evicted(self) -> bool:
        """Whether any layer has evicted a token."""
        return any(entry.evicted for entry in bounded_members(self.cache))

    @property
    def is_snapshot(self) -> bool:
        """Whether only a repeated question would need it.

        A prompt is needed until its answer is kept: the next turn may have to go on from it.
        """
        return self.passed and self.kind != "system"


class Conversations:
    """All idle caches; for the thread that generates.

    Args:
        left: Returns the most bytes that all of them may take now; None means no bound.
        awaits: Whether an answer is being generated from the end of a prompt. Its own caches may
            read more than its text says; then the conversation goes on from the prompt's.

    Attributes:
        sessions: The folder of saved conversations, or None.
        shrunk: How often a conversation shrank.
        forgotten: How many entries left memory.
    """

    def __init__(
        self, left: Callable[[], int | None], awaits: Callable[[Place], bool] = lambda _: False
    ):
        self._left, self._awaits = left, awaits
        self.sessions: Sessions | None = None
        self.shrunk = self.forgotten = 0
        self._entries: dict[Place, Conversation] = {}
        # Models, texts of conversations, and the keys of their tokens; the last used at the end.
        self._texts: OrderedDict[tuple[str, str, bytes], None] = OrderedDict()
        self._text_size = self._clock = 0

    def add_model(self, name: str, fingerprint: str) -> None:
        """Go on from the saved conversations of a model, if there is a folder."""
        for note in self.sessions.add_model(name, fingerprint) if self.sessions else ():
            self._remember(note.place, note.turn.texts)

    def clear(self) -> None:
        """Forget everything in memory: caches, and the tokens of texts."""
        self._entries.clear()
        self._texts.clear()
        self._text_size = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Conversation]:
        """All entries, the last used at the end."""
        return sorted(self._entries.values(), key=lambda entry: entry.used)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries; arrays that several share count once."""
        together: dict[int, int] = {}
        for entry in list(self._entries.values()):
            together |= entry.pieces
        return sum(together.values())

    # -- texts ------------------------------------------------------------------------------------

    def _remember(self, place: Place, texts: Sequence[tuple[str, int]]) -> None:
        for text, count in texts:
            own = place.mark.model, text, key_of(tokens_of(place.key)[:count])
            self._text_size += 0 if own in self._texts else len(text) + len(own[2])
            self._texts[own] = None
            self._texts.move_to_end(own)
        while self._text_size > MAX_TEXTS:
            _, text, key = self._texts.popitem(last=False)[0]
            self._text_size -= len(text) + len(key)

    def spellings(self, model: str, text: str) -> list[tuple[int, bytes]]:
        """A model's conversations that a text begins with: their characters, and their tokens' key.

        A model's tokens are seldom those into which its text is tokenized, and a client sends back
        text. The longest come first, and among those with the same text the last used.
        """
        matches = [
            (len(own), key)
            for of, own, key in reversed(self._texts)
            if of == model and text.startswith(own)
        ]
        return sorted(matches, key=lambda match: -match[0])[:MAX_SPELLINGS]

    # -- finding ----------------------------------------------------------------------------------

    def prefix_length(self, wanted: Place) -> int:
        """The number of a prompt's tokens that some caches have read."""
        entry = self._longest_before(wanted)
        saved = self.sessions.longest_before(wanted) if self.sessions is not None else None
        return max(entry.count if entry else 0, saved[1] if saved else 0)

    def take(self, wanted: Place, empty: Sequence[Any]) -> tuple[list[Any], int]:
        """Caches that have read most of a prompt, for the caller, and the number of its tokens.

        At least the prompt's last token is left to read, since generation begins from it.

        Args:
            wanted: The prompt's settings, pins and tokens.
            empty: Empty caches with its settings and pins.
        """
        try:
            return self._taken(wanted, empty)
        except Exception:
            # If the entry is faulty, the prompt itself can still be read.
            logging.exception("An idle conversation cannot be continued")
            return copy.deepcopy(list(empty)), 0

    def _taken(self, wanted: Place, empty: Sequence[Any]) -> tuple[list[Any], int]:
        entry = self._longest_before(wanted)
        count = entry.count if entry else 0
        undone = self._undone(wanted, count)
        if undone is not None:
            return undone
        saved = self.sessions.longest_before(wanted) if self.sessions is not None else None
        # A shrunk conversation's file still has everything from before.
        least = count if entry is not None and entry.shrunk else count + 1
        if self.sessions is not None and saved is not None and saved[1] >= least:
            cache = self.sessions.load(saved[0])
            if cache is not None:
                return cache, saved[1]
        if entry is None:
            return copy.deepcopy(list(empty)), 0
        entry.used = self._tick()
        cache = copy.deepcopy(entry.cache)
        if entry.shrunk:
            grow(cache, empty)
        return cache, count

    def _longest_before(self, wanted: Place) -> Conversation | None:
        """The longest conversation that a prompt goes on from.

        The end of another request's prompt is no turn of a conversation. If tokens were evicted up
        to there, they depend on where that prompt ended, so it serves the same prompt alone.
        """
        last = token_count(wanted.key) - 1
        serving = (
            entry
            for entry in self._before(wanted)
            if entry.kind != "prompt" or entry.turns or not entry.evicted or entry.count == last
        )
        return max(serving, key=lambda entry: entry.count, default=None)

    def _before(self, wanted: Place) -> list[Conversation]:
        """The entries that a prompt goes on from."""
        return [
            entry
            for entry in self._entries.values()
            if len(entry.place.key) < len(wanted.key)
            and wanted.key.startswith(entry.place.key)
            and entry.place.mark.serves(wanted.mark, entry.count)
        ]

    def _undone(self, wanted: Place, more_than: int) -> tuple[list[Any], int] | None:
        """Caches that differ by steps which can be undone exactly, and the tokens then left."""
        best: Conversation | None = None
        for entry in self._entries.values():
            count = common_tokens(entry.place.key, wanted.key)
            count = min(count, token_count(wanted.key) - 1)
            if count <= more_than or not entry.place.mark.serves(wanted.mark, count):
                continue
            if leaves_no_trace(entry.cache, entry.count - count):
                best, more_than = entry, count
        if best is None:
            return None
        best.used = self._tick()
        cache = copy.deepcopy(best.cache)
        for _, one in entries(cache):
            one.trim(best.count - more_than)
        return cache, more_than

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # -- keeping ----------------------------------------------------------------------------------

    def keep(self, place: Place, cache: list[Any], kind: str, turn: Turn | None = None) -> bool:
        """Keep caches, which belong to this object from now on; False if that fails.

        A conversation with an answer is written to its file before anything makes room.

        Args:
            place: Their settings, pins and tokens.
            cache: The caches, one for each layer.
            kind: One of KINDS.
            turn: The answer that ends here, or None.
        """
        try:
            mx.eval([entry.state for entry in cache])
            pieces = pieces_of(cache)
        except Exception:  # no request depends on them
            logging.exception("A conversation cannot be kept")
            return False
        for entry in self._before(place):
            entry.passed = True
        before = self._entries.get(place)
        turns = before.turns if before is not None else ()
        if before is not None and kind == "prompt":
            kind = before.kind
        entry = Conversation(place, cache, kind, pieces, self._tick(), turns=turns)
        self._entries[place] = entry
        if turn is not None:
            self.name(place, turn)
        while self._left() is None and len(self) > MAX_ENTRIES:
            self._forget(self._first_to_go())
        self.make_room()
        return True

    def name(self, place: Place, turn: Turn) -> None:
        """Let an answer's name stand for a conversation, and write its file."""
        self._remember(place, turn.texts)
        entry, file = self._entries.get(place), self.file_of(place)
        if entry is not None:
            entry.turns = (*entry.turns, turn)[-MAX_TURNS:]
            # A shrunk conversation's file still has everything from before.
            if not (entry.shrunk and file):
                self._save(place, entry.cache, turn)
        elif self.sessions is not None and file and (cache := self.sessions.load(file)):
            self._save(place, cache, turn)

    def _save(self, place: Place, cache: list[Any], turn: Turn) -> None:
        try:
            if self.sessions is not None:
                self.sessions.save(place, cache, turn)
        except (OSError, ValueError) as error:
            logging.error("A conversation could not be saved: %s", error)

    def delivered(self, name: str) -> None:
        """A client has an answer: the files of its conversation's earlier turns go."""
        if self.sessions is None:
            return
        entry = self.named(name)
        # It may have left memory.
        saved = (note.place for note in self.sessions.notes.values() if note.turn.name == name)
        place = entry.place if entry is not None else next(saved, None)
        # An answer whose file could not be written leaves the earlier ones where they are.
        if place is not None and self.file_of(place):
            self.sessions.delivered(place)

    def file_of(self, place: Place) -> Path | None:
        """A conversation's file, or None if there is none."""
        path = self.sessions.path_of(place) if self.sessions is not None else None
        return path if self.sessions is not None and path in self.sessions.notes else None

    # -- room -------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Shrink and forget until all entries take at most the bytes that are left for them."""
        left = self._left()
        while left is not None and self._entries and self.nbytes > left:
            first = self._first_to_go()
            if first.is_snapshot or not self._shrink_one():
                self._forget(first)

    def _first_to_go(self) -> Conversation:
        """Snapshots go first, then conversations, then shared prefixes; longest unused first."""
        return min(
            self._entries.values(),
            key=lambda entry: (not entry.is_snapshot, entry.kind == "system", entry.used),
        )

    def _shrink_one(self) -> bool:
        """Shrink the longest unused conversation not shrunk yet; False if there is none.

        Prompts stay whole: the same question again would get another answer.
        """
        whole = [e for e in self._entries.values() if e.kind == "turn" and not e.shrunk]
        for entry in sorted(whole, key=lambda entry: entry.used):
            entry.shrunk = True
            try:
                shrink(entry.cache)
            except ValueError:  # its policy cannot work with fewer bytes
                continue
            mx.eval([one.state for one in entry.cache])
            entry.pieces = pieces_of(entry.cache)
            self.shrunk += 1
            return True
        return False

    def _forget(self, entry: Conversation) -> None:
        if entry.kind == "prompt" and self._awaits(entry.place) and not self.file_of(entry.place):
            self._save(entry.place, entry.cache, Turn("", ""))
        del self._entries[entry.place]
        self.forgotten += 1

    # -- the page ---------------------------------------------------------------------------------

    def listed(self) -> list[Conversation]:
        """The conversations that an answer's name stands for, the last used first."""
        return [entry for entry in self.entries[::-1] if entry.turns and not entry.passed]

    def named(self, name: str) -> Conversation | None:
        """The conversation whose last answer has this name."""
        for entry in self.listed():
            if any(turn.name == name for turn in entry.turns):
                return entry
        return None

    def change(self, entry: Conversation, to: Callable[[list[Any]], Any]) -> None:
        """Change an idle conversation's caches, and its file.

        Args:
            entry: One of the entries.
            to: Changes a list of caches, or raises before any change.
        """
        to(entry.cache)
        mx.eval([one.state for one in entry.cache])
        entry.pieces = pieces_of(entry.cache)
        sessions, place = self.sessions, entry.place
        if sessions is not None and (path := sessions.path_of(place)) in sessions.notes:
            turn = sessions.notes[path].turn
            # A shrunk conversation's file still has everything from before.
            whole = sessions.load(path) if entry.shrunk else None
            if whole is not None:
                to(whole)
            try:
                sessions.save(place, whole or entry.cache, turn)
            except OSError as error:
                logging.error("Changed pins could not be saved: %s", error)
        self.make_room()


def leaves_no_trace(cache: Sequence[Any], count: int) -> bool:
    """Whether the last `count` tokens of a list of caches can be taken back exactly."""
    for _, entry in entries(cache):
        if not isinstance(entry, BoundedKVCache):
            if count and not entry.is_trimmable():
                return False
        elif entry.layer is None:
            return False
        else:
            # Scores of tokens that were attended to can be taken back within `undo` alone.
            layer = entry.layer
            exact = len(layer.journal) if layer.policy.needs_attention else layer.trimmable
            if count > exact:
                return False
    return True


def can_trim(cache: Sequence[Any], count: int) -> bool:
    """Whether the last `count` tokens can be taken back, though they may have changed scores."""
    return all(
        entry.trimmable >= count if isinstance(entry, BoundedKVCache) else entry.is_trimmable()
        for _, entry in entries(cache)
    )


def shrink(cache: Sequence[Any]) -> None:
    """Make bounded caches take `SHRUNK` of their bytes; others of the list stay as they are.

    Raises:
        ValueError: Their policy cannot work with fewer bytes; nothing was changed.
    """
    resize(cache, max_bytes=int(sum(entry.nbytes for entry in bounded_entries(cache)) * SHRUNK))


def grow(cache: Sequence[Any], empty: Sequence[Any]) -> None:
    """Give shrunk caches the budgets of empty ones again; evicted tokens stay lost."""
    for (_, entry), (_, new) in zip(entries(cache), entries(empty), strict=True):
        if isinstance(entry, BoundedKVCache) and new.budgets is not None:
            whole = replace(entry.resized_settings(new.budgets), filling=new.settings.filling)
            entry.follow(whole.grown(entry.offset) or whole)


def pieces_of(cache: Sequence[Any]) -> dict[int, int]:
    """Bytes of a list of caches by array identity, so that shared arrays are counted once."""
    pieces: dict[int, int] = {}
    for _, entry in entries(cache):
        if isinstance(entry, BoundedKVCache):
            pieces |= entry.pieces()
        else:
            pieces[id(entry)] = entry.nbytes
    return pieces
