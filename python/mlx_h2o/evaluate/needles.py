"""Needles: a fact at a given depth of a text of a given length, alone, with others or disguised.

After the needle-in-a-haystack test (Kamradt 2023); the kinds with more keys and with decoys are
RULER's idea (arXiv 2404.06654).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.evaluate.recall import (
    CLOZE,
    Fact,
    RecallTask,
    digits,
    distinct_facts,
    paragraphs_of,
    person,
    secret_number,
)
from mlx_h2o.evaluate.stage import Stage

#: Facts in a prompt that holds several.
COMPANY = 4
#: Kinds that need a model that completes any sentence.
CLOZE_KINDS = ("decoys", "reworded")
KINDS = ("single", "multi", *CLOZE_KINDS)


@dataclass(frozen=True)
class Needle:
    """A fact's place, and the way it is asked for.

    Attributes:
        kind: "single": nothing else is planted; "multi": three more facts of the same kind;
            "decoys": three that look like it; "reworded": it is asked for in other words.
        depth: 0 at the beginning of the text, 1 at its end.
    """

    kind: str
    depth: float


def kinds_of(stage: Stage) -> tuple[str, ...]:
    """The kinds of needles that a model can be asked for."""
    return KINDS if stage.form == CLOZE else tuple(k for k in KINDS if k not in CLOZE_KINDS)


def facts_of(stage: Stage, kind: str, rng: random.Random) -> tuple[Fact, list[Fact]]:
    """The fact that is asked for, and the other planted facts.

    Args:
        stage: Model and text.
        kind: The needle's kind.
        rng: The random source.
    """
    form = stage.form
    if kind in CLOZE_KINDS:
        return _decoys(rng) if kind == "decoys" else (_reworded(rng), [])
    asked, *others = distinct_facts(form, COMPANY if kind == "multi" else 1, rng)
    return asked, others


def _decoys(rng: random.Random) -> tuple[Fact, list[Fact]]:
    """A secret number, and other numbers of the same person and of one with the same first name."""
    asked = secret_number(rng)
    who = asked.question.partition(" number of ")[2].removesuffix(" is")
    first, last = who.split()
    namesake = person(rng).split()[1]
    while namesake == last:
        namesake = person(rng).split()[1]
    told = [
        f"It was written on the door. The house number of {who} is {digits(rng)}.",
        f"That is over now. The former number of {who} was {digits(rng)}.",
        f"It was no longer a secret to us. The secret number of {first} {namesake} is "
        f"{digits(rng)}.",
    ]
    return asked, [Fact(statement, "", "") for statement in told]


def _reworded(rng: random.Random) -> Fact:
    """A secret number that is asked for in words not used when it was told."""
    fact = secret_number(rng)
    who = fact.question.partition(" number of ")[2].removesuffix(" is")
    question = f"What {who} keeps hidden from everybody is not a word but a number:"
    return Fact(fact.statement, question, fact.answer)


def needle_task(
    stage: Stage, needles: Sequence[Needle], length: int, of_each: int, seed: int
) -> RecallTask:
    """Prompts of one length, `of_each` for each needle, in the needles' order.

    Args:
        stage: Model and text.
        needles: The kinds and depths.
        length: T, tokens of a prompt with its question.
        of_each: Prompts for each needle.
        seed: The same seed gives the same prompts.

    Raises:
        ValueError: The text is too short, or the facts do not fit into the length.
    """
    if sum(map(len, stage.paragraphs)) < length:
        raise ValueError(f"The text is too short to plant facts in: it needs {length} tokens.")
    rng = random.Random(seed)
    prompts = [_prompt(stage, needle, length, rng) for needle in needles for _ in range(of_each)]
    rows, questions, answers, distances = zip(*prompts, strict=True)
    return RecallTask(mx.array(list(rows)), questions, answers, distances, stage.form.least)


def _prompt(
    stage: Stage, needle: Needle, length: int, rng: random.Random
) -> tuple[list[int], int, tuple[int, ...], int]:
    """One prompt: its tokens, the question's place, the answer, and the fact's distance."""
    form = stage.form
    asked, others = facts_of(stage, needle.kind, rng)
    question = stage.encode(form.asking.format(asked.question))
    statement = stage.encode(asked.statement + "\n\n")
    company = [stage.encode(fact.statement + "\n\n") for fact in others]
    planted = len(statement) + sum(map(len, company))
    room = length - len(stage.first) - planted - len(question)
    if room < 0:
        raise ValueError(f"{1 + len(others)} facts do not fit into {length} tokens.")
    prose = paragraphs_of(stage.paragraphs, room, rng)
    starts = [0]
    for paragraph in prose:
        starts.append(starts[-1] + len(paragraph))
    nearest = min(range(len(starts)), key=lambda i: abs(starts[i] - needle.depth * room))
    at: dict[int, list[list[int]]] = {nearest: [statement]}
    for other in company:
        at.setdefault(rng.randrange(len(starts)), []).append(other)
    row, begins = list(stage.first), 0
    for i in range(len(starts)):
        for piece in at.get(i, ()):
            if piece is statement:
                begins = len(row)
            row += piece
        row += prose[i] if i < len(prose) else []
    answer = tuple(stage.encode(f" {asked.answer}{form.ending}"))
    return row + question, len(row), answer, len(row) - begins
