"""Idle conversations and prefixes: the caches that mlx-lm's server reuses for a prompt.

The class stands in the place of mlx-lm's `LRUPromptCache`. Caches that have evicted tokens serve
only their own continuation, except for the last steps that can be undone; the pins with which they
were read must be the prompt's pins, no more and no less. When room is needed, snapshots that a
longer conversation has passed go first; then idle conversations shrink, the longest unused first;
then they are written to disk, if there is a folder for them, or are forgotten.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.conversation import bounded_entries, pin
from mlx_h2o.engine.layer import Layer
from mlx_h2o.model_caches.resize import resize
from mlx_h2o.serve.marks import Mark, mark, mark_of
from mlx_h2o.serve.sessions import Sessions, key_of, token_count, tokens_of
from mlx_h2o.serve.ticket import Place, Ticket, Turn
from mlx_h2o.storage.pins import without

#: mlx-lm's kinds of entries.
KINDS = ("assistant", "user", "system")
#: The part of its bytes that an idle conversation keeps when it shrinks.
SHRUNK = 0.5
#: The most answers by whose names one conversation is found.
MOST_TURNS = 16


@dataclass(eq=False)
class Idle:
    """Caches that no request uses now.

    Attributes:
        mark: The mark of their settings and of the requested pins.
        key: The key of their tokens.
        cache: The caches, one for each layer.
        kind: One of KINDS.
        pieces: Their bytes by array identity (`BoundedKVCache.pieces`).
        used: The order of last use: a larger number is later.
        passed: Whether a longer conversation has gone on from it.
        shrunk: Whether it was made smaller.
        turns: The answers that ended here: several, if clients got the same one.
        unsaved: Whether its turn is noted in the sessions' folder, and these caches have still to
            be written there.
        told: Whether its client was sent all of the last answer. Once a turn's caches are in their
            file, the previous turn's are removed; but a client that does not know of the later turn
            continues from the previous one.
    """

    mark: Mark
    key: bytes
    cache: list[Any]
    kind: str
    pieces: dict[int, int]
    used: int
    passed: bool = False
    shrunk: bool = False
    turns: tuple[Turn, ...] = ()
    unsaved: bool = False
    told: bool = False

    @property
    def is_snapshot(self) -> bool:
        """Whether only a repeated question would need it."""
        return self.kind == "user" or (self.kind == "assistant" and self.passed)


class Conversations:
    """All idle caches of one model.

    Args:
        most: The most entries to keep; None means that only bytes count.
        sessions: The folder to which conversations are written if there is no room, or None.
    """

    def __init__(self, most: int | None = None, sessions: Sessions | None = None):
        self.most, self.sessions = most, sessions
        self.left: Callable[[], int | None] = lambda: None  # bytes that all may take now
        # The mark of the request that is beginning, and empty caches with it.
        self._wanted, self._empty = Mark(), list[Any]()
        self.shrunk = self.forgotten = 0  # counts for the metrics
        self._idle: dict[Place, Idle] = {}
        self._snapped: set[int] = set()
        #: The ticket of a request that is served outside of batches.
        self.ticket: Ticket | None = None
        self._tickets: dict[int, Ticket] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._idle)

    @property
    def idle(self) -> list[Idle]:
        """All idle entries, the last used at the end."""
        return sorted(self._idle.values(), key=lambda idle: idle.used)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries; arrays that several share count once."""
        together: dict[int, int] = {}
        for idle in list(self._idle.values()):
            together |= idle.pieces
        return sum(together.values())

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Entries and bytes of each kind, for mlx-lm's log."""
        stats = {}
        for kind in KINDS:
            of_kind = [idle for idle in self._idle.values() if idle.kind == kind]
            size = sum(sum(idle.pieces.values()) for idle in of_kind)
            stats[kind] = {"n_sequences": len(of_kind), "n_bytes": size}
        return stats

    # -- the interface of mlx-lm's server ---------------------------------------------------------

    def begin(self, empty: list[Any]) -> None:
        """The next prompt looked up wants caches with the mark of these empty ones."""
        self._wanted, self._empty = mark_of(empty), empty

    def fetch_nearest_cache(self, model: Any, tokens: Sequence[int]) -> tuple[list[Any], list[int]]:
        """The caches that hold most of a prompt, and the tokens that they do not hold.

        The caches belong to the caller, and are empty if nothing fits. At least the last token is
        left to read, since generation begins from it.

        Args:
            model: Unused: all entries are of one model.
            tokens: The prompt.
        """
        tokens = list(tokens)
        try:
            cache, known = self._found(key_of(tokens))
            # Requested pins may have been removed by hand since.
            more = without(self._wanted.pins, mark_of(cache).pins)
            if more:
                pin(cache, more)
                mark(cache, self._wanted)
        except Exception:
            # If the entry found is faulty, the prompt itself can still be read.
            logging.exception("An idle conversation cannot be continued")
            cache, known = copy.deepcopy(self._empty), 0
        return cache, tokens[known:]

    def _found(self, key: bytes) -> tuple[list[Any], int]:
        """Caches for the caller, and the number of the prompt's tokens that they hold."""
        found = self._longest_before(key)
        known = token_count(found.key) if found else 0
        undone = _undone(self._idle.values(), self._wanted, key, known)
        if undone is not None:
            return undone
        saved = None
        if self.sessions is not None:
            saved = self.sessions.longest_before(self._wanted, key)
        # A shrunk conversation's file still holds everything from before.
        if saved is not None and (
            token_count(saved.key) > known or (found is not None and found.shrunk)
        ):
            whole = self.sessions.load(saved) if self.sessions is not None else None
            if whole is not None:
                return whole, token_count(saved.key)
        if found is None:
            return copy.deepcopy(self._empty), 0
        self._clock += 1
        found.used = self._clock
        cache = copy.deepcopy(found.cache)
        if found.shrunk:
            grow(cache, self._empty)
        return cache, known

    def snapped(self, cache: list[Any]) -> None:
        """The next insertion was copied before its turn ended: it is no conversation."""
        self._snapped.add(id(cache))

    def came_of(self, cache: list[Any], ticket: Ticket) -> None:
        """The next insertion ends with this request's answer."""
        self._tickets[id(cache)] = ticket

    def insert_cache(
        self,
        model: Any,
        tokens: Sequence[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep caches, and tell their request their place.

        The thread that reads the answer notes its turn on disk before the client hears of its end
        (`noted`); the caches follow when there is time (`save_one`) or when they must make room.
        Caches without a request are written to their file at once. Caches that cannot be kept are
        forgotten, with a log message: no request depends on them.

        Args:
            model: Unused.
            tokens: The tokens that they hold.
            prompt_cache: The caches, one for each layer; they belong to this object from now on.
            cache_type: One of KINDS.
        """
        if id(prompt_cache) in self._snapped:
            self._snapped.remove(id(prompt_cache))
            cache_type = "system" if cache_type == "system" else "user"
        ticket = self._tickets.pop(id(prompt_cache), self.ticket)
        try:
            key = key_of(tokens)
            if ticket is not None:
                key = key_of(_told_only(tokens, prompt_cache, ticket))
            mx.eval([entry.state for entry in prompt_cache])
            self._keep(key, prompt_cache, cache_type, ticket)
        except Exception:
            logging.exception("A conversation cannot be kept")
            if ticket is not None:
                ticket.kept.tell(None)
        self.trim_to(n_sequences=self.most)
        self.make_room(self.left())

    def _keep(self, key: bytes, cache: list[Any], kind: str, ticket: Ticket | None) -> None:
        own = mark_of(cache)
        earlier = self._before(own, key)
        for idle in earlier:
            idle.passed = True
        self._clock += 1
        place = Place(own, key)
        before = self._idle.get(place)
        turn = ticket.turn if ticket is not None else None
        same = before.turns if before is not None else ()
        turns = (*same, *((turn,) if turn is not None else ()))[-MOST_TURNS:]
        new = Idle(own, key, cache, kind, pieces_of(cache), self._clock, turns=turns)
        self._idle[place] = new
        if kind == "assistant" and self.sessions is not None and _only_file(ticket):
            self._save(new)
        if ticket is not None:
            longest = max(earlier, key=lambda idle: len(idle.key), default=None)
            before_answer = None if longest is None else Place(longest.mark, longest.key)
            ticket.kept.tell(place, before_answer)

    def noted(self, place: Place, told: bool) -> None:
        """Note that a turn is on disk and its answer is complete; any thread may call this.

        Args:
            place: The turn's place.
            told: Whether its client was sent all of the answer.
        """
        idle = self._idle.get(place)
        if idle is not None:
            idle.unsaved, idle.told = True, told

    def save_one(self) -> bool:
        """Write one conversation's caches that are not on disk yet; False if there are none."""
        idle = next((idle for idle in self._idle.values() if idle.unsaved), None)
        if idle is not None:
            self._save(idle)
        return idle is not None

    def known(self, empty: list[Any], tokens: Sequence[int]) -> int:
        """The number of a prompt's tokens held by caches that are like these empty ones."""
        wanted, key = mark_of(empty), key_of(tokens)
        keys = [idle.key for idle in self._before(wanted, key)]
        saved = self.sessions.longest_before(wanted, key) if self.sessions is not None else None
        keys += [saved.key] if saved is not None else []
        return max(map(token_count, keys), default=0)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Make room until no more than `n_sequences` entries or `n_bytes` bytes are left."""
        while n_sequences is not None and len(self) > max(n_sequences, 0):
            self._give_up(self._first_to_go())
        if n_bytes is not None:
            self.make_room(max(n_bytes, 0))

    # -- room -------------------------------------------------------------------------------------

    def make_room(self, left: int | None) -> None:
        """Shrink, save and forget until all idle caches take at most `left` bytes."""
        while left is not None and self._idle and self.nbytes > left:
            first = self._first_to_go()
            if first.is_snapshot or not self._shrink_one():
                self._give_up(first)

    def _first_to_go(self) -> Idle:
        """Snapshots go first, then conversations, then shared prefixes; longest unused first."""
        return min(
            self._idle.values(),
            key=lambda idle: (not idle.is_snapshot, idle.kind == "system", idle.used),
        )

    def _shrink_one(self) -> bool:
        """Shrink the longest unused conversation not shrunk yet; False if there is none."""
        whole = [idle for idle in self._idle.values() if not idle.shrunk]
        for idle in sorted(whole, key=lambda idle: idle.used):
            if idle.unsaved:
                self._save(idle)
            idle.shrunk = True
            try:
                shrink(idle.cache)
            except ValueError:  # its policy cannot work with fewer bytes
                continue
            mx.eval([entry.state for entry in idle.cache])
            idle.pieces = pieces_of(idle.cache)
            self.shrunk += 1
            return True
        return False

    def _give_up(self, idle: Idle) -> None:
        """Remove an entry; a conversation's file is written first if it is not yet."""
        if idle.unsaved:
            self._save(idle)
        del self._idle[Place(idle.mark, idle.key)]
        self.forgotten += 1

    def _save(self, idle: Idle) -> None:
        """Write a conversation, and remove the files of its earlier turns (`Sessions.save`)."""
        assert self.sessions is not None
        idle.unsaved = False
        try:
            self.sessions.save(idle.mark, idle.key, idle.cache, idle.told)
        except (OSError, ValueError) as error:
            logging.error("A conversation could not be saved: %s", error)

    def end(self) -> None:
        """The server ends: what is not on disk yet is written."""
        while self.save_one():
            pass

    # -- lookups for the page ---------------------------------------------------------------------

    def told(self) -> list[Idle]:
        """The conversations that can be found by an answer's name."""
        return [idle for idle in list(self._idle.values()) if idle.turns and not idle.passed]

    def named(self, name: str) -> Idle | None:
        """The conversation whose last answer has this name."""
        for idle in self.told():
            if any(turn.name == name for turn in idle.turns):
                return idle
        return None

    def change(self, idle: Idle, to: Callable[[list[Any]], Any]) -> None:
        """Change an idle conversation's caches, and its file.

        Args:
            idle: One of the idle conversations.
            to: Changes a list of caches, or raises before any change.
        """
        to(idle.cache)
        mx.eval([entry.state for entry in idle.cache])
        idle.pieces = pieces_of(idle.cache)
        if self.sessions is not None:
            saved = self.sessions.saved.get(self.sessions.path_of(idle.mark, idle.key))
            # A shrunk conversation's file still holds everything from before.
            whole = self.sessions.load(saved) if idle.shrunk and saved is not None else None
            if whole is not None:
                to(whole)
            try:
                self.sessions.save_again(idle.mark, idle.key, whole or idle.cache)
                idle.unsaved = False
            except OSError as error:
                logging.error("Changed pins could not be saved: %s", error)
        self.make_room(self.left())

    # -- finding ----------------------------------------------------------------------------------

    def _longest_before(self, key: bytes) -> Idle | None:
        """The longest entry with these settings that the tokens continue."""
        before = self._before(self._wanted, key)
        return max(before, key=lambda idle: len(idle.key), default=None)

    def _before(self, wanted: Mark, key: bytes) -> list[Idle]:
        """The entries that tokens with a mark continue."""
        return [
            idle
            for idle in self._idle.values()
            if len(idle.key) < len(key)
            and key.startswith(idle.key)
            and idle.mark.serves(wanted, token_count(idle.key))
        ]


def _undone(
    idle: Iterable[Idle], wanted: Mark, key: bytes, more_than: int
) -> tuple[list[Any], int] | None:
    """Caches that differ by steps which can be undone exactly, and the tokens that then remain.

    Args:
        idle: The idle entries.
        wanted: The prompt's mark.
        key: The key of the prompt's tokens.
        more_than: The number of tokens that other caches hold already.
    """
    tokens = tokens_of(key)
    best: Idle | None = None
    for one in idle:
        held = tokens_of(one.key)
        common = min(_common(held, tokens), len(tokens) - 1)
        if common <= more_than or not one.mark.serves(wanted, common):
            continue
        if leaves_no_trace(one.cache, len(held) - common):
            best, more_than = one, common
    if best is None:
        return None
    cache = copy.deepcopy(best.cache)
    count = token_count(best.key) - more_than
    for _, entry in entries(cache):
        entry.trim(count)
    return cache, more_than


def _only_file(ticket: Ticket | None) -> bool:
    """Whether a turn is kept by its file only: it has no request, or its prompt has images.

    Images' tokens do not suffice to compute its caches again.
    """
    return ticket is None or ticket.said is None


def _told_only(tokens: Sequence[int], cache: list[Any], ticket: Ticket) -> list[int]:
    """An answer's tokens without those that produce no text for its client.

    They are taken out of the caches if that is possible: nothing was evicted, or the steps are
    within `undo`. Otherwise they stay, and belong to the conversation like the text before them.
    """
    said, tokens = ticket.said, list(tokens)
    count = said.beyond(tokens) if said is not None else 0
    if not count:
        return tokens
    members = [entry for _, entry in entries(cache)]
    for entry in members:
        bounded = isinstance(entry, BoundedKVCache)
        if entry.trimmable < count if bounded else not entry.is_trimmable():
            return tokens
    for entry in members:
        entry.trim(count)
    return tokens[:-count]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of two sequences."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def leaves_no_trace(cache: Sequence[Any], count: int) -> bool:
    """Whether the last `count` tokens of a list of caches can be taken back exactly."""
    for _, entry in entries(cache):
        if not isinstance(entry, BoundedKVCache):
            if not entry.is_trimmable():
                return False
        elif entry.layer is None or count > _undoable(entry.layer):
            return False
    return True


def _undoable(layer: Layer) -> int:
    """The number of newest tokens that leave no trace: steps within `undo`, or unscored ones."""
    return len(layer.journal) if layer.policy.needs_attention else layer.trimmable


def shrink(cache: Sequence[Any]) -> None:
    """Make bounded caches hold `SHRUNK` of their bytes; others of the list stay as they are.

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
