"""A model's own caches, available while this package has replaced its library's functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.nn as nn

from mlx_h2o.hosts.loaded import host_of, is_plain, language_model

# Ids of the models whose own caches are being made.
_models: ContextVar[frozenset[int]] = ContextVar("models", default=frozenset())


def stock_caches(model: nn.Module) -> list[Any]:
    """The model's own caches, one an entry; plain ones if it has no `make_cache`.

    A layer that attends to an image alone (mllama's `cross_attn`) gets its keys anew in each step,
    and never brings its cache a token: a window of no tokens takes the place of a plain one.
    """
    model = language_model(model)
    host = host_of(model)
    with _making_caches(model):
        caches = host.make_prompt_cache(model)
    for i, layer in enumerate(getattr(model, "layers", ())):
        if hasattr(layer, "cross_attn") and is_plain(caches[i]):
            caches[i] = host.caches.RotatingKVCache(max_size=0)
    return caches


def makes_stock_caches() -> bool:
    """Whether some model's own caches are being made."""
    return bool(_models.get())


def makes_caches_of(model: nn.Module) -> bool:
    """Whether `stock_caches` is making this model's caches: a call now stands in its place."""
    return id(model) in _models.get()


def caches_beneath(model: nn.Module) -> list[Any]:
    """The caches of a model whose `make_cache` was replaced by a function that asks for ours.

    Raises:
        ValueError: It was replaced in the model's class, so that the original is lost.
    """
    if "make_cache" not in vars(model):
        raise ValueError(
            f"{type(model).__name__}.make_cache was replaced, in the class, by one that asks "
            "mlx_h2o for caches, and so the model's own cannot be made. Call "
            "mlx_h2o.install(max_size=...) instead: it bounds every cache that its library makes."
        )
    own = getattr(type(model), "make_cache", None)
    if own is None:
        return [host_of(model).caches.KVCache() for _ in model.layers]
    caches: list[Any] = own(model)
    return caches


@contextmanager
def _making_caches(model: nn.Module) -> Iterator[None]:
    token = _models.set(_models.get() | {id(model)})
    try:
        yield
    finally:
        _models.reset(token)
