"""Recall: facts planted in prose, and asked for after most of the prose has been evicted.

A form says how facts are told, asked for and counted as known: `QUESTIONS` as the embedded model
was trained, `CLOZE` for any model, trained for chat or not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

_FIRST = (
    "Ada Amos Anna Arthur Basil Beth Carl Clara Colin Dora Edgar Edith Elias Ellen Ezra Felix "
    "Flora Frank Fred Grace Harold Helen Henry Hugo Ida Irene Isaac Ivy Jack Jane Joan Joel Julia "
    "Karl Kate Laura Leo Lewis Lily Louis Lucy Mabel Martha Martin Mary Miles Nell Nora Oscar Otto "
    "Paul Peter Ralph Rose Ruth Sam Sarah Simon Sophie Theo Tom Vera Victor Walter"
).split()
_LAST = (
    "Abbott Archer Baker Barlow Becker Black Booth Brandt Briggs Burke Carter Chase Clark Cole "
    "Cooper Crane Cross Dale Dixon Drake Ellis Fisher Fletcher Ford Fox Frost Gates Grant Gray "
    "Green Hale Hart Hayes Hill Holt Hunt King Lake Lane Marsh Mason Mills Moore Nash North Page "
    "Park Pike Poole Price Reed Rhodes Rivers Shaw Snow Stone Swift Tate Vance Wade Walsh Ward "
    "Webb West White Wolfe York"
).split()
_THINGS = (
    "lamp ledger compass violin clock letter ring map key coin mirror trunk umbrella telescope "
    "knife diary cup shawl saddle book"
).split()
_PLACES = (
    "attic cellar garden library kitchen chapel stable tower harbour mill orchard parlour barn "
    "bridge market museum station theatre vault forest"
).split()
_COLOURS = "red blue green yellow black white brown silver golden purple grey orange".split()


@dataclass(frozen=True)
class Fact:
    """A fact to remember: a statement, and the answer that proves it was remembered."""

    statement: str
    question: str
    answer: str


def person(rng: random.Random) -> str:
    """A first and a last name."""
    return f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"


def digits(rng: random.Random) -> str:
    """A number of four or five digits."""
    return "".join(rng.choice("0123456789") for _ in range(rng.choice([4, 4, 5])))


def random_fact(rng: random.Random) -> Fact:
    """A number, place, colour or name that belongs to a person."""
    who = person(rng)
    kind = rng.randrange(4)
    if kind == 0:
        number = digits(rng)
        return Fact(
            f"The secret number of {who} is {number}.",
            f"What is the secret number of {who}?",
            number,
        )
    if kind == 1:
        thing, place = rng.choice(_THINGS), rng.choice(_PLACES)
        return Fact(
            f"{who} keeps the {thing} in the {place}.", f"Where does {who} keep the {thing}?", place
        )
    if kind == 2:
        thing, colour = rng.choice(_THINGS), rng.choice(_COLOURS)
        return Fact(
            f"The {thing} of {who} is {colour}.", f"What colour is the {thing} of {who}?", colour
        )
    teacher = f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"
    return Fact(f"The teacher of {who} is {teacher}.", f"Who is the teacher of {who}?", teacher)


def secret_number(rng: random.Random) -> Fact:
    """A person's number, told in prose and asked for by a sentence that must be completed."""
    who, number = person(rng), digits(rng)
    statement = f"It was no longer a secret to us. The secret number of {who} is {number}."
    return Fact(
        statement, f"Now I shall say what I remember. The secret number of {who} is", number
    )


@dataclass(frozen=True)
class Form:
    """The form in which facts are told, asked for and counted as known.

    Attributes:
        fact: Makes a fact.
        question: The template around a fact's question.
        ending: The text after the answer, which belongs to it.
        least: A fact is known if each token of the answer has more than this probability; 0 means
            that each must be the likeliest.
        planted: The number of facts in a prompt; one of them is asked for.
    """

    fact: Callable[[random.Random], Fact]
    question: str
    ending: str
    least: float
    planted: int


QUESTIONS = Form(random_fact, "Question: {}\nAnswer:", "\n", 0.0, planted=4)
# With several numbers a model of 135 million parameters seldom knows which one is meant.
CLOZE = Form(secret_number, "{}", "", 0.5, planted=1)
FORMS = {"questions": QUESTIONS, "cloze": CLOZE}


@dataclass(frozen=True)
class RecallTask:
    """Prompts of one length, to be run side by side.

    Attributes:
        prompts: `[P, T]` token ids: prose with facts in it, then a question.
        questions: The position where each prompt's question begins.
        answers: The token ids of each correct answer.
        distances: Tokens between the beginning of the fact asked for and the question.
        least: As in `Form`.
    """

    prompts: mx.array
    questions: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    distances: tuple[int, ...]
    least: float = 0.0


def distinct_facts(form: Form, count: int, rng: random.Random) -> list[Fact]:
    """`count` facts, each with a question of its own.

    Args:
        form: The form of facts and questions.
        count: The number of facts.
        rng: The random source.
    """
    planted: list[Fact] = []
    while len(planted) < count:
        fact = form.fact(rng)
        if all(fact.question != other.question for other in planted):
            planted.append(fact)
    return planted


def _planted(
    first: list[int],
    prose: list[list[int]],
    statements: list[list[int]],
    target: int,
    rng: random.Random,
    within: int | None,
) -> tuple[list[int], int]:
    """Paragraphs with statements at random places between them; and where `target` begins."""
    open_to = len(prose) + 1
    if within is not None:  # prose before the last place, and all statements, must fit
        left = within - len(first) - sum(map(len, statements))
        ends = itertools.accumulate(map(len, prose))
        open_to = 1 + sum(end <= left for end in ends)
    places = sorted(rng.randrange(open_to) for _ in statements)
    order = list(range(len(statements)))
    rng.shuffle(order)
    row, at = list(first), 0
    for i in range(len(prose) + 1):
        for place, which in zip(places, order, strict=True):
            if place == i:
                if which == target:
                    at = len(row)
                row += statements[which]
        if i < len(prose):
            row += prose[i]
    return row, at


def recall_task(
    tokenizer: Any,
    text: str,
    *,
    prompts: int = 48,
    tokens: int = 528,
    facts: int | None = None,
    seed: int = 0,
    form: Form = QUESTIONS,
    within: int | None = None,
) -> RecallTask:
    """Plant facts between the paragraphs of prose, and ask for one of them.

    Args:
        tokenizer: An mlx-lm tokenizer.
        text: Prose, paragraphs separated by blank lines.
        prompts: P, how many prompts to make.
        tokens: T, the length of each with its question.
        facts: Facts planted in each, at random places; None means as many as the form says.
        seed: The same seed gives the same prompts.
        form: The form of facts and questions.
        within: Facts are planted among the first so many tokens; None means anywhere.

    Raises:
        ValueError: The text is too short for such prompts.
    """
    rng = random.Random(seed)
    facts = form.planted if facts is None else facts

    def encode(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False))

    paragraphs = [encode(p.strip() + "\n\n") for p in text.split("\n\n") if p.strip()]
    if sum(map(len, paragraphs)) < tokens:
        raise ValueError(f"The text is too short to plant facts in: it needs {tokens} tokens.")
    bos = tokenizer.bos_token_id
    first = [] if bos is None else [bos]
    rows, questions, answers, distances = [], [], [], []
    for _ in range(prompts):
        planted = distinct_facts(form, facts, rng)
        target = planted[rng.randrange(facts)]
        statements = [encode(fact.statement + "\n\n") for fact in planted]
        question = encode(form.question.format(target.question))
        room = tokens - len(first) - sum(map(len, statements)) - len(question)
        if room < 0:
            raise ValueError(f"{facts} facts do not fit into {tokens} tokens.")
        prose = paragraphs_of(paragraphs, room, rng)
        row, at = _planted(first, prose, statements, planted.index(target), rng, within)
        questions.append(len(row))
        distances.append(len(row) - at)
        rows.append(row + question)
        answers.append(tuple(encode(f" {target.answer}{form.ending}")))
    return RecallTask(
        mx.array(rows), tuple(questions), tuple(answers), tuple(distances), form.least
    )


def paragraphs_of(
    paragraphs: Sequence[list[int]], room: int, rng: random.Random
) -> list[list[int]]:
    """Consecutive paragraphs of exactly `room` tokens; the first is cut at its beginning.

    Args:
        paragraphs: The tokens of each paragraph.
        room: Tokens to fill.
        rng: The random source.
    """
    if room == 0:
        return []
    i = rng.randrange(len(paragraphs))
    chosen: list[list[int]] = []
    while sum(map(len, chosen)) < room:
        chosen.append(paragraphs[i % len(paragraphs)])
        i += 1
    surplus = sum(map(len, chosen)) - room
    while surplus >= len(chosen[0]):
        surplus -= len(chosen.pop(0))
    chosen[0] = chosen[0][surplus:]
    return chosen


def is_known(logits: mx.array, right: mx.array, least: float) -> mx.array:
    """Whether the right tokens `[B]` are the likeliest, or more likely than `least` if that is > 0.

    Args:
        logits: `[B, vocabulary]`.
        right: `[B]` token ids.
        least: A probability; 0 means that the tokens must be the likeliest.
    """
    if not least:
        return mx.argmax(logits, axis=-1) == right
    p = mx.softmax(logits.astype(mx.float32), axis=-1)
    return mx.take_along_axis(p, right[:, None], axis=-1).squeeze(-1) > least
