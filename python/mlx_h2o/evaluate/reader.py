"""A model that reads a text through caches: what every measure of an evaluation works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.evaluate.facts import FORMS, Form, is_known
from mlx_h2o.hosts.loaded import logits_of
from mlx_h2o.loading.load import load

#: Called with the number of tokens read since the last call.
Tell = Callable[[int], None]


@dataclass
class Reader:
    """A model and a text.

    Attributes:
        model_name: As in `mlx_h2o.load`.
        text: The user's own text.
        facts: The form in which facts are told and asked for: a name of `facts.FORMS`.
        chunk: Tokens of a prompt that are read at once.
        seed: The seed of all random choices.
    """

    model_name: str
    text: str
    facts: str
    chunk: int
    seed: int = 0

    @cached_property
    def _loaded(self) -> tuple[nn.Module, Any]:
        return load(self.model_name)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._loaded[0]

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._loaded[1]

    @property
    def form(self) -> Form:
        """The form in which facts are told and asked for."""
        return FORMS[self.facts]

    @cached_property
    def tokens(self) -> list[int]:
        """The text's tokens."""
        return self.encode(self.text)

    def encode(self, piece: str) -> list[int]:
        """Token ids without special tokens."""
        return list(self.tokenizer.encode(piece, add_special_tokens=False))

    @property
    def first(self) -> list[int]:
        """The beginning of every conversation: bos, or nothing."""
        bos = self.tokenizer.bos_token_id
        return [] if bos is None else [bos]

    @cached_property
    def paragraphs(self) -> list[list[int]]:
        """Token ids of the text's paragraphs, each with the blank line that ends it."""
        return [self.encode(p.strip() + "\n\n") for p in self.text.split("\n\n") if p.strip()]

    def prose(self, count: int, start: int) -> list[int]:
        """`count` tokens of the text in a row, from a start that may lie beyond its end.

        Raises:
            ValueError: The text is shorter.
        """
        if len(self.tokens) < count:
            raise ValueError(
                f"The text has {len(self.tokens)} tokens and {count} are needed: give a longer "
                "text, or shorter lengths."
            )
        at = start % (len(self.tokens) - count + 1)
        return self.tokens[at : at + count]


def read(model: nn.Module, cache: list[Any], tokens: mx.array, chunk: int, tell: Tell) -> mx.array:
    """Read a prompt as mlx-lm does, chunk by chunk and the last token alone.

    Args:
        model: An mlx-lm model.
        cache: The model's cache.
        tokens: `[B, T]`.
        chunk: Tokens read at once.
        tell: Called with the tokens read since the last call.

    Returns:
        Logits after the last token `[B, vocabulary]`, evaluated.
    """
    B, T = tokens.shape
    for i in range(T - 1 if chunk == 1 else 0):
        step(model, cache, tokens[:, i], tell)
    for start in range(0, T - 1 if chunk > 1 else 0, chunk):
        part = tokens[:, start : min(start + chunk, T - 1)]
        logits_of(model, part, cache)  # its logits are never computed
        mx.eval([entry.state for entry in cache])
        tell(B * part.shape[1])
    return step(model, cache, tokens[:, -1], tell)


def step(model: nn.Module, cache: list[Any], token: mx.array, tell: Tell) -> mx.array:
    """Read one more token `[B]`; return the logits after it `[B, vocabulary]`, evaluated.

    Args:
        model: The model that decodes.
        cache: The cache that takes the token in.
        token: Token ids `[B]`.
        tell: Called with the tokens read since the last call.
    """
    logits = logits_of(model, token[:, None], cache)[:, -1]
    mx.eval(logits)
    tell(token.shape[0])
    return logits


def answers_right(
    model: nn.Module,
    cache: list[Any],
    logits: mx.array,
    answers: Sequence[Sequence[int]],
    least: float,
    tell: Tell,
) -> list[bool]:
    """Whether every token of each answer comes, given the correct tokens before it.

    Args:
        model: An mlx-lm model.
        cache: The cache that has read the questions.
        logits: The logits after the questions, `[B, vocabulary]`.
        answers: Token ids, one answer a row.
        least: As in `facts.is_known`.
        tell: Called with the tokens read since the last call.
    """
    longest = max(map(len, answers))
    padded = mx.array([[*answer, *[0] * (longest - len(answer))] for answer in answers])
    right = []
    for i in range(longest):
        right.append(is_known(logits, padded[:, i], least))
        if i + 1 < longest:
            logits = step(model, cache, padded[:, i], tell)
    rows = cast(list[list[bool]], mx.stack(right, axis=1).tolist())
    return [all(row[: len(answer)]) for row, answer in zip(rows, answers, strict=True)]


def in_batches(count: int, size: int) -> list[slice]:
    """Slices of at most `size` that cover `count` rows."""
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def no_progress(tokens: int) -> None:
    """A `Tell` that tells nobody."""
