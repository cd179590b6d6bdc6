"""Walking a model's list of caches, members of a CacheList too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from mlx_lm.models import cache as mlx_lm_cache


class UnmergedCacheList(mlx_lm_cache.CacheList):
    """A list with a member that cannot be merged with others' into a batch, so it cannot be."""

    @property
    def merge(self) -> NoReturn:
        """Not there: mlx-lm asks whether it is, and serves such sequences one at a time."""
        raise AttributeError("Members of this list of caches cannot be batched.")


def listed(members: Sequence[Any]) -> Any:
    """A CacheList of these caches, which says by `merge` whether all of them can be batched."""
    merges = all(hasattr(member, "merge") for member in members)
    kind: Any = mlx_lm_cache.CacheList if merges else UnmergedCacheList
    return kind(*members)


def entries(cache: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The caches of a list, members of a CacheList too, each with its place ("3", "3.1")."""
    for i, entry in enumerate(cache):
        if isinstance(entry, mlx_lm_cache.CacheList):
            yield from entries(entry.caches, f"{prefix}{i}.")
        else:
            yield f"{prefix}{i}", entry


def replaced(entry: Any, make: Any) -> Any:
    """A cache list's entry with its plain KV caches, members of a CacheList too, replaced."""
    if isinstance(entry, mlx_lm_cache.CacheList):
        return listed([replaced(member, make) for member in entry.caches])
    return make() if type(entry) is mlx_lm_cache.KVCache else entry
