"""Conversations in files: written whole or not at all, found again after a restart."""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from mlx_h2o.bounded_cache import BoundedKVCache
from mlx_h2o.cache_file import load_prompt_cache, save_prompt_cache
from mlx_h2o.cache_lists import entries

SUFFIX = ".safetensors"
#: A token of a key: prompts with images have ids beyond 32 bits.
_TOKEN = "q"


def key_of(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes, of which one begins with another as the tokens do."""
    return array(_TOKEN, tokens).tobytes()


def token_count(key: bytes) -> int:
    """How many tokens a key stands for."""
    return len(key) // array(_TOKEN).itemsize


def tokens_of(key: bytes) -> list[int]:
    """The tokens that `key_of` made a key of."""
    tokens = array(_TOKEN)
    tokens.frombytes(key)
    return tokens.tolist()


@dataclass(frozen=True)
class Saved:
    """A conversation in a file.

    Attributes:
        label: Of its settings.
        key: Of its tokens.
        path: Where it is.
    """

    label: str
    key: bytes
    path: Path


class Sessions:
    """A folder of conversations of one model.

    Args:
        folder: Made if need be, for its owner's eyes only.
        model: The model's name: files of other models stay unseen.

    Raises:
        OSError: The folder cannot be made or read.
    """

    def __init__(self, folder: Path, model: str):
        self.folder, self.model = folder, model
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.saved: dict[tuple[str, bytes], Saved] = {}
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            found = self._read_header(path)
            if found is not None:
                self.saved[found.label, found.key] = found

    def _read_header(self, path: Path) -> Saved | None:
        """What a file says that it holds; None where it is another's, or damaged."""
        try:
            with safe_open(str(path), "numpy") as file:
                metadata = json.loads((file.metadata() or {})["metadata"])
            if metadata["model"] != self.model:
                return None
            return Saved(metadata["label"], key_of(json.loads(metadata["tokens"])), path)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            logging.warning("Left aside %s, which is no saved conversation: %s", path.name, error)
            return None

    def path_of(self, label: str, key: bytes) -> Path:
        """Where a conversation's file is; nothing that a client sent is part of its name."""
        digest = hashlib.sha256(f"{self.model}\n{label}\n".encode() + key).hexdigest()
        return self.folder / f"{digest[:40]}{SUFFIX}"

    def save(self, label: str, key: bytes, cache: list[Any]) -> None:
        """Write a conversation; a file that is there already is left as it is.

        Raises:
            OSError: It cannot be written.
        """
        if (label, key) in self.saved:
            return
        path = self.path_of(label, key)
        metadata = {"model": self.model, "label": label, "tokens": json.dumps(tokens_of(key))}
        save_prompt_cache(path, cache, metadata)
        self.saved[label, key] = Saved(label, key, path)

    def save_again(self, label: str, key: bytes, cache: list[Any]) -> None:
        """Write a conversation that has changed; errors as in `save`, and its file stays then."""
        before = self.saved.pop((label, key), None)
        try:
            self.save(label, key, cache)
        except OSError:
            if before is not None:
                self.saved[label, key] = before
            raise

    def load(self, saved: Saved) -> list[Any] | None:
        """A conversation's caches, evaluated; None, and it is forgotten, where the file is bad."""
        try:
            cache: Any = load_prompt_cache(saved.path)
            mx.eval([entry.state for entry in cache])
            for _, entry in entries(cache):
                if isinstance(entry, BoundedKVCache):
                    entry.label = saved.label
            return list(cache)
        except (OSError, ValueError, RuntimeError) as error:
            logging.warning("Cannot go on with %s: %s", saved.path.name, error)
            self.saved.pop((saved.label, saved.key), None)
            return None

    def forget(self, label: str, key: bytes) -> None:
        """Remove a conversation's file, if there is one."""
        saved = self.saved.pop((label, key), None)
        if saved is not None:
            saved.path.unlink(missing_ok=True)

    def longest_before(self, label: str, key: bytes) -> Saved | None:
        """The longest conversation that these tokens go on from."""
        before = (
            saved
            for saved in self.saved.values()
            if saved.label == label and len(saved.key) < len(key) and key.startswith(saved.key)
        )
        return max(before, key=lambda saved: len(saved.key), default=None)
