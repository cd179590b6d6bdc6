"""Conversations in files, which a restarted server goes on from.

A conversation is one file of `save_prompt_cache` (safetensors): its caches, and in the header its
tokens, its texts, its settings and the fingerprint of its model. It is written whole after each
turn, before the client hears of the answer's end; the file of the turn before goes once the client
has the answer.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from mlx_h2o.caches.files import load_prompt_cache, save_prompt_cache
from mlx_h2o.serve.keys import Mark, Place, key_of, token_count, tokens_of
from mlx_h2o.slots.pins import checked_spans

SUFFIX = ".safetensors"
#: Locked by every process that uses the folder, and exclusively to remove something from it.
LOCK = ".lock"
_NAME = re.compile(r"[0-9a-f]{40}")
DAY = 24 * 60 * 60
#: The bounds of a folder for which none are given: one-off questions are conversations, too.
DEFAULT_BYTES, DEFAULT_DAYS = 10_000_000_000, 30.0

# Errors that reading a foreign or damaged file may raise.
_DAMAGE = (SafetensorError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Turn:
    """An answer.

    Attributes:
        name: The answer's id, which its client was sent, and which cannot be guessed.
        title: The conversation's title.
        texts: Beginnings of prompts that go on from it, each with the number of its tokens.
        messages: The chat's messages, the answer among them; empty if it is no chat.
    """

    name: str
    title: str
    texts: tuple[tuple[str, int], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Note:
    """What a conversation's file says beside its caches.

    Attributes:
        model: The model's name.
        place: The conversation's model, settings, pins and tokens.
        turn: The last answer.
    """

    model: str
    place: Place
    turn: Turn

    def as_metadata(self) -> dict[str, str]:
        """The note as a file's metadata."""
        mark = {"label": self.place.mark.label, "pins": self.place.mark.pins}
        fields = mark | {"tokens": tokens_of(self.place.key)} | vars(self.turn)
        own = {"model": self.model, "fingerprint": self.place.mark.model}
        return own | {"turn": json.dumps(fields)}

    @classmethod
    def read(cls, path: Path) -> Note | None:
        """The note of a file; None if the file is foreign or damaged."""
        try:
            with safe_open(str(path), "numpy") as file:
                metadata = json.loads((file.metadata() or {})["metadata"])
            fields = json.loads(metadata["turn"])
            pins, model = checked_spans("pins", fields["pins"]), str(metadata["fingerprint"])
            mark = Mark(str(fields["label"]), pins, model)
            texts = tuple((str(text), int(count)) for text, count in fields["texts"])
            messages = tuple(dict(message) for message in fields["messages"])
            turn = Turn(str(fields["name"]), str(fields["title"]), texts, messages)
            place = Place(mark, key_of(fields["tokens"]))
            return cls(metadata["model"], place, turn)
        except _DAMAGE as error:
            logging.warning("Left aside %s, which is no saved conversation: %s", path.name, error)
            return None


@dataclass(frozen=True)
class Limits:
    """The bounds of a folder.

    Attributes:
        nbytes: The most bytes of its files.
        days: The days for which a conversation is kept without a new turn.
    """

    nbytes: int = DEFAULT_BYTES
    days: float = DEFAULT_DAYS


class Sessions:
    """A folder of conversations; for the thread that generates.

    Args:
        folder: The folder; it is created if need be, readable by its owner only.
        limits: The folder's bounds.

    Attributes:
        notes: The notes of all conversations, by the paths of their files.

    Raises:
        OSError: The folder cannot be made or read.
    """

    def __init__(self, folder: Path, limits: Limits):
        self.folder, self._limits = folder, limits
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.notes: dict[Path, Note] = {}
        self._names: dict[str, str] = {}
        self._prune()
        for path in sorted(folder.glob(f"*{SUFFIX}"), key=_written):
            note = Note.read(path)
            if note is not None:
                self.notes[path] = note

    def add_model(self, name: str, fingerprint: str) -> list[Note]:
        """The conversations of a model that is served from now on."""
        self._names[fingerprint] = name
        for path, note in self.notes.items():
            if note.model == name and note.place.mark.model != fingerprint:
                logging.warning(
                    "Left aside %s: it is of a model of the same name with other weights, another "
                    "configuration or another tokenizer.", path.name,
                )  # fmt: skip
        return [note for note in self.notes.values() if note.place.mark.model == fingerprint]

    def path_of(self, place: Place) -> Path:
        """The path of a conversation's file; no part of the name comes from a client."""
        about = f"{place.mark.model}\n{place.mark.label}\n{place.mark.pins}\n"
        digest = hashlib.sha256(about.encode() + place.key).hexdigest()
        return self.folder / f"{digest[:40]}{SUFFIX}"

    # -- writing ----------------------------------------------------------------------------------

    def save(self, place: Place, cache: list[Any], turn: Turn) -> Path:
        """Write a conversation's file; its path.

        Its bytes are written, and not yet forced to disk (`sync`).

        Args:
            place: The conversation's model, settings, pins and tokens.
            cache: The caches, one for each layer.
            turn: The last answer.

        Raises:
            OSError: It cannot be written.
            ValueError: The caches have something that cannot be saved.
        """
        path = self.path_of(place)
        note = Note(self._names.get(place.mark.model, ""), place, turn)
        save_prompt_cache(path, cache, note.as_metadata())
        self.notes[path] = note
        if path.stat().st_size > self._limits.nbytes:
            logging.warning(
                "A conversation is not saved: it takes %d bytes, and the sessions' folder may take "
                "%d.", path.stat().st_size, self._limits.nbytes,
            )  # fmt: skip
            self._forget(path)
        self._prune()
        return path

    def delivered(self, place: Place) -> None:
        """A client has the answer with which a conversation ends: its earlier turns' files go."""
        for path, note in list(self.notes.items()):
            earlier = len(note.place.key) < len(place.key)
            if earlier and place.key.startswith(note.place.key) and _serves(note, place):
                self._forget(path)

    def _forget(self, path: Path) -> None:
        self.notes.pop(path, None)
        path.unlink(missing_ok=True)

    def _prune(self) -> None:
        """Remove conversations that are too old, then the oldest beyond the folder's bytes."""
        files = sorted(conversations_in(self.folder), key=lambda one: one.written)
        left, now = sum(one.size for one in files), time.time()
        for one in files:
            old = now - one.written > self._limits.days * DAY
            if not old and left <= self._limits.nbytes:
                continue
            why = f"older than {self._limits.days:g} days" if old else "to make room"
            logging.warning("Removed the saved conversation %s, %s.", one.name, why)
            left -= one.size
            self._forget(one.path)

    # -- reading ----------------------------------------------------------------------------------

    def load(self, path: Path) -> list[Any] | None:
        """A conversation's caches, evaluated; None if the file is bad, which is then forgotten."""
        try:
            cache: Any = load_prompt_cache(path)
            mx.eval([entry.state for entry in cache])
            return list(cache)
        except (OSError, ValueError, RuntimeError) as error:
            logging.warning("Cannot continue %s: %s", path.name, error)
            self.notes.pop(path, None)
            return None

    def longest_before(self, wanted: Place) -> tuple[Path, int] | None:
        """The longest conversation that a prompt goes on from, and the number of its tokens."""
        best: tuple[Path, int] | None = None
        for path, note in self.notes.items():
            count = token_count(note.place.key)
            if count <= (best[1] if best else 0) or len(note.place.key) >= len(wanted.key):
                continue
            if wanted.key.startswith(note.place.key) and _serves(note, wanted):
                best = path, count
        return best


def _serves(note: Note, wanted: Place) -> bool:
    return note.place.mark.serves(wanted.mark, token_count(note.place.key))


def sync(path: Path) -> None:
    """Force a file and its name to disk; any thread may call this."""
    for one, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY)):
        with suppress(FileNotFoundError):  # a later turn has taken its place
            descriptor = os.open(one, flags)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


# -- the folder, of any model's conversations -----------------------------------------------------


@dataclass(frozen=True)
class SavedConversation:
    """The file of one conversation.

    Attributes:
        path: The file.
        size: The file's bytes.
        written: The time when it was written, in seconds since 1970.
    """

    path: Path
    size: int
    written: float

    @property
    def name(self) -> str:
        """The file's name, without suffix."""
        return self.path.stem


def conversations_in(folder: Path) -> list[SavedConversation]:
    """All conversations of a folder, of every model.

    Raises:
        OSError: The folder cannot be read.
    """
    files = []
    for path in folder.iterdir():
        if path.suffix == SUFFIX and _NAME.fullmatch(path.stem):
            with suppress(FileNotFoundError):  # removed meanwhile
                stat = path.stat()
                files.append(SavedConversation(path, stat.st_size, stat.st_mtime))
    return files


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Keep other processes from removing conversations of the folder in the block."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(BlockingIOError), locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        for path in folder.glob(".*.*.*"):  # begun by a server that was killed
            if _NAME.fullmatch(path.name.split(".")[1]):
                path.unlink(missing_ok=True)
    with locked(folder, fcntl.LOCK_SH):
        yield


@contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    """Lock a folder in the block.

    Args:
        folder: The folder of conversations.
        how: `fcntl.LOCK_SH`, or `LOCK_EX` for exclusive use; with `LOCK_NB` without waiting.

    Raises:
        BlockingIOError: Another process has locked it.
    """
    with (folder / LOCK).open("a") as file:
        fcntl.flock(file, how)
        yield


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
