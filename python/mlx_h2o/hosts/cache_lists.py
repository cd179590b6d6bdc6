"""Walks over a model's list of caches, with the members of a CacheList."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.hosts.loaded import is_cache, is_plain, library_of


class UnmergedCacheList(mlx_lm_cache.CacheList):
    """A CacheList that cannot be batched, because one of its members cannot."""

    @property
    def merge(self) -> NoReturn:
        """Raise AttributeError: mlx-lm looks for `merge`, and serves such sequences singly."""
        raise AttributeError("Members of this list of caches cannot be batched.")


def listed(members: Sequence[Any], kind: Any = mlx_lm_cache.CacheList) -> Any:
    """A CacheList of these caches; it has `merge` only if all of them can be batched.

    Args:
        members: The caches.
        kind: The library's class of lists.
    """
    merges = kind is not mlx_lm_cache.CacheList or all(hasattr(m, "merge") for m in members)
    return (kind if merges else UnmergedCacheList)(*members)


def entries(cache: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each cache of a list, members of a CacheList too, with its place ("3", "3.1")."""
    for i, entry in enumerate(cache):
        if is_cache(entry, "CacheList"):
            yield from entries(entry.caches, f"{prefix}{i}.")
        else:
            yield f"{prefix}{i}", entry


def replaced(entry: Any, make: Any, applies: Callable[[Any], bool] = is_plain) -> Any:
    """A cache list's entry with some caches replaced, members of a CacheList too.

    Args:
        entry: The entry.
        make: Makes the cache in the place of another.
        applies: Whether a cache is replaced: by default each plain KV cache.
    """
    if is_cache(entry, "CacheList"):
        members = [replaced(member, make, applies) for member in entry.caches]
        host = library_of(entry)
        return listed(members, *[host.caches.CacheList] if host else [])
    return make() if applies(entry) else entry
