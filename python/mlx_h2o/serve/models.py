"""Several models, loaded when they are asked for, within one bound for their weights."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import mlx.core as mx

from mlx_h2o._byte_size import size_text
from mlx_h2o.loading.load import model_path
from mlx_h2o.serve.model import ServedModel

#: The part of the machine's memory that weights and KV memory may take, unless it is said.
MEMORY_PART = 0.75


class Models:
    """The models of a server; for the thread that generates.

    Args:
        names: The models' names.
        memory: The most bytes of all loaded weights and of KV memory; None: no bound.
        load: Loads a model.
    """

    def __init__(
        self, names: Sequence[str], memory: int | None, load: Callable[[str], ServedModel]
    ):
        self._room, self._load = memory, load
        # The last used is at the end.
        self._loaded: dict[str, ServedModel] = {}
        self._sizes = {} if memory is None else {name: file_bytes(name) for name in names}

    def reserve(self, nbytes: int) -> None:
        """Leave so many bytes to KV memory."""
        self._room = None if self._room is None else self._room - nbytes

    @property
    def loaded(self) -> list[ServedModel]:
        """The models that are loaded."""
        return list(self._loaded.values())

    def with_fingerprint(self, fingerprint: str) -> ServedModel | None:
        """A loaded model; None if it is not loaded."""
        return next((one for one in self.loaded if one.fingerprint == fingerprint), None)

    def use(self, name: str, busy: Collection[ServedModel]) -> ServedModel | None:
        """A model, loaded if need be; None while `busy` models leave no room for its weights.

        Models that are not used make room, those unused longest first.

        Args:
            name: The model's name.
            busy: Models that requests use now.

        Raises:
            Exception: It cannot be loaded, whatever the loader raises.
            ValueError: Its weights alone exceed the bound.
        """
        served = self._loaded.pop(name, None)
        if served is None:
            if not self._make_room(name, busy):
                return None
            served = self._load(name)
            self._sizes[name] = served.nbytes
            # The files may have understated the weights, as those of packed weights do.
            if not self._make_room(name, busy):
                return None
        self._loaded[name] = served
        return served

    def _make_room(self, name: str, busy: Collection[ServedModel]) -> bool:
        """Give back models until a model's weights fit; False if busy ones leave no room."""
        if self._room is None:
            return True
        sizes, need = self._sizes, self._sizes[name]
        if need > self._room:
            raise ValueError(
                f"the weights of {name} take {size_text(need)}, and --memory leaves "
                f"{size_text(max(self._room, 0))} to weights."
            )
        if need + sum(sizes[one.name] for one in busy) > self._room:
            return False
        for other in [one.name for one in self.loaded if one not in busy]:
            if need + sum(map(sizes.__getitem__, self._loaded)) <= self._room:
                break
            logging.warning("Gave back the model %s, to make room for %s.", other, name)
            del self._loaded[other]
        gc.collect()
        mx.clear_cache()
        return True

    def clear(self) -> None:
        """Give back all models."""
        self._loaded.clear()


def file_bytes(name: str) -> int:
    """Bytes of a model's files of weights; 0 if they are not on this machine."""
    path = Path(model_path(name))
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return path.stat().st_size if path.is_file() else 0


def machine_bytes() -> int:
    """The bytes that weights and KV memory may take, unless it is said."""
    return int(MEMORY_PART * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
