"""Walks over a model's list of caches, with the members of a CacheList."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from mlx_lm.models import cache as mlx_lm_cache


class UnmergedCacheList(mlx_lm_cache.CacheList):
    """A CacheList that cannot be batched, because one of its members cannot."""

    @property
    def merge(self) -> NoReturn:
        """Raise AttributeError: mlx-lm looks for `merge`, and serves such sequences singly."""
        raise AttributeError("Members of this list of caches cannot be batched.")


def listed(members: Sequence[Any]) -> Any:
    """A CacheList of these caches; it has `merge` only if all of them can be batched."""
    merges = all(hasattr(member, "merge") for member in members)
    kind: Any = mlx_lm_cache.CacheList if merges else UnmergedCacheList
    return kind(*members)


def entries(cache: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each cache of a list, members of a CacheList too, with its place ("3", "3.1")."""
    for i, entry in enumerate(cache):
        if isinstance(entry, mlx_lm_cache.CacheList):
            yield from entries(entry.caches, f"{prefix}{i}.")
        else:
            yield f"{prefix}{i}", entry


def replaced(entry: Any, make: Any) -> Any:
    """A cache list's entry with each plain KV cache replaced, members of a CacheList too."""
    if isinstance(entry, mlx_lm_cache.CacheList):
        return listed([replaced(member, make) for member in entry.caches])
    return make() if type(entry) is mlx_lm_cache.KVCache else entry
