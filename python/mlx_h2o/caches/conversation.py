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
    """The bounded caches in a model's list.

    Raises:
        NothingToBound: The list has none.
    """
    layers = [entry for _, entry in entries(cache) if isinstance(entry, BoundedKVCache)]
    if not layers:
        raise NothingToBound("There is no bounded cache in this list.")
    return layers


def pin(cache: Sequence[Any], spans: Sequence[Span]) -> PinAnswer:
    """Never evict the tokens at some positions from any layer, whatever the policy.

    Args:
        cache: From `make_prompt_cache` or `load_prompt_cache`.
        spans: Pairs (first position, one past the last), of tokens that came or are still to come.
            `spans_for` finds spans of roles, texts and patterns.

    Returns:
        Which positions every head of every layer has pinned, which only some have, and which were
        evicted before.

    Raises:
        ValueError: They are not spans, or too many for the budget of some layer; nothing was
            changed.
        RuntimeError: The last rows of some layer were not attended to yet; nothing was changed.
    """
    layers = bounded_entries(cache)
    asked = [layer.pinned_settings(spans) for layer in layers]
    for layer, (settings, _) in zip(layers, asked, strict=True):
        layer.pin_as(settings)
    return PinAnswer.of_all(answer for _, answer in asked)


def unpin(cache: Sequence[Any], spans: Sequence[Span] | None = None) -> None:
    """Allow pinned tokens of all layers to be evicted; all of them without `spans`."""
    layers = bounded_entries(cache)
    for layer in layers:
        layer.require_at_rest()
    for layer in layers:
        layer.unpin(spans)


def new_turn(cache: Sequence[Any], carry: float | str = 1.0) -> None:
    """Begin a turn, and set how much of the attention so far still counts.

    Without this call all of it does: scores, positions and ages carry over, through files too.

    Args:
        cache: As in `pin`.
        carry: As in `H2OKVCache.new_turn`: 1 for all, 0 or "reset" for nothing, between them for
            that part of the past.

    Raises:
        ValueError: It is not a number from 0 to 1, nor "reset".
    """
    checked_carry(carry)
    layers = bounded_entries(cache)
    for layer in layers:  # checked first, so that all change or none
        layer.require_at_rest()
    for layer in layers:
        layer.new_turn(carry)
