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

from mlx_h2o.cache_file import load_prompt_cache, save_prompt_cache
from mlx_h2o.pins import checked_spans
from mlx_h2o.serve.marks import Mark, mark

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
        mark: Of its settings, and of the pins that were asked for.
        key: Of its tokens.
        path: Where it is.
    """

    mark: Mark
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
        self.saved: dict[Path, Saved] = {}
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            found = self._read_header(path)
            if found is not None:
                self.saved[path] = found

    def _read_header(self, path: Path) -> Saved | None:
        """What a file says that it holds; None where it is another's, or damaged."""
        try:
            with safe_open(str(path), "numpy") as file:
                metadata = json.loads((file.metadata() or {})["metadata"])
            if metadata["model"] != self.model:
                return None
            # Files from before there were pins name none.
            pins = checked_spans("pins", json.loads(metadata.get("pins", "[]")))
            own = Mark(metadata["label"], pins)
            return Saved(own, key_of(json.loads(metadata["tokens"])), path)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            logging.warning("Left aside %s, which is no saved conversation: %s", path.name, error)
            return None

    def path_of(self, own: Mark, key: bytes) -> Path:
        """Where a conversation's file is; nothing that a client sent is part of its name."""
        about = f"{self.model}\n{own.label}\n" + (f"{own.pins}\n" if own.pins else "")
        digest = hashlib.sha256(about.encode() + key).hexdigest()
        return self.folder / f"{digest[:40]}{SUFFIX}"

    def save(self, own: Mark, key: bytes, cache: list[Any]) -> None:
        """Write a conversation; a file that is there already is left as it is.

        Raises:
            OSError: It cannot be written.
        """
        path = self.path_of(own, key)
        if path not in self.saved:
            self.save_again(own, key, cache)

    def save_again(self, own: Mark, key: bytes, cache: list[Any]) -> None:
        """Write a conversation that has changed; errors as in `save`, and its file stays then."""
        path = self.path_of(own, key)
        metadata = {
            "model": self.model,
            "label": own.label,
            "tokens": json.dumps(tokens_of(key)),
            "pins": json.dumps(own.pins),
        }
        save_prompt_cache(path, cache, metadata)
        self.saved[path] = Saved(own, key, path)

    def load(self, saved: Saved) -> list[Any] | None:
        """A conversation's caches, evaluated; None, and it is forgotten, where the file is bad."""
        try:
            cache: Any = load_prompt_cache(saved.path)
            mx.eval([entry.state for entry in cache])
            mark(cache, saved.mark)
            return list(cache)
        except (OSError, ValueError, RuntimeError) as error:
            logging.warning("Cannot go on with %s: %s", saved.path.name, error)
            self.saved.pop(saved.path, None)
            return None

    def forget(self, saved: Saved) -> None:
        """Remove a conversation's file."""
        self.saved.pop(saved.path, None)
        saved.path.unlink(missing_ok=True)

    def longest_before(self, wanted: Mark, key: bytes) -> Saved | None:
        """The longest conversation that these tokens, with a mark, go on from."""
        before = (
            saved
            for saved in self.saved.values()
            if len(saved.key) < len(key)
            and key.startswith(saved.key)
            and saved.mark.serves(wanted, token_count(saved.key))
        )
        return max(before, key=lambda saved: len(saved.key), default=None)
