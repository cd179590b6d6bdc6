"""A fact of the first turn, asked for in the last: whether each cache still knows it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.caches.conversation import new_turn, pin
from mlx_h2o.evaluate.recall import QUESTIONS, Form, paragraphs_of
from mlx_h2o.evaluate.stage import known
from mlx_h2o.evaluate.workers import Tell
from mlx_h2o.storage.pins import Span

#: Tokens that are given at once, of a turn after its message.
CHUNK = 16


@dataclass(frozen=True)
class TurnsTask:
    """Conversations of one length, side by side.

    Attributes:
        tokens: `[P, T]`: turns of prose, a fact in the first one, and at last the question.
        turns: The position where each turn begins; the last turn is the question.
        facts: The span of each conversation's fact.
        answers: The token ids of each correct answer.
        least: As in `recall.Form`.
    """

    tokens: mx.array
    turns: tuple[int, ...]
    facts: tuple[Span, ...]
    answers: tuple[tuple[int, ...], ...]
    least: float


def turns_task(
    tokenizer: Any,
    text: str,
    *,
    prompts: int,
    tokens: int,
    turns: int = 6,
    seed: int = 0,
    form: Form = QUESTIONS,
) -> TurnsTask:
    """Conversations whose first turn tells a fact.

    Args:
        tokenizer: An mlx-lm tokenizer.
        text: Prose, paragraphs separated by blank lines.
        prompts: P, the number of conversations.
        tokens: T, of which all turns but the last get the same part.
        turns: The number of turns, the question's included.
        seed: The same seed gives the same conversations.
        form: The form of facts and questions.

    Raises:
        ValueError: There is no room for a fact in the first turn, or for two turns.
    """
    if turns < 2:
        raise ValueError(f"A fact is asked for in a later turn: turns must be 2 or more; {turns}.")
    rng = random.Random(seed)

    def encode(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False))

    paragraphs = [encode(p.strip() + "\n\n") for p in text.split("\n\n") if p.strip()]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    rows, facts, answers, questions = [], [], [], []
    for _ in range(prompts):
        fact = form.fact(rng)
        statement = encode(fact.statement + "\n\n")
        question = encode(form.asking.format(fact.question))
        room = tokens - len(bos) - len(statement) - len(question)
        before = (tokens // turns - len(bos) - len(statement)) // 2
        if before < 0 or room < before:
            raise ValueError(f"{tokens} tokens are too few for {turns} turns and a fact.")
        prose = [t for p in paragraphs_of(paragraphs, room, rng) for t in p]
        rows.append([*bos, *prose[:before], *statement, *prose[before:], *question])
        first = len(bos) + before
        facts.append((first, first + len(statement)))
        answers.append(tuple(encode(f" {fact.answer}{form.ending}")))
        questions.append(len(question))
    # Questions may differ in length: the last turn begins where the longest question does.
    last = tokens - max(questions)
    starts = (*(i * last // (turns - 1) for i in range(turns - 1)), last)
    return TurnsTask(mx.array(rows), starts, tuple(facts), tuple(answers), form.least)


def known_at_last(
    model: nn.Module,
    make_cache: Callable[[], list[Any]],
    task: TurnsTask,
    *,
    carry: float | str = 1.0,
    pinned: bool = False,
    tell: Tell = lambda tokens: None,
) -> list[bool]:
    """Whether each conversation's fact is known in the last turn.

    Args:
        model: An mlx-lm model.
        make_cache: Makes an empty cache.
        task: The conversations.
        carry: How much of the past counts in each turn (`engine/pins_and_turns.py`).
        pinned: Whether the positions of all conversations' facts are pinned in every one.
        tell: Called with the tokens read since the last call.
    """
    cache = make_cache()
    bounded = hasattr(cache[0], "pin")
    if pinned and bounded:
        pin(cache, task.facts)

    def read(tokens: mx.array) -> mx.array:
        logits: mx.array = model(tokens, cache=cache)[:, -1]
        mx.eval(logits, [entry.state for entry in cache])
        tell(tokens.size)
        return logits

    logits = mx.zeros(0)
    ends = [*task.turns[1:], task.tokens.shape[1]]
    for turn, (first, end) in enumerate(zip(task.turns, ends, strict=True)):
        if turn and bounded:
            new_turn(cache, carry)
        # The message is read as one chunk, and the reply after it in small steps.
        message = (first + end) // 2 if end < task.tokens.shape[1] else end
        logits = read(task.tokens[:, first:message])
        for start in range(message, end, CHUNK):
            logits = read(task.tokens[:, start : min(start + CHUNK, end)])
    return known(model, cache, logits, task.answers, task.least, tell)


def ways(carries: Sequence[float | str]) -> list[tuple[str, dict[str, Any]]]:
    """The ways compared for each cache: by name, the arguments of `known_at_last`."""
    turns = [(f"carry {carry}", {"carry": carry}) for carry in carries]
    return [*turns, ("fact pinned", {"pinned": True})]
