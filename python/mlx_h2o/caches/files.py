"""Prompt caches in files, with everything that a conversation needs to go on, evicted or not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast, overload

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_h2o import _checks
from mlx_h2o._checks import MOST_TOKENS
from mlx_h2o._files import check_header, replacing
from mlx_h2o.caches import kinds
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.cache_lists import entries, listed
from mlx_h2o.hosts.host import Host
from mlx_h2o.hosts.loaded import hosts, is_cache, library_of
from mlx_h2o.hosts.mlx_lm import MLX_LM
from mlx_h2o.layer import saved_state
from mlx_h2o.loading.fingerprint import fingerprint

FILE_FORMAT = "mlx-h2o prompt cache"
FILE_VERSION = "1"
#: The metadata's name of a model's digest.
WEIGHTS = "weights"

# Exceptions from reading damaged settings.
_DAMAGE = (
    *(ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError),
    *(RecursionError, RuntimeError),
)


def save_prompt_cache(
    file_name: str | Path,
    cache: list[Any],
    metadata: dict[str, str] | None = None,
    *,
    model: nn.Module | None = None,
) -> None:
    """Write a prompt cache, evicted or not, with positions, scores, policy and remainder.

    Args:
        file_name: The file to write, of any name; an existing file is replaced once all is written.
        cache: From `make_prompt_cache`, possibly with mlx-lm's own caches in it.
        metadata: Strings to keep with it.
        model: The cache's model. A digest of its weights and configuration is kept with the
            metadata, so that `load_prompt_cache(model=)` refuses the file for any other.

    Raises:
        ValueError: The cache has an entry that cannot be saved.
        OSError: The file cannot be written.
    """
    arrays: dict[str, mx.array] = {}
    saved = [_saved(entry, f"{i}", arrays) for i, entry in enumerate(cache)]
    about = {} if model is None else {WEIGHTS: fingerprint(model)}
    header = {
        "format": FILE_FORMAT,
        "version": FILE_VERSION,
        "metadata": json.dumps({**(metadata or {}), **about}),
        "entries": json.dumps(saved),
    }
    header["digest"] = _digest(arrays, header)
    # safetensors files of mlx need at least one array, so every file has one. MLX appends
    # .safetensors to any other name.
    with replacing(Path(file_name), ".safetensors") as temporary:
        try:
            mx.save_safetensors(str(temporary), arrays or {"empty": mx.zeros(1)}, header)
        except RuntimeError as error:  # MLX's exception for any failure of a file
            raise OSError(f"Cannot write {file_name}: {error}") from error


def require_savable(cache: Sequence[Any]) -> None:
    """Raise ValueError unless `save_prompt_cache` can save every entry of a cache list."""
    for _, entry in entries(cache):
        kind = type(entry).__name__
        if not isinstance(entry, BoundedKVCache) and library_of(entry) is None:
            raise ValueError(
                f"Cannot save a {kind}: it is neither mlx-h2o's cache nor its library's own."
            )


@overload
def load_prompt_cache(
    file_name: str | Path,
    return_metadata: Literal[False] = False,
    *,
    model: nn.Module | None = None,
) -> list[Any]: ...


@overload
def load_prompt_cache(
    file_name: str | Path, return_metadata: Literal[True], *, model: nn.Module | None = None
) -> tuple[list[Any], dict[str, str]]: ...


def load_prompt_cache(
    file_name: str | Path, return_metadata: bool = False, *, model: nn.Module | None = None
) -> list[Any] | tuple[list[Any], dict[str, str]]:
    """Read a file of `save_prompt_cache`.

    Args:
        file_name: The file.
        return_metadata: Whether to return what was saved beside the cache too.
        model: The model that goes on from it.

    Returns:
        The cache of a model; with `return_metadata` a pair of it and the metadata.

    Raises:
        ValueError: The file is missing, truncated, foreign, changed, of another version, or of
            another model than `model`.
    """
    try:
        check_header(file_name)
        arrays, header = _read(str(file_name))
        mx.eval(arrays)
    except (OSError, RuntimeError, ValueError, MemoryError, OverflowError) as error:
        raise ValueError(f"{file_name} is no readable prompt cache: {error}") from error
    if header.get("format") != FILE_FORMAT:
        raise ValueError(
            f"{file_name} was not written by mlx_h2o.save_prompt_cache (mlx-lm's own files load "
            "with mlx_lm.models.cache.load_prompt_cache)."
        )
    if header.get("version") != FILE_VERSION:
        raise ValueError(
            f"{file_name} has format version {header.get('version')}; this mlx-h2o reads "
            f"{FILE_VERSION}."
        )
    digest = header.pop("digest", "")
    arrays.pop("empty", None)
    if digest != _digest(arrays, header):
        raise ValueError(f"{file_name} was changed or damaged after it was saved.")
    routing.install()
    try:
        entries = json.loads(header["entries"])
        cache = [_restored(entry, f"{i}", arrays) for i, entry in enumerate(entries)]
        metadata = dict(json.loads(header["metadata"]))
    except _DAMAGE as error:
        raise ValueError(f"{file_name} is damaged: {error}") from error
    if model is not None and metadata.get(WEIGHTS) not in (None, fingerprint(model)):
        raise ValueError(f"{file_name} is of a model with other weights or another configuration.")
    return (cache, metadata) if return_metadata else cache


def _read(file_name: str) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays and metadata of a safetensors file."""
    return cast(
        tuple[dict[str, mx.array], dict[str, str]],
        mx.load(file_name, format="safetensors", return_metadata=True),
    )


def _saved(entry: Any, prefix: str, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """Put an entry's arrays under its prefix; return the rest of it as JSON types."""
    if is_cache(entry, "CacheList"):
        members = [_saved(m, f"{prefix}.{i}", arrays) for i, m in enumerate(entry.caches)]
        return {"class": "CacheList", "members": members, **_library(entry)}
    if isinstance(entry, BoundedKVCache):
        own, config = saved_state.used_only(entry.arrays(), entry.config())
        arrays.update({f"{prefix}.{name}": array for name, array in own.items()})
        return {"class": "H2OKVCache", "config": config}
    require_savable([entry])
    scalars = {}
    for path, leaf in cast(list[tuple[str, Any]], tree_flatten([entry.state])):
        if isinstance(leaf, mx.array):
            arrays[f"{prefix}.{path}"] = leaf
        else:
            scalars[path] = leaf
    kind = type(entry).__name__
    meta_state = getattr(entry, "meta_state", None)
    return {"class": kind, "scalars": scalars, "meta_state": meta_state, **_library(entry)}


def _library(entry: Any) -> dict[str, str]:
    """The library of a cache, for a file; nothing stands for mlx-lm."""
    host = library_of(entry)
    return {"library": host.name} if host is not None and host is not MLX_LM else {}


def _host(entry: dict[str, Any]) -> Host:
    """The library of a cache that a file describes."""
    name = entry.get("library", MLX_LM.name)
    match = next((host for host in hosts() if host.name == name), None)
    if match is None:
        raise ValueError(f"It holds caches of {name}: import that first.")
    return match


def _restored(entry: dict[str, Any], prefix: str, arrays: dict[str, mx.array]) -> Any:
    """The cache that `_saved` described."""
    if entry["class"] == "CacheList":
        members = [_restored(m, f"{prefix}.{i}", arrays) for i, m in enumerate(entry["members"])]
        return listed(members, _host(entry).caches.CacheList)
    own = {
        name.removeprefix(f"{prefix}."): array
        for name, array in arrays.items()
        if name.startswith(f"{prefix}.")
    }
    if entry["class"] == "H2OKVCache":
        return kinds.restored((own, json.dumps(entry["config"])))
    host = _host(entry)
    cls = getattr(host.caches, entry["class"], None)
    if not isinstance(cls, type) or not hasattr(cls, "from_state"):
        raise ValueError(f"This {host.name} has no {entry['class']} to load.")
    _check_numbers(entry["scalars"], entry.get("meta_state"))
    leaves = sorted({**own, **entry["scalars"]}.items(), key=lambda item: _path_key(item[0]))
    state = cast(list[Any], tree_unflatten(leaves))[0] if leaves else []
    if entry.get("meta_state") is None:
        return cls.from_state(state)
    return cls.from_state(state, entry["meta_state"])


def _check_numbers(*parts: Any) -> None:
    """Raise ValueError unless the numbers of mlx-lm's caches (some are texts) are token counts."""
    for part in parts:
        if isinstance(part, dict | list | tuple):
            _check_numbers(*(part.values() if isinstance(part, dict) else part))
        elif isinstance(part, int | float | str) and str(part).lstrip("-").isdigit():
            _checks.whole("a cache's number", int(part), -MOST_TOKENS, MOST_TOKENS)


def _path_key(path: str) -> list[tuple[int, str]]:
    """A sort key by which "0.2" comes before "0.10"."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in path.split(".")]


def _digest(arrays: dict[str, mx.array], header: dict[str, str]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all arrays, and the header."""
    digest = hashlib.sha256()
    for key in sorted(header):
        digest.update(f"{key}={header[key]}\n".encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        if array.size:
            flat = mx.contiguous(array.flatten())
            digest.update(np.array(flat.view(mx.uint8)).tobytes())
    return digest.hexdigest()
