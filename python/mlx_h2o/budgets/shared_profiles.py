"""Profiles shared as files: a folder, or its copy on the web, with an index of digests.

`publish` puts a profile into a folder, `fetched` takes one from a folder or an https address. The
index holds the SHA-256 of each file, which is checked before the file is read. It protects against
damage and mistakes. A changed folder is noticed only by a digest that came from elsewhere.

Nothing here runs unless a user asks for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlx_h2o._utils import checks
from mlx_h2o._utils.files import replacing
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_store import SUFFIX

INDEX = "index.json"
FORMAT, VERSION = "mlx-h2o profiles", 1
#: A profile's name: it is part of a file's name and of an address.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
DIGEST = re.compile(r"[0-9a-f]{64}")
#: The largest files that are read, in bytes. SmolLM2's profile (90 KV heads of width 64) takes
#: 0.3 MB; one of 1,000 heads of width 128 takes some 5 MB.
LARGEST_PROFILE = 64 << 20
LARGEST_INDEX = 4 << 20
#: Seconds without an answer after which a server counts as gone.
PATIENCE = 30
#: Hosts from which plain http is taken: this machine itself.
LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Entry:
    """What an index tells of a profile.

    Attributes:
        sha256: Digest of the file, in hexadecimal digits.
        nbytes: Size of the file.
        model_type: As in the model's config.
        layers: Layers with a KV cache that is bounded.
        kv_heads: KV heads of all these layers.
        made: The date of the measurement, "2026-11-25"; empty if unknown.
        quick: Whether it was measured quickly, as at a model's first use.
    """

    sha256: str
    nbytes: int
    model_type: str
    layers: int
    kv_heads: int
    made: str
    quick: bool

    @classmethod
    def of(cls, profile: Profile, text: bytes) -> Entry:
        """The entry of a profile whose file has these bytes."""
        heads = profile.model.kv_heads
        return cls(
            hashlib.sha256(text).hexdigest(),
            len(text),
            profile.model.model_type,
            len(heads),
            sum(heads),
            str(profile.details.get("date", "")),
            bool(profile.details.get("quick", False)),
        )

    @classmethod
    def of_json(cls, data: Any) -> Entry:
        """The entry that `asdict` wrote, read from JSON.

        Raises:
            ValueError, TypeError: It is damaged.
        """
        entry = cls(**data)
        if not DIGEST.fullmatch(entry.sha256):
            raise ValueError("sha256 must be 64 hexadecimal digits")
        checks.whole("nbytes", entry.nbytes, 1, LARGEST_PROFILE)
        checks.whole("layers", entry.layers, 0)
        checks.whole("kv_heads", entry.kv_heads, 0)
        if not all(isinstance(text, str) for text in (entry.model_type, entry.made)):
            raise ValueError("model_type and made must be texts")
        if not isinstance(entry.quick, bool):
            raise ValueError("quick must be true or false")
        return entry


def name_for(model: str) -> str:
    """The name under which a model's profile is published: the last part of its own, in small.

    Args:
        model: A hub id, a folder, or a name of ours: "mlx-community/Qwen3-0.6B-4bit".

    Raises:
        ValueError: It has no such part; a name must be chosen.
    """
    last = re.sub(r"[^a-z0-9._-]+", "-", Path(model).name.lower().removesuffix(".gguf"))
    return checked_name(last.strip("-._"))


def checked_name(name: str) -> str:
    """The name itself.

    Raises:
        ValueError: A profile cannot be called so.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"A profile's name has small letters, digits, '.', '_' and '-', at most 100; got "
            f"{checks.shown(name)}."
        )
    return name


def publish(profile: Profile, name: str, folder: Path) -> Entry:
    """Write a profile into a folder and its index; a former one of that name is replaced.

    Args:
        profile: The profile.
        name: Its name there.
        folder: The folder, which is there (`_utils.files.require_folder` makes it).

    Raises:
        ValueError: The name or the folder's index is invalid.
        OSError: The folder cannot be written.
    """
    checked_name(name)
    entries = entries_of(str(folder)) if (folder / INDEX).exists() else {}
    with replacing(folder / f"{name}{SUFFIX}") as temporary:
        profile.save(temporary)
        entry = Entry.of(profile, temporary.read_bytes())
    entries[name] = entry
    index = {
        "format": FORMAT,
        "version": VERSION,
        "profiles": {each: asdict(entries[each]) for each in sorted(entries)},
    }
    with replacing(folder / INDEX) as temporary:
        temporary.write_text(json.dumps(index, indent=1) + "\n")
    return entry


def entries_of(source: str) -> dict[str, Entry]:
    """The profiles of a folder or an address, by name.

    Raises:
        ValueError: There is no index, or it is damaged.
    """
    try:
        data = json.loads(_read(source, INDEX, LARGEST_INDEX))
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it has format {data['format']!r}, version {data['version']!r}")
        return {checked_name(name): Entry.of_json(of) for name, of in data["profiles"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"Cannot read the index of profiles of {source}: {error}") from error


def fetched(source: str, name: str, sha256: str | None = None) -> Profile:
    """A profile from a folder or an address, checked by its digest.

    Args:
        source: A folder, or an https address of one.
        name: The profile's name there.
        sha256: The digest that it must have, if it is known from elsewhere.

    Raises:
        ValueError: It is not there, is not what the digest says, or is no profile.
    """
    entries = entries_of(source)
    if name not in entries:
        known = ", ".join(sorted(entries)) or "none"
        raise ValueError(f"{source} has no profile {checks.shown(name)}; it has: {known}.")
    entry = entries[name]
    try:
        text = _read(source, f"{name}{SUFFIX}", entry.nbytes)
    except ValueError as error:
        raise ValueError(f"Cannot read the profile {name} of {source}: {error}") from error
    found = hashlib.sha256(text).hexdigest()
    for wanted, by in ((entry.sha256, "its index says"), (sha256, "was asked for")):
        if wanted is not None and found != wanted.lower():
            raise ValueError(
                f"The profile {name} of {source} has SHA-256 {found}, but {wanted} {by}: nothing "
                "was kept."
            )
    return Profile.of_text(text, f"{name} of {source}")


def _read(source: str, file: str, most: int) -> bytes:
    """A file of a folder or an address.

    Raises:
        ValueError: It cannot be had, or is larger than `most` bytes.
    """
    if "://" in source:
        text = _download(f"{source.rstrip('/')}/{file}", most)
    else:
        try:
            with (Path(source) / file).open("rb") as opened:
                text = opened.read(most + 1)
        except OSError as error:
            raise ValueError(f"{Path(source) / file}: {error.strerror}") from error
    if len(text) > most:
        raise ValueError(f"{file} is larger than {most:,} bytes")
    return text


def _download(address: str, most: int) -> bytes:
    """At most one byte more than `most` of what lies at an address."""
    _require_safe(address)
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            _require_safe(answer.geturl())  # it may have been sent on
            text: bytes = answer.read(most + 1)
            return text
    except (OSError, urllib.error.URLError) as error:
        raise ValueError(f"{address}: {error}") from error


def _require_safe(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOCAL):
        raise ValueError(f"{address} is not an https address")
