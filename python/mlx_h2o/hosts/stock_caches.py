"""mlx-lm's own caches of a model, available while this package has replaced mlx-lm's functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

# mlx-lm's own function: `bounding.install` and users put others in its place.
stock_function = mlx_lm_cache.make_prompt_cache
# Ids of the models whose own caches are being made.
_asked: ContextVar[frozenset[int]] = ContextVar("asked", default=frozenset())


def stock_caches(model: nn.Module) -> list[Any]:
    """The model's own caches, one an entry; plain ones if it has no `make_cache`."""
    with _asking(model):
        caches: list[Any] = stock_function(model)
    return caches


def asking() -> bool:
    """Whether some model's own caches are being made."""
    return bool(_asked.get())


def is_asked(model: nn.Module) -> bool:
    """Whether `stock_caches` is making this model's caches: a call now stands in its place."""
    return id(model) in _asked.get()


def caches_beneath(model: nn.Module) -> list[Any]:
    """The caches of a model whose `make_cache` was replaced by a function that asks for ours.

    Raises:
        ValueError: It was replaced in the model's class, so that the original is lost.
    """
    if "make_cache" not in vars(model):
        raise ValueError(
            f"{type(model).__name__}.make_cache was replaced, in the class, by one that asks "
            "mlx_h2o for caches, and so the model's own cannot be made. Call "
            "mlx_h2o.install(max_size=...) instead: it bounds every cache that mlx-lm makes."
        )
    own = getattr(type(model), "make_cache", None)
    if own is None:
        return [mlx_lm_cache.KVCache() for _ in model.layers]
    caches: list[Any] = own(model)
    return caches


@contextmanager
def _asking(model: nn.Module) -> Iterator[None]:
    token = _asked.set(_asked.get() | {id(model)})
    try:
        yield
    finally:
        _asked.reset(token)
