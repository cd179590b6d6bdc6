"""What was said, by its text: so that a conversation goes on from the tokens that said it.

A model's tokens are seldom those that its text is tokenized to, and what a client sends back is
text. A prompt that begins with the text of a known conversation gets that conversation's tokens,
as they were read and sampled, and only what follows them is tokenized.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict

#: Bytes of all tokens that are remembered; what was said least recently is forgotten first.
MOST_BYTES = 64 << 20
#: Of one prompt: conversations that it may go on from.
MOST_SPELLINGS = 4

#: A text's characters and digest.
_Place = tuple[int, bytes]


class Transcripts:
    """Tokens of conversations by their texts; any thread may ask.

    Args:
        most_bytes: That the tokens may take.
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
            text: Of all of it, as a prompt that goes on with it begins.
            key: Of its tokens (`sessions.key_of`).
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
        """Conversations that a text begins with: how many characters, and the tokens' key.

        The longest come first, and of those with the same text what was said last.
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
