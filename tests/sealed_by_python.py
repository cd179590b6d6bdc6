"""AES-GCM for c_api/tests/ciphers.c, which asks for it through two pipes."""

from __future__ import annotations

import os
import struct
import subprocess
import threading
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

NONCE, TAG, SALT = 12, 16, 32


def run_with_cipher(key: bytes, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a program whose sealed files have this key."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    with os.fdopen(ours_in, "rb") as asked, os.fdopen(ours_out, "wb", buffering=0) as told:
        serving = threading.Thread(target=_serve, args=(key, asked, told), daemon=True)
        serving.start()
        try:
            return subprocess.run(
                [str(word) for word in command],
                env={**os.environ, "CIPHER": f"{theirs_out} {theirs_in}"},
                pass_fds=(theirs_in, theirs_out),
                text=True,
                capture_output=True,
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
            serving.join()


def _serve(key: bytes, asked: Any, told: Any) -> None:
    """Answer until the program has ended."""
    of_files = list[AESGCM]()
    while what := asked.read(1):
        if what == b"o":
            info = b"mlx-h2o sealed rows"
            of_file = HKDF(SHA256(), 32, asked.read(SALT), info).derive(key)
            told.write(struct.pack("<I", len(of_files)))
            of_files.append(AESGCM(of_file))
            continue
        number, n_associated, size = struct.unpack("<III", asked.read(12))
        nonce, associated = asked.read(NONCE), asked.read(n_associated)
        data, tag = asked.read(size), asked.read(TAG)
        try:
            if what == b"e":
                sealed = of_files[number].encrypt(nonce, data, associated)
                data, tag = sealed[:-TAG], sealed[-TAG:]
            else:
                data = of_files[number].decrypt(nonce, data + tag, associated)
            told.write(b"\0" + data + tag)
        except InvalidTag:
            told.write(b"\1")
