"""Pins and turns of a whole model's caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.engine.pins_and_turns import PinAnswer, checked_carry
from mlx_h2o.integration.refusals import NothingToBound
from mlx_h2o.storage.pins import Span


def bounded_entries(cache: Sequence[Any]) -> list[BoundedKVCache]:
    """The bounded caches of a model's list.

    Raises:
        NothingToBound: There are none.
    """
    layers = [entry for _, entry in entries(cache) if isinstance(entry, BoundedKVCache)]
    if not layers:
        raise NothingToBound("There is no bounded cache in this list.")
    return layers


def pin(cache: Sequence[Any], spans: Sequence[Span]) -> PinAnswer:
    """Never evict the tokens at some positions from any layer, whatever the policy.

    Args:
        cache: From `make_prompt_cache` or `load_prompt_cache`.
        spans: Pairs (first position, one past the last), of tokens that came or that are to come.
            `spans_for` finds those of roles, texts and patterns.

    Returns:
        Which every head of every layer has pinned, which only some have, and which were gone.

    Raises:
        ValueError: They are no spans, or too many for the budget of some layer; nothing was
            changed.
        RuntimeError: The last rows of some layer were not attended to yet; nothing was changed.
    """
    layers = bounded_entries(cache)
    asked = [layer.pinned_settings(spans) for layer in layers]
    for layer, (settings, _) in zip(layers, asked, strict=True):
        layer.pin_as(settings)
    return PinAnswer.of_all(answer for _, answer in asked)


def unpin(cache: Sequence[Any], spans: Sequence[Span] | None = None) -> None:
    """Let pinned tokens of all layers go as any others; all of them without `spans`."""
    layers = bounded_entries(cache)
    for layer in layers:
        layer.require_at_rest()
    for layer in layers:
        layer.unpin(spans)


def new_turn(cache: Sequence[Any], carry: float | str = 1.0) -> None:
    """Say at the beginning of a turn how much of what was attended to before still counts.

    Without it everything does: scores, positions and ages go on by themselves, and through files.

    Args:
        cache: As in `pin`.
        carry: As in `H2OKVCache.new_turn`: 1 all, 0 or "reset" nothing, between them that part of
            the past.

    Raises:
        ValueError: It is no number from 0 to 1, nor "reset".
    """
    checked_carry(carry)
    layers = bounded_entries(cache)
    for layer in layers:  # of all or of none
        layer.require_at_rest()
    for layer in layers:
        layer.new_turn(carry)
