"""Tokens of conversations by their text, so that a conversation continues from its own tokens.

A model's tokens are seldom those into which its text is tokenized, and a client sends back text. A
prompt that begins with the text of a known conversation gets that conversation's tokens, as they
were read and sampled, and only the text after them is tokenized.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict

#: The most bytes of all remembered tokens; the least recently used are forgotten first.
MOST_BYTES = 64 << 20
#: The most conversations that one prompt may continue.
MOST_SPELLINGS = 4

#: A text's characters and digest.
_Place = tuple[int, bytes]


class Transcripts:
    """Tokens of conversations by their texts; any thread may use it.

    Args:
        most_bytes: The most bytes of the tokens.
    """

    def __init__(self, most_bytes: int = MOST_BYTES):
        self._most_bytes, self._bytes = most_bytes, 0
        self._said: OrderedDict[tuple[_Place, bytes], None] = OrderedDict()
        self._keys: dict[_Place, list[bytes]] = {}
        self._lengths: Counter[int] = Counter()
        self._lock = threading.Lock()

    def add(self, text: str, key: bytes) -> None:
        """Remember a conversation.

        Args:
            text: The whole conversation's text, as a prompt that continues it begins.
            key: The key of its tokens (`sessions.key_of`).
        """
        place = len(text), hashlib.sha256(_bytes(text)).digest()
        with self._lock:
            if (place, key) in self._said:
                self._said.move_to_end((place, key))
                return
            self._said[place, key] = None
            self._keys.setdefault(place, []).append(key)
            self._lengths[len(text)] += 1
            self._bytes += len(key)
            while self._bytes > self._most_bytes:
                self._forget_first()

    def _forget_first(self) -> None:
        (place, key), _ = self._said.popitem(last=False)
        self._keys[place].remove(key)
        if not self._keys[place]:
            del self._keys[place]
        self._lengths[place[0]] -= 1
        if not self._lengths[place[0]]:
            del self._lengths[place[0]]
        self._bytes -= len(key)

    def spellings(self, text: str) -> list[tuple[int, bytes]]:
        """Conversations that a text begins with: their characters, and the key of their tokens.

        The longest come first, and among those with the same text the last used.
        """
        found: list[tuple[int, bytes]] = []
        with self._lock:
            lengths = sorted(length for length in self._lengths if length <= len(text))
            digest, done = hashlib.sha256(), 0
            for length in lengths:
                digest.update(_bytes(text[done:length]))
                done = length
                found += [(length, key) for key in self._keys.get((length, digest.digest()), ())]
        return found[: -MOST_SPELLINGS - 1 : -1]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
