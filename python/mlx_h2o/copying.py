"""Copies that hold the very same arrays until one of them changes its own.

MLX's arrays never change, but for those that decoders have taken out of its graph; and a decoder
copies what anyone else still holds (`Memory.lent`). So copies may share everything.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any, Self

import mlx.core as mx

from mlx_h2o.frame import Frame
from mlx_h2o.layer import Layer
from mlx_h2o.query_centres import QueryCentres


class SharingCopies:
    """What is copied deeply without its arrays."""

    @property
    @abstractmethod
    def frame(self) -> Frame | None:
        """In which packed keys are stored."""

    @property
    @abstractmethod
    def centres(self) -> QueryCentres | None:
        """Of the layer's queries."""

    @property
    @abstractmethod
    def layer(self) -> Layer | None:
        """What is held, once rows have come."""

    @abstractmethod
    def _settled(self) -> list[Any]:
        """What never changes beside the arrays."""

    @abstractmethod
    def require_at_rest(self) -> None:
        """Raise RuntimeError in the middle of a step."""

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and copy take along."""
        self.require_at_rest()
        return vars(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that shares every array until one of the two changes it."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        state, shared = self.__getstate__(), self._settled()
        if self.layer is not None:
            shared += [self.layer.settings, *_arrays(self.layer)]
        memo.update((id(value), value) for value in shared)
        vars(new).update(copy.deepcopy(state, memo))
        return new

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # two caches over one store would overwrite each other's slots

    def pieces(self) -> dict[int, int]:
        """The bytes of `nbytes`, by an identity that copies share while they hold the same arrays.

        The union over several caches counts what they share once.
        """
        held = [part for part in (self.frame, self.centres) if part is not None]
        constants = {id(part): part.nbytes for part in held}
        return constants | (_pieces(self.layer) if self.layer else {})


def _arrays(layer: Layer) -> list[mx.array]:
    """All arrays of a layer, those of the steps to undo too."""
    remainder = layer.evictions.remainder.arrays.values()
    return [*layer.arrays().values(), *remainder, *_undone(layer)]


def _pieces(layer: Layer) -> dict[int, int]:
    """Bytes of everything that a layer holds, by identity."""
    if (decoder := layer.memory.decoder) is not None:  # whose arrays are its own
        return {id(decoder): decoder.nbytes, id(layer.journal): layer.journal.nbytes}
    return {id(array): array.nbytes for array in (*layer.arrays().values(), *_undone(layer))}


def _undone(layer: Layer) -> list[mx.array]:
    return [array for step in layer.journal.steps for array in step.arrays.values()]
