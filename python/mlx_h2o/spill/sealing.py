"""Sealing of a file's segments with a key: AES-GCM, of the optional package `cryptography`.

Each file has a key of its own (HKDF of the given key and 32 random bytes in the header), so that
nonces must differ within a file only. A nonce is 8 random bytes of each writing of a block, and the
segment's index; so a block that is written a second time, after tokens were taken back or after a
crash, never uses a nonce again. A segment is sealed together with its block's index and the
header's checksum: a block of another place or file does not open.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import Any, Protocol

from mlx_h2o.spill.layout import TAG, DamagedFile

_PLACE = struct.Struct("<QII")
#: Bytes of the part of a nonce that is new at each writing.
NONCE = 8
_CHECK = b"mlx-h2o rows"
LEAST_KEY, MOST_KEY = 16, 1024


class _Cipher(Protocol):
    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes: ...

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes: ...


class Seal:
    """The cipher of one file.

    Args:
        key: 16 to 1024 bytes that are hard to guess (no password).
        salt: The file's 32 random bytes.

    Raises:
        ValueError: The key is too short or too long.
        ImportError: The package `cryptography` is not installed.
    """

    def __init__(self, key: bytes, salt: bytes):
        if not isinstance(key, bytes) or not LEAST_KEY <= len(key) <= MOST_KEY:
            raise ValueError(f"key must be {LEAST_KEY} to {MOST_KEY} bytes.")
        self._cipher: _Cipher = _aes_gcm()(_derived(key, salt))

    def encrypt(self, rows: bytes, nonce: bytes, place: bytes, segment: int) -> tuple[bytes, bytes]:
        """A segment's bytes sealed, and its tag.

        Args:
            rows: The segment.
            nonce: 8 bytes of this writing of the block.
            place: From `place_of`.
            segment: The segment's index in its block.
        """
        sealed = self._cipher.encrypt(nonce + struct.pack("<I", segment), rows, place)
        return sealed[:-TAG], sealed[-TAG:]

    def decrypt(self, sealed: bytes, tag: bytes, nonce: bytes, place: bytes, segment: int) -> bytes:
        """A segment's bytes.

        Args:
            sealed: The segment as it is stored.
            tag: Its authentication tag.
            nonce: 8 bytes of the writing of its block.
            place: From `place_of`.
            segment: Its index in its block.

        Raises:
            DamagedFile: They were not sealed with this key, for this place.
        """
        try:
            whole = nonce + struct.pack("<I", segment)
            return self._cipher.decrypt(whole, sealed + tag, place)
        except Exception as error:  # InvalidTag, of a package that may not be installed
            raise DamagedFile("A sealed block does not open: another key, or damage.") from error

    def check(self) -> str:
        """Text for the header that another key does not open."""
        nonce = os.urandom(NONCE)
        text, tag = self.encrypt(_CHECK, nonce, b"", 0)
        return (nonce + text + tag).hex()

    def require(self, check: Any) -> None:
        """Raise ValueError unless `check` was made with this key."""
        try:
            whole = bytes.fromhex(check)
            nonce, text, tag = whole[:NONCE], whole[NONCE:-TAG], whole[-TAG:]
            if self.decrypt(text, tag, nonce, b"", 0) == _CHECK:
                return
        except (ValueError, TypeError):
            pass
        raise ValueError("This file of rows was sealed with another key.")


def place_of(checksum: int, block: int, rows: int) -> bytes:
    """What a segment is sealed with.

    Args:
        checksum: The header's checksum.
        block: The block's index.
        rows: How many of its rows are in use.
    """
    return _PLACE.pack(block, checksum, rows)


def _derived(key: bytes, salt: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869) of a key, 32 bytes: one round of its second step."""
    drawn = hmac.digest(salt, key, "sha256")
    return hmac.digest(drawn, b"mlx-h2o sealed rows\x01", "sha256")


def _aes_gcm() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ImportError(
            "Sealed files of rows need the package cryptography: pip install 'mlx-h2o[sealing]'."
        ) from error
    return AESGCM
