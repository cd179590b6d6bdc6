"""The libraries of models that are loaded: mlx-lm always, mlx-vlm once it is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.hosts.host import Host
from mlx_h2o.hosts.mlx_lm import MLX_LM
from mlx_h2o.loading.vlm_text import TextModel

# The module of mlx-vlm that defines attention; its models and caches are imported from there on.
LAST_NEEDED = "mlx_vlm.models.base"


#: Where models of mlx-vlm note the positions of the tokens that they have read.
NOTED = frozenset({"_position_ids", "_rope_deltas"})


def hosts() -> list[Host]:
    """The libraries that are loaded."""
    if LAST_NEEDED not in sys.modules:
        return [MLX_LM]
    return [MLX_LM, importlib.import_module("mlx_h2o.hosts.mlx_vlm").MLX_VLM]


def host_of(model: nn.Module) -> Host:
    """The library of a model; mlx-lm for a model of none."""
    of = model.language_model if isinstance(model, TextModel) else model
    package = type(of).__module__.partition(".")[0]
    return next((host for host in hosts() if host.package == package), MLX_LM)


def is_cache(entry: Any, *kinds: str) -> bool:
    """Whether a cache is of one of these classes, in any library."""
    return any(isinstance(entry, getattr(host.caches, kind)) for host in hosts() for kind in kinds)


def is_plain(entry: Any) -> bool:
    """Whether a cache is a library's `KVCache`, which grows by every token, and no subclass."""
    return is_exactly(entry, "KVCache")


def is_exactly(entry: Any, kind: str) -> bool:
    """Whether a cache's class is this one of a library, and no subclass."""
    return type(entry).__name__ == kind and library_of(entry) is not None


def library_of(entry: Any) -> Host | None:
    """The library that defines a cache's very class; None if none does."""
    name, kind = type(entry).__name__, type(entry)
    return next((host for host in hosts() if getattr(host.caches, name, None) is kind), None)


def language_model(model: nn.Module) -> nn.Module:
    """The part of a model that has a KV cache: all of it, or that beside what sees images."""
    if host_of(model) is MLX_LM:
        return model
    part = model
    while isinstance(inner := getattr(part, "language_model", None), nn.Module):
        if inner is part:  # phi3_v names itself
            break
        part = inner
    return part


def logits_of(model: nn.Module, tokens: mx.array, cache: Sequence[Any] | None) -> mx.array:
    """The logits `[B, L, V]` of a model of any library, not computed yet.

    Args:
        model: The model.
        tokens: `[B, L]`.
        cache: Its caches, or None.
    """
    out: Any = language_model(model)(tokens, cache=cache)
    logits: mx.array = getattr(out, "logits", out)
    return logits


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore afterwards what a model notes in itself; mlx-vlm's M-RoPE positions begin anew.

    gemma3n, for one, writes into its weights. What a probe leaves there is lazy, and another thread
    could not evaluate it.
    """
    parts = [(part, dict(part), dict(vars(part))) for _, part in model.named_modules()]
    for part, items, attributes in parts:
        for name in NOTED.intersection(items.keys() | attributes.keys()):
            setattr(part, name, None)  # of the last conversation, or batch
    try:
        yield
    finally:
        for part, items, attributes in parts:
            for own, before in ((part, items), (vars(part), attributes)):
                own.clear()
                dict.update(own, before)  # a module's own `update` is another


class _Watch(MetaPathFinder):
    """Calls back when modules have been imported."""

    def __init__(self) -> None:
        #: By a module's name: what is to be done, beside who asked for it.
        self.actions: dict[str, list[tuple[Any, Callable[[], None]]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._then_act(spec.loader.exec_module)  # type: ignore[assignment]
        return spec

    def _then_act(self, run: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def exec_module(module: ModuleType) -> None:
            run(module)
            for _, action in list(self.actions.get(module.__name__, ())):
                action()

        return exec_module


_watch = _Watch()


def when_imported(name: str, owner: Any, action: Callable[[], None]) -> None:
    """Do something now if a module is imported, and else once it is.

    Args:
        name: The module's name.
        owner: Who `forget` names to end this.
        action: What is to be done.
    """
    _watch.actions.setdefault(name, []).append((owner, action))
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    if name in sys.modules:
        action()


def for_each_host(action: Callable[[Host], None]) -> None:
    """Do something for each library that is loaded, and for mlx-vlm when it is imported later."""
    action(MLX_LM)
    when_imported(LAST_NEEDED, action, lambda: action(hosts()[1]))


def forget(owner: Any) -> None:
    """End `when_imported` and `for_each_host`; unknown owners are ignored."""
    modules = {
        name: [pair for pair in pairs if pair[0] is not owner]
        for name, pairs in _watch.actions.items()
    }
    _watch.actions = {name: pairs for name, pairs in modules.items() if pairs}
    if not _watch.actions and _watch in sys.meta_path:
        sys.meta_path.remove(_watch)
