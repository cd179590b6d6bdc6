"""Idle conversations and prefixes: where mlx-lm's server looks for what it knows of a prompt.

It stands in the place of mlx-lm's `LRUPromptCache`. What has evicted tokens serves its own
continuation and nothing else, except what the undo of its last steps allows; what was pinned while
it was read must be what the prompt pins of it, no more and no less. When room is needed,
snapshots that a longer conversation has passed go first, then idle conversations shrink, the
longest unused first, then they go to disk, if there is a folder for them, or are forgotten.
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

#: What mlx-lm's server calls the entries that it keeps.
KINDS = ("assistant", "user", "system")
#: How much of its bytes an idle conversation keeps when it shrinks.
SHRUNK = 0.5
#: Answers by whose names one conversation is found.
MOST_TURNS = 16


@dataclass(eq=False)
class Idle:
    """Caches that no request uses now.

    Attributes:
        mark: Of their settings, and of the pins that were asked for.
        key: Of their tokens.
        cache: One for each layer.
        kind: Of KINDS.
        pieces: Their bytes by identity (`BoundedKVCache.pieces`).
        used: When it was used last: higher is later.
        passed: Whether a longer conversation has gone on from it.
        shrunk: Whether it was made smaller.
        turns: The answers that ended here: several, where clients had the same one.
        unsaved: Whether its turn is noted in the sessions' folder, and these caches are still to be
            written there.
        told: Whether its client was sent all of the last answer. Once the caches of a turn are in
            their file those of the turn before go, but a client that does not know of the later
            turn goes on from the one before.
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
        """Whether nothing but a repeated question would need it."""
        return self.kind == "user" or (self.kind == "assistant" and self.passed)


class Conversations:
    """All idle caches of one model.

    Args:
        most: Entries that it keeps at most; None: only bytes count.
        sessions: Where conversations go when there is no room for them, or None.
    """

    def __init__(self, most: int | None = None, sessions: Sessions | None = None):
        self.most, self.sessions = most, sessions
        self.left: Callable[[], int | None] = lambda: None  # bytes that all may take now
        # Of the request that is being begun: its mark, and empty caches with it.
        self._wanted, self._empty = Mark(), list[Any]()
        self.shrunk = self.forgotten = 0  # how often, for the metrics
        self._idle: dict[Place, Idle] = {}
        self._snapped: set[int] = set()
        #: The request that is served by itself.
        self.ticket: Ticket | None = None
        self._tickets: dict[int, Ticket] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._idle)

    @property
    def idle(self) -> list[Idle]:
        """All of them, the one that was used last at the end."""
        return sorted(self._idle.values(), key=lambda idle: idle.used)

    @property
    def nbytes(self) -> int:
        """Bytes of all; what several share counts once."""
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

    # -- what mlx-lm's server asks ----------------------------------------------------------------

    def begin(self, empty: list[Any]) -> None:
        """The next prompt that is looked up is to have caches with the mark of these empty ones."""
        self._wanted, self._empty = mark_of(empty), empty

    def fetch_nearest_cache(self, model: Any, tokens: Sequence[int]) -> tuple[list[Any], list[int]]:
        """The caches that know most of a prompt, and the tokens that they do not know.

        They are the caller's own, empty ones if nothing is known. At least the last token is left,
        from which generation begins.

        Args:
            model: Unused: all are of one model.
            tokens: The prompt.
        """
        tokens = list(tokens)
        try:
            cache, known = self._found(key_of(tokens))
            # What was asked for before may have been let go, by hand, since.
            more = without(self._wanted.pins, mark_of(cache).pins)
            if more:
                pin(cache, more)
                mark(cache, self._wanted)
        except Exception:
            # Whatever is wrong with what was found, the prompt itself can still be read.
            logging.exception("An idle conversation cannot be gone on with")
            cache, known = copy.deepcopy(self._empty), 0
        return cache, tokens[known:]

    def _found(self, key: bytes) -> tuple[list[Any], int]:
        """Caches of the caller's own, and how many of a prompt's tokens they know."""
        found = self._longest_before(key)
        known = token_count(found.key) if found else 0
        undone = _undone(self._idle.values(), self._wanted, key, known)
        if undone is not None:
            return undone
        if self.sessions is not None:
            saved = self.sessions.longest_before(self._wanted, key)
            # A shrunk conversation's file still has all that it held.
            if saved is not None and (
                token_count(saved.key) > known or (found is not None and found.shrunk)
            ):
                cache = self.sessions.load(saved)
                if cache is not None:
                    return cache, token_count(saved.key)
        if found is None:
            return copy.deepcopy(self._empty), 0
        self._clock += 1
        found.used = self._clock
        cache = copy.deepcopy(found.cache)
        if found.shrunk:
            grow(cache, self._empty)
        return cache, known

    def snapped(self, cache: list[Any]) -> None:
        """What will be inserted next was copied before its turn ended: it is no conversation."""
        self._snapped.add(id(cache))

    def came_of(self, cache: list[Any], ticket: Ticket) -> None:
        """What will be inserted next is where this request's answer ended."""
        self._tickets[id(cache)] = ticket

    def insert_cache(
        self,
        model: Any,
        tokens: Sequence[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep caches, and tell their request where.

        Who reads the answer notes its turn on disk before the client hears of its end (`noted`);
        the caches follow when there is time (`save_one`) or when they must make room. Caches of no
        request go to their file at once. What cannot be kept is forgotten, and said in the log: no
        request depends on it.

        Args:
            model: Unused.
            tokens: What they hold.
            prompt_cache: One for each layer; theirs from now on.
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
        """A turn is on disk, and its answer is over; any thread may say so.

        Args:
            place: Its.
            told: Whether its client was sent all of the answer.
        """
        idle = self._idle.get(place)
        if idle is not None:
            idle.unsaved, idle.told = True, told

    def save_one(self) -> bool:
        """Write the caches of one conversation that are not on disk yet; False: there are none."""
        idle = next((idle for idle in self._idle.values() if idle.unsaved), None)
        if idle is not None:
            self._save(idle)
        return idle is not None

    def known(self, empty: list[Any], tokens: Sequence[int]) -> int:
        """How many of a prompt's tokens caches know that are like these empty ones."""
        wanted, key = mark_of(empty), key_of(tokens)
        keys = [idle.key for idle in self._before(wanted, key)]
        saved = self.sessions.longest_before(wanted, key) if self.sessions is not None else None
        keys += [saved.key] if saved is not None else []
        return max(map(token_count, keys), default=0)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Make room until no more than so many entries or bytes are left."""
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
        """Snapshots, then conversations, then what several begin with; unused longest first."""
        return min(
            self._idle.values(),
            key=lambda idle: (not idle.is_snapshot, idle.kind == "system", idle.used),
        )

    def _shrink_one(self) -> bool:
        """Shrink the conversation that was unused longest and was not shrunk; False: none."""
        whole = [idle for idle in self._idle.values() if not idle.shrunk]
        for idle in sorted(whole, key=lambda idle: idle.used):
            if idle.unsaved:
                self._save(idle)
            idle.shrunk = True
            try:
                shrink(idle.cache)
            except ValueError:  # as small as its policy works with
                continue
            mx.eval([entry.state for entry in idle.cache])
            idle.pieces = pieces_of(idle.cache)
            self.shrunk += 1
            return True
        return False

    def _give_up(self, idle: Idle) -> None:
        """Let go of an entry; a conversation's file is written first where it is not yet."""
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

    # -- what is looked at ------------------------------------------------------------------------

    def told(self) -> list[Idle]:
        """Conversations that an answer's name leads to."""
        return [idle for idle in list(self._idle.values()) if idle.turns and not idle.passed]

    def named(self, name: str) -> Idle | None:
        """The conversation in which the answer of this name is the last."""
        for idle in self.told():
            if any(turn.name == name for turn in idle.turns):
                return idle
        return None

    def change(self, idle: Idle, to: Callable[[list[Any]], Any]) -> None:
        """Change an idle conversation's caches, and what its file holds.

        Args:
            idle: One of these.
            to: Changes a list of caches, or raises before it has changed anything.
        """
        to(idle.cache)
        mx.eval([entry.state for entry in idle.cache])
        idle.pieces = pieces_of(idle.cache)
        if self.sessions is not None:
            saved = self.sessions.saved.get(self.sessions.path_of(idle.mark, idle.key))
            # A shrunk conversation's file still has all that it held.
            whole = self.sessions.load(saved) if idle.shrunk and saved is not None else None
            if whole is not None:
                to(whole)
            try:
                self.sessions.save_again(idle.mark, idle.key, whole or idle.cache)
                idle.unsaved = False
            except OSError as error:
                logging.error("Changed pins could not be saved: %s", error)
        self.make_room(self.left())

    # -- looking ----------------------------------------------------------------------------------

    def _longest_before(self, key: bytes) -> Idle | None:
        """The longest entry of these settings that the tokens go on from."""
        before = self._before(self._wanted, key)
        return max(before, key=lambda idle: len(idle.key), default=None)

    def _before(self, wanted: Mark, key: bytes) -> list[Idle]:
        """Entries that tokens with a mark go on from."""
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
    """Caches that differ by steps which can be undone without a trace, and what they know.

    Args:
        idle: All that there are.
        wanted: The prompt's mark.
        key: Of the prompt.
        more_than: Tokens that are known without.
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
    """Whether nobody notes a conversation's turn: it is no request's, or its prompt has images, of
    which its tokens say too little to compute its caches from."""
    return ticket is None or ticket.said is None


def _told_only(tokens: Sequence[int], cache: list[Any], ticket: Ticket) -> list[int]:
    """An answer's tokens without those that say nothing that its client is told.

    They are taken out of the caches where that can be done: nothing was evicted, or the steps are
    within `undo`. Elsewhere they stay, and are the conversation's as the text before them is.
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
    """How many tokens two sequences begin with alike."""
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
    """How many of the newest tokens leave no trace: steps within `undo`, or what none scored."""
    return len(layer.journal) if layer.policy.needs_attention else layer.trimmable


def shrink(cache: Sequence[Any]) -> None:
    """Have bounded caches hold `SHRUNK` of their bytes; others of the list stay as they are.

    Raises:
        ValueError: They are as small as their policy works with; nothing was changed.
    """
    resize(cache, max_bytes=int(sum(entry.nbytes for entry in bounded_entries(cache)) * SHRUNK))


def grow(cache: Sequence[Any], empty: Sequence[Any]) -> None:
    """Give caches that shrank the budgets of empty ones again; what they lost stays lost."""
    for (_, entry), (_, new) in zip(entries(cache), entries(empty), strict=True):
        if isinstance(entry, BoundedKVCache) and new.budgets is not None:
            whole = replace(entry.resized_settings(new.budgets), filling=new.settings.filling)
            entry.follow(whole.grown(entry.offset) or whole)


def pieces_of(cache: Sequence[Any]) -> dict[int, int]:
    """Bytes of a list of caches by identity, so that shared ones can be counted once."""
    pieces: dict[int, int] = {}
    for _, entry in entries(cache):
        if isinstance(entry, BoundedKVCache):
            pieces |= entry.pieces()
        else:
            pieces[id(entry)] = entry.nbytes
    return pieces
