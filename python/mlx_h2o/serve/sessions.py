"""Conversations in files, found again after a restart: turns at once, caches when there is time.

A conversation is one or two files of the same name. `NAME.json` is small and holds its text and its
tokens; it is on disk before a client hears the end of its answer. `NAME.safetensors` holds its
caches. If the process was killed before it wrote the caches, they are computed again from the
tokens. Each file is written whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from mlx_h2o._utils.files import replacing
from mlx_h2o.caches.files import load_prompt_cache, save_prompt_cache
from mlx_h2o.serve.marks import Mark, mark
from mlx_h2o.storage.pins import checked_spans

SUFFIX = ".safetensors"
NOTE = ".json"
FORMAT = "mlx-h2o turn"
VERSION = 1
#: Locked by every process that uses the folder, and exclusively to remove something from it.
LOCK = ".lock"
#: The array type code of a token in a key: prompts with images have ids beyond 32 bits.
_TOKEN = "q"
_NAME = re.compile(r"[0-9a-f]{40}")
DAY = 24 * 60 * 60

# Errors that reading a foreign or damaged file may raise.
_DAMAGE = (SafetensorError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)


def key_of(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes; one key begins with another exactly if the tokens do."""
    return array(_TOKEN, tokens).tobytes()


def token_count(key: bytes) -> int:
    """The number of tokens in a key."""
    return len(key) // array(_TOKEN).itemsize


def tokens_of(key: bytes) -> list[int]:
    """The tokens of a key made by `key_of`."""
    tokens = array(_TOKEN)
    tokens.frombytes(key)
    return tokens.tolist()


@dataclass(frozen=True)
class Saved:
    """A conversation on disk.

    Attributes:
        mark: The mark of its settings and requested pins.
        key: The key of its tokens.
        path: The path of its caches.
        cached: Whether the caches' file exists.
    """

    mark: Mark
    key: bytes
    path: Path
    cached: bool = True


@dataclass(frozen=True)
class Note:
    """The content of a conversation's small file.

    Attributes:
        model: The model's name.
        mark: The mark of its settings and requested pins.
        key: The key of its tokens.
        texts: Beginnings of its next turn's prompt, which differ only in spaces.
        title: The conversation's title.
        name: The id of its last answer.
    """

    model: str
    mark: Mark
    key: bytes
    texts: tuple[str, ...] = ()
    title: str = ""
    name: str = ""

    def as_text(self) -> str:
        """The note as a file's text, with a digest of its content."""
        said = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "label": self.mark.label,
            "pins": self.mark.pins,
            "tokens": tokens_of(self.key),
            "texts": self.texts,
            "title": self.title,
            "name": self.name,
        }
        return json.dumps(said | {"digest": _digest(said)})

    @classmethod
    def of_text(cls, text: str) -> Note:
        """The note that `as_text` wrote.

        Raises:
            ValueError, KeyError, TypeError, OverflowError, RecursionError: The text is no such
                note.
        """
        said = json.loads(text)
        digest = said.pop("digest")
        if (said["format"], said["version"]) != (FORMAT, VERSION) or digest != _digest(said):
            raise ValueError("it is damaged, or of another version")
        own = Mark(str(said["label"]), checked_spans("pins", said["pins"]))
        texts = tuple(map(str, said["texts"]))
        return cls(said["model"], own, key_of(said["tokens"]), texts, said["title"], said["name"])


def _digest(said: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


class Sessions:
    """A folder of conversations of one model; any thread may use it.

    Args:
        folder: The folder; it is created if need be, readable by its owner only.
        model: The model's name: files of other models are ignored.
        most_bytes: The most bytes of all files in the folder, or None.
        most_days: The days for which a conversation is kept without a new turn, or None.

    Attributes:
        saved: The conversations in the folder, by the path of their caches.
        notes: The notes that were there at the beginning, oldest first.

    Raises:
        OSError: The folder cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        most_bytes: int | None = None,
        most_days: float | None = None,
    ):
        self.folder, self.model = folder, model
        self.most_bytes, self.most_days = most_bytes, most_days
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.saved: dict[Path, Saved] = {}
        self.notes: list[Note] = []
        self.prune()
        for path in sorted(folder.glob(f"*{NOTE}"), key=_written):
            note = read_note(path)
            if note is not None and note.model == model:
                caches = path.with_suffix(SUFFIX)
                self.saved[caches] = Saved(note.mark, note.key, caches, caches.exists())
                self.notes.append(note)
        for path in sorted(folder.glob(f"*{SUFFIX}"), key=_written):
            if path not in self.saved and (note := read_header(path)) and note.model == model:
                self.saved[path] = Saved(note.mark, note.key, path)

    def path_of(self, own: Mark, key: bytes) -> Path:
        """The path of a conversation's caches; no part of the name comes from a client."""
        about = f"{self.model}\n{own.label}\n" + (f"{own.pins}\n" if own.pins else "")
        digest = hashlib.sha256(about.encode() + key).hexdigest()
        return self.folder / f"{digest[:40]}{SUFFIX}"

    # -- writing ----------------------------------------------------------------------------------

    def note(self, own: Mark, key: bytes, texts: Sequence[str], title: str, name: str) -> None:
        """Write a turn's small file; it is on disk when this returns.

        Args:
            own: The mark of its caches: settings and pins.
            key: The key of its tokens.
            texts: The conversation's texts.
            title: The conversation's title.
            name: The id of its last answer.

        Raises:
            OSError: It cannot be written.
        """
        path = self.path_of(own, key)
        if not texts and path.with_suffix(NOTE).exists():
            return  # by a turn with the same texts
        note = Note(self.model, own, key, tuple(texts), title, name)
        with self._lock:
            with replacing(path.with_suffix(NOTE), durable=True) as temporary:
                temporary.write_text(note.as_text(), encoding="utf-8")
            before = self.saved.get(path)
            self.saved[path] = Saved(own, key, path, before is not None and before.cached)
            # The previous turn stays, since the client may never hear of this one, and so do the
            # caches of an earlier turn, until those of this one are written.
            for earlier in self._earlier(own, key)[:-1]:
                if not earlier.cached:
                    self.forget(earlier)
            self.prune()

    def save(self, own: Mark, key: bytes, cache: list[Any], told: bool = True) -> None:
        """Write a conversation's caches, and remove the files of its earlier turns.

        A file that exists already stays as it is.

        Args:
            own: The conversation's mark.
            key: The key of its tokens.
            cache: The caches, one for each layer.
            told: Whether its client was sent the end of its last turn. If that is not known, the
                previous turn stays: the client may continue from that one.

        Raises:
            OSError: The caches cannot be written.
            ValueError: The caches hold something that cannot be saved.
        """
        before = self.saved.get(self.path_of(own, key))
        if before is None or not before.cached:
            self.save_again(own, key, cache)
        self.forget_earlier(own, key, told)

    def forget_earlier(self, own: Mark, key: bytes, told: bool) -> None:
        """Remove the files of earlier turns; arguments as in `save`."""
        with self._lock:
            earlier = self._earlier(own, key)
            for one in earlier if told else earlier[:-1]:
                self.forget(one)

    def save_again(self, own: Mark, key: bytes, cache: list[Any]) -> None:
        """Write changed caches; arguments and errors as in `save`."""
        path = self.path_of(own, key)
        metadata = {
            "model": self.model,
            "label": own.label,
            "tokens": json.dumps(tokens_of(key)),
            "pins": json.dumps(own.pins),
        }
        save_prompt_cache(path, cache, metadata)
        with self._lock:
            self.saved[path] = Saved(own, key, path)
            size = path.stat().st_size
            if self.most_bytes is not None and size > self.most_bytes:
                logging.warning(
                    "Removed the caches of %s: they alone take %d bytes, and the sessions' folder "
                    "may hold %d.", path.stem, size, self.most_bytes,
                )  # fmt: skip
                path.unlink(missing_ok=True)
                self.saved[path] = Saved(own, key, path, False)
            self.prune()

    def forget(self, saved: Saved) -> None:
        """Remove a conversation's files."""
        with self._lock:
            self.saved.pop(saved.path, None)
            for path in (saved.path.with_suffix(NOTE), saved.path):
                path.unlink(missing_ok=True)

    def prune(self) -> None:
        """Remove conversations that are too old, then the oldest beyond the folder's bytes."""
        if self.most_bytes is None and self.most_days is None:
            return
        with self._lock:
            found = sorted(conversations_in(self.folder), key=lambda c: c.written)
            left, now = sum(c.size for c in found), time.time()
            for conversation in found:
                old = self.most_days is not None and (
                    now - conversation.written > self.most_days * DAY
                )
                if not old and (self.most_bytes is None or left <= self.most_bytes):
                    continue
                why = f"older than {self.most_days:g} days" if old else "to make room"
                logging.warning("Removed the saved conversation %s, %s.", conversation.name, why)
                left -= conversation.size
                self.saved.pop(self.folder / f"{conversation.name}{SUFFIX}", None)
                conversation.remove()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from removing conversations of the folder in the block."""
        with suppress(BlockingIOError), locked(self.folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for path in self.folder.glob(".*.*.*"):  # begun by a server that was killed
                if _NAME.fullmatch(path.name.split(".")[1]):
                    path.unlink(missing_ok=True)
        with locked(self.folder, fcntl.LOCK_SH):
            yield

    # -- reading ----------------------------------------------------------------------------------

    def load(self, saved: Saved) -> list[Any] | None:
        """A conversation's caches, evaluated; None if the file is bad, which is then forgotten."""
        try:
            cache: Any = load_prompt_cache(saved.path)
            mx.eval([entry.state for entry in cache])
            mark(cache, saved.mark)
            return list(cache)
        except (OSError, ValueError, RuntimeError) as error:
            logging.warning("Cannot continue %s: %s", saved.path.name, error)
            self.saved.pop(saved.path, None)
            return None

    def longest_before(self, wanted: Mark, key: bytes) -> Saved | None:
        """The longest conversation with caches that these tokens, with a mark, continue."""
        before = [saved for saved in self._earlier(wanted, key) if saved.cached]
        return before[-1] if before else None

    def without_caches(self) -> list[Saved]:
        """Conversations without caches, the shortest first."""
        bare = [saved for saved in list(self.saved.values()) if not saved.cached]
        return sorted(bare, key=lambda saved: len(saved.key))

    def _earlier(self, wanted: Mark, key: bytes) -> list[Saved]:
        """Conversations that these tokens, with a mark, continue, the longest last."""
        earlier = (
            saved
            for saved in list(self.saved.values())
            if len(saved.key) < len(key)
            and key.startswith(saved.key)
            and saved.mark.serves(wanted, token_count(saved.key))
        )
        return sorted(earlier, key=lambda saved: len(saved.key))


# -- the folder, of any model's conversations -----------------------------------------------------


@dataclass(frozen=True)
class Conversation:
    """The files of one conversation.

    Attributes:
        name: The files' common name, without suffix.
        files: The files' paths.
        size: The files' bytes.
        written: The time when the newest was written, in seconds since 1970.
    """

    name: str
    files: tuple[Path, ...]
    size: int
    written: float

    def remove(self) -> None:
        """Remove the files."""
        for path in self.files:
            path.unlink(missing_ok=True)

    def read(self) -> Note | None:
        """The files' note, or None if they are damaged."""
        notes = (
            read_note(path) if path.suffix == NOTE else read_header(path)
            for path in sorted(self.files)  # the small one comes first
        )
        return next((note for note in notes if note is not None), None)


def conversations_in(folder: Path) -> list[Conversation]:
    """All conversations of a folder, of every model.

    Raises:
        OSError: The folder cannot be read.
    """
    files: dict[str, list[tuple[Path, os.stat_result]]] = {}
    for path in folder.iterdir():
        if path.suffix in (NOTE, SUFFIX) and _NAME.fullmatch(path.stem):
            try:
                files.setdefault(path.stem, []).append((path, path.stat()))
            except FileNotFoundError:
                continue  # removed meanwhile
    return [
        Conversation(
            name,
            tuple(path for path, _ in own),
            sum(stat.st_size for _, stat in own),
            max(stat.st_mtime for _, stat in own),
        )
        for name, own in files.items()
    ]


@contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    """Hold a folder's lock.

    Args:
        folder: The folder of conversations.
        how: `fcntl.LOCK_SH`, or `LOCK_EX` for exclusive use; with `LOCK_NB` without waiting.

    Raises:
        BlockingIOError: Another process holds it.
    """
    with (folder / LOCK).open("a") as file:
        fcntl.flock(file, how)
        yield


def read_note(path: Path) -> Note | None:
    """The note of a small file; None if the file is foreign or damaged."""
    try:
        return Note.of_text(path.read_text(encoding="utf-8"))
    except _DAMAGE as error:
        _say_left_aside(path, error)
        return None


def read_header(path: Path) -> Note | None:
    """The note in a file of caches; None as in `read_note`."""
    try:
        with safe_open(str(path), "numpy") as file:
            metadata = json.loads((file.metadata() or {})["metadata"])
        # Files from before pins existed name none.
        pins = checked_spans("pins", json.loads(metadata.get("pins", "[]")))
        own = Mark(metadata["label"], pins)
        return Note(metadata["model"], own, key_of(json.loads(metadata["tokens"])))
    except _DAMAGE as error:
        _say_left_aside(path, error)
        return None


def _say_left_aside(path: Path, error: Exception) -> None:
    logging.warning("Left aside %s, which is no saved conversation: %s", path.name, error)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
