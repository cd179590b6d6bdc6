"""Copies that hold the very same arrays until one of them changes its own.

MLX's arrays never change, but for those that decoders have taken out of its graph; and a decoder
copies what anyone else still holds (`Memory.lent`). So copies may share everything.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any, Self


class SharingCopies:
    """What is copied deeply without its arrays."""

    @abstractmethod
    def _shareable(self) -> list[Any]:
        """What a copy takes over as it is."""

    @abstractmethod
    def _refuse_between(self) -> None:
        """Raise RuntimeError in the middle of a step."""

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and copy take along."""
        self._refuse_between()
        return vars(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that shares every array until one of the two changes it."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        state = self.__getstate__()
        memo.update((id(value), value) for value in self._shareable())
        vars(new).update(copy.deepcopy(state, memo))
        return new

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # two caches over one store would overwrite each other's slots
