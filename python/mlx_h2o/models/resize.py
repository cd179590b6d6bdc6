"""Resizing: another budget for a model's caches while they are in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx

from mlx_h2o._byte_size import Share
from mlx_h2o.budgets.cost import LayerShare
from mlx_h2o.budgets.plan import Plan, plain_bytes
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.settings import CacheSettings, ModelSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.conversation import bounded_entries
from mlx_h2o.loading.identity import ModelIdentity
from mlx_h2o.models import free_memory


def resize(
    cache: Sequence[Any],
    max_size: int | None = None,
    *,
    max_bytes: int | str | None = None,
    context: int | None = None,
) -> None:
    """Change the budget of a whole model's caches; tokens without a slot go into the remainder.

    The slots are shared out as `make_prompt_cache` does for this size: by the profile that the
    caches were made with, which files keep too; or in the proportions of the slots given to layers
    (`budgets=[...]`). Rows stay in the bits that they have. Caches that are not bounded stay as
    they are. (`H2OKVCache.resize` changes a single layer.) Memory that is not needed any more is
    the system's again on return.

    Args:
        cache: From `make_prompt_cache` or `load_prompt_cache`.
        max_size: As in `make_prompt_cache`.
        max_bytes: As in `make_prompt_cache`.
        context: The tokens to which a share as "25%" refers, by default those for which the caches
            were made. Files do not hold them.

    Raises:
        ValueError: No or two sizes, a size that is too small, or no bounded cache in the list; or a
            share of an unknown context. Nothing was changed then.
    """
    settings = ModelSettings(max_size, max_bytes, context=context)
    layers, shares = _layers_alike(cache)
    first = layers[0]
    if isinstance(settings.max_bytes, Share):
        settings = _in_bytes(settings, layers, shares)
    plan = Plan(
        shares,
        first.policy,
        first.answers or first.policy.uses_evicted_mean,
        first.attending,
        settings.max_size,
        cast(int | None, settings.max_bytes),
        profile=_profile_of(shares),
    )
    new = []
    for layer, (slots, later) in zip(layers, plan.stages, strict=True):
        # The remainder keeps its number of plain rows, if it has any.
        reserved = layer.store.reserved if layer.store else 0
        resized = layer.resized_settings([count - reserved for count in slots])
        resized = replace(resized, filling=later)
        new.append(resized.grown(layer.offset) or resized)
    _follow(layers, new)


def _layers_alike(cache: Sequence[Any]) -> tuple[list[BoundedKVCache], list[LayerShare]]:
    """The bounded caches of a list, and what each remembers of its model's plan.

    Raises:
        ValueError: There is none, or they cannot follow one size.
    """
    layers = bounded_entries(cache)
    for layer in layers:
        if any(
            getattr(layer, name) != getattr(layers[0], name)
            for name in ("policy", "packing", "answers", "attending")
        ):
            raise ValueError(
                "These caches have different settings, so they cannot follow one size: resize "
                "each one by itself."
            )
    shares = [layer.share for layer in layers if layer.share is not None]
    if len(shares) < len(layers):
        raise ValueError(
            "Before its first token a cache that make_prompt_cache did not make cannot be resized "
            "with others: how large its rows will be is not known. Make it anew."
        )
    return layers, shares


def _in_bytes(
    settings: ModelSettings, layers: Sequence[BoundedKVCache], shares: Sequence[LayerShare]
) -> ModelSettings:
    """The settings with a share of a 16-bit cache as a number of bytes.

    Raises:
        ValueError: The tokens to which the share refers are not known.
    """
    context = settings.context or layers[0].context
    if context is None:
        raise ValueError(
            "A share of a 16-bit cache needs the tokens to which it refers, which caches from a "
            "file do not know: give context, or max_bytes as a number."
        )
    whole = sum(map(plain_bytes, shares)) * layers[0].settings.ranks
    return settings.in_bytes(whole, context)


def _follow(layers: Sequence[BoundedKVCache], new: Sequence[CacheSettings]) -> None:
    """Let layers follow new settings, and give back what they need no more."""
    before = sum(layer.nbytes for layer in layers)
    for layer, of_layer in zip(layers, new, strict=True):
        layer.follow(of_layer)
        mx.eval(layer.arrays())  # so that intermediate results are one layer's
    if sum(layer.nbytes for layer in layers) < before:
        free_memory.give_back()


def _profile_of(shares: Sequence[LayerShare]) -> Profile | None:
    """The profile that the layers remember of their model, or None."""
    if not all(share.losses for share in shares):
        return None
    heads = tuple(share.heads for share in shares)
    widths = tuple(share.widths.key for share in shares)
    model = ModelIdentity("remembered", heads, widths, 0, ())
    return Profile(model, shares[0].grid, tuple(share.losses for share in shares), "remembered")
