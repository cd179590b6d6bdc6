"""What caches are known by: their settings, their pins and their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_h2o.slots.pins import Span, among_first

#: The array type code of a token in a key.
_TOKEN = "q"


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


def common_tokens(a: bytes, b: bytes) -> int:
    """The number of equal tokens at the beginning of two keys."""
    x, y = np.frombuffer(a, np.int64), np.frombuffer(b, np.int64)
    count = min(len(x), len(y))
    different = np.flatnonzero(x[:count] != y[:count])
    return int(different[0]) if len(different) else count


@dataclass(frozen=True)
class Mark:
    """The model, the settings and the requested pins with which caches began.

    The pins that a request asked for are not always those of its caches in the end: the server's
    page can pin more tokens and unpin others.

    Attributes:
        label: The settings as text.
        pins: The pins that its requests asked for.
        model: The model's fingerprint.
    """

    label: str = ""
    pins: tuple[Span, ...] = ()
    model: str = ""

    def serves(self, wanted: Mark, count: int) -> bool:
        """Whether caches with this mark may serve a prompt with another mark.

        The pins among a prompt's first tokens decide which other tokens were evicted, so they must
        be the same; and pins on later tokens have taken their room already.

        Args:
            wanted: The prompt's mark.
            count: The number of its tokens that the caches have read.
        """
        same = self.pins in (wanted.pins, among_first(wanted.pins, count))
        return same and (self.label, self.model) == (wanted.label, wanted.model)


@dataclass(frozen=True)
class Place:
    """The place of a conversation's caches among all others.

    Attributes:
        mark: The mark of their settings and pins.
        key: The key of their tokens.
    """

    mark: Mark
    key: bytes
