"""A whole model's caches: its bounded ones, pins, turns, and lengths beyond its training."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from mlx_h2o.budgets.allocation import TooManyPins, room_for_pins
from mlx_h2o.budgets.growth import Stage
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.caches.base import BoundedKVCache, past_training_text
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.recorder import trained_context
from mlx_h2o.hosts.refusals import NothingToBound
from mlx_h2o.layer.pins_and_turns import PinAnswer, checked_carry
from mlx_h2o.slots.pins import Span, joined


def bounded_members(cache: Sequence[Any]) -> list[BoundedKVCache]:
    """The bounded caches in a model's list, members of a CacheList too."""
    return [entry for _, entry in entries(cache) if isinstance(entry, BoundedKVCache)]


def bounded_entries(cache: Sequence[Any]) -> list[BoundedKVCache]:
    """The bounded caches in a model's list, at least one.

    Raises:
        NothingToBound: The list has none.
    """
    layers = bounded_members(cache)
    if not layers:
        raise NothingToBound("There is no bounded cache in this list.")
    return layers


def pin(cache: Sequence[Any], spans: Sequence[Span]) -> PinAnswer:
    """Never evict the tokens at some positions from any layer, whatever the policy.

    A layer that is too small for its pins gets slots of the other layers, if all have rows of the
    same width.

    Args:
        cache: From `make_prompt_cache` or `load_prompt_cache`.
        spans: Pairs (first position, one past the last), of tokens that came or are still to come.
            `spans_for` finds spans of roles, texts and patterns.

    Returns:
        Which positions every head of every layer has pinned, which only some have, and which were
        evicted before.

    Raises:
        ValueError: They are not spans, or too many for the budget; nothing was changed.
        RuntimeError: The last rows of some layer were not attended to yet; nothing was changed.
    """
    layers = bounded_entries(cache)
    try:
        pinned = [layer.pinned_settings(spans) for layer in layers]
    except TooManyPins as error:
        pinned = _pinned_with_slots_of_others(layers, spans, error)
    for layer, (settings, _) in zip(layers, pinned, strict=True):
        layer.pin_as(settings)
    return PinAnswer.of_all(answer for _, answer in pinned)


def _pinned_with_slots_of_others(
    layers: Sequence[BoundedKVCache], spans: Sequence[Span], why: TooManyPins
) -> list[tuple[CacheSettings, PinAnswer]]:
    """As `pinned_settings` of every layer, with room made by the slots of all layers together.

    Args:
        layers: The layers of one model.
        spans: As in `pin`.
        why: The error of a layer that has too little room by itself.

    Raises:
        TooManyPins: All together have too few slots, or cannot exchange them.
    """
    old = [layer.settings for layer in layers]
    beyond = [stage.beyond for stage in old[0].filling]
    widths = {layer.share and layer.share.widths for layer in layers}
    alike = len(widths) == 1 and None not in widths
    for of_layer in old:
        alike &= of_layer.attending and of_layer.budgets is not None
        alike &= [stage.beyond for stage in of_layer.filling] == beyond
    if not alike:
        raise why
    pinned = [layer.pins_beside(spans) for layer in layers]
    pins = joined(span for of_layer, _ in pinned for span in of_layer)

    def roomy(budgets: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        flat = iter(room_for_pins([b for of_layer in budgets for b in of_layer], policy, pins))
        return [tuple(itertools.islice(flat, len(of_layer))) for of_layer in budgets]

    policy = layers[0].policy
    budgets = roomy([of_layer.budgets or () for of_layer in old])
    stages = [roomy([of_layer.filling[i].budgets for of_layer in old]) for i in range(len(beyond))]
    return [
        (
            replace(
                of_layer,
                budgets=budgets[i],
                filling=tuple(map(Stage, beyond, (of_stage[i] for of_stage in stages))),
                pins=own,
            ),
            answer,
        )
        for i, (of_layer, (own, answer)) in enumerate(zip(old, pinned, strict=True))
    ]


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


def past_training(model: nn.Module, cache: Sequence[Any]) -> str | None:
    """What to say about a conversation that is longer than what its model was trained for.

    Args:
        model: An mlx-lm model.
        cache: The conversation's caches.

    Returns:
        A sentence; None where the length is within training, the model does not tell what it was
        trained for, nothing is bounded, or positions roll.
    """
    trained = trained_context(model, 0)
    bounded = bounded_members(cache)
    tokens = max((entry.offset for entry in bounded), default=0)
    if not trained or tokens <= trained or all(entry.settings.rope for entry in bounded):
        return None
    return past_training_text(tokens, trained)
