"""Conversations that are longer than what their model was trained for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn

from mlx_h2o.caches.conversation import bounded_members
from mlx_h2o.caches.trained_length import past_training_text
from mlx_h2o.hosts.recorder import trained_context


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
