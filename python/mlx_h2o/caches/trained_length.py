"""Conversations that are longer than what their model was trained for."""

from __future__ import annotations


class PastTraining(UserWarning):
    """A conversation is longer than what its model was trained for."""


def past_training_text(tokens: int, trained: int) -> str:
    """What to say about so many tokens for a model that was trained on fewer."""
    return (
        f"{tokens:,} tokens are more than the {trained:,} that the model was trained for, so "
        'answers may get worse: a conversation that begins with positions="rolling" '
        "(--positions rolling) stays at positions that the model knows."
    )
