"""Needles: a fact at a depth of a text of a length, alone, with others or disguised.

After the needle-in-a-haystack test (Kamradt 2023); the kinds with more keys and with decoys are
RULER's idea (arXiv 2404.06654). Memory is cut down before the question is known, or after.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o import _checks
from mlx_h2o.evaluate.facts import (
    CLOZE,
    Fact,
    RecallTask,
    digits,
    distinct_facts,
    paragraphs_of,
    person,
    secret_number,
)
from mlx_h2o.evaluate.measures.base import ASKING, Measure, Result, Results, fraction, part_of
from mlx_h2o.evaluate.methods import Method
from mlx_h2o.evaluate.reader import Reader, Tell, answers_right, in_batches, read
from mlx_h2o.evaluate.report import Section, Table

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


def kinds_of(reader: Reader) -> tuple[str, ...]:
    """The kinds of needles that a model can be asked for."""
    return KINDS if reader.form == CLOZE else tuple(k for k in KINDS if k not in CLOZE_KINDS)


def facts_of(reader: Reader, kind: str, rng: random.Random) -> tuple[Fact, list[Fact]]:
    """The fact that is asked for, and the other planted facts.

    Args:
        reader: Model and text.
        kind: The needle's kind.
        rng: The random source.
    """
    form = reader.form
    if kind in CLOZE_KINDS:
        return _decoys(rng) if kind == "decoys" else (_reworded(rng), [])
    target, *others = distinct_facts(form, COMPANY if kind == "multi" else 1, rng)
    return target, others


def _decoys(rng: random.Random) -> tuple[Fact, list[Fact]]:
    """A secret number, and other numbers of the same person and of one with the same first name."""
    target = secret_number(rng)
    who = target.question.partition(" number of ")[2].removesuffix(" is")
    first, last = who.split()
    namesake = person(rng).split()[1]
    while namesake == last:
        namesake = person(rng).split()[1]
    others = [
        f"It was written on the door. The house number of {who} is {digits(rng)}.",
        f"That is over now. The former number of {who} was {digits(rng)}.",
        f"It was no longer a secret to us. The secret number of {first} {namesake} is "
        f"{digits(rng)}.",
    ]
    return target, [Fact(statement, "", "") for statement in others]


def _reworded(rng: random.Random) -> Fact:
    """A secret number that is asked for in words not used when it was told."""
    fact = secret_number(rng)
    who = fact.question.partition(" number of ")[2].removesuffix(" is")
    question = f"What {who} keeps hidden from everybody is not a word but a number:"
    return Fact(fact.statement, question, fact.answer)


def needle_task(
    reader: Reader, needles: Sequence[Needle], length: int, of_each: int, seed: int
) -> RecallTask:
    """Prompts of one length, `of_each` for each needle, in the needles' order.

    Args:
        reader: Model and text.
        needles: The kinds and depths.
        length: T, tokens of a prompt with its question.
        of_each: Prompts for each needle.
        seed: The same seed gives the same prompts.

    Raises:
        ValueError: The text is too short, or the facts do not fit into the length.
    """
    if sum(map(len, reader.paragraphs)) < length:
        raise ValueError(f"The text is too short to plant facts in: it needs {length} tokens.")
    rng = random.Random(seed)
    prompts = [_prompt(reader, needle, length, rng) for needle in needles for _ in range(of_each)]
    rows, questions, answers, distances = zip(*prompts, strict=True)
    return RecallTask(mx.array(list(rows)), questions, answers, distances, reader.form.least)


def _prompt(
    reader: Reader, needle: Needle, length: int, rng: random.Random
) -> tuple[list[int], int, tuple[int, ...], int]:
    """One prompt: its tokens, the question's place, the answer, and the fact's distance."""
    form = reader.form
    target, others = facts_of(reader, needle.kind, rng)
    question = reader.encode(form.question.format(target.question))
    statement = reader.encode(target.statement + "\n\n")
    company = [reader.encode(fact.statement + "\n\n") for fact in others]
    planted = len(statement) + sum(map(len, company))
    room = length - len(reader.first) - planted - len(question)
    if room < 0:
        raise ValueError(f"{1 + len(others)} facts do not fit into {length} tokens.")
    prose = paragraphs_of(reader.paragraphs, room, rng)
    starts = [0]
    for paragraph in prose:
        starts.append(starts[-1] + len(paragraph))
    nearest = min(range(len(starts)), key=lambda i: abs(starts[i] - needle.depth * room))
    at: dict[int, list[list[int]]] = {nearest: [statement]}
    for other in company:
        at.setdefault(rng.randrange(len(starts)), []).append(other)
    row, begins = list(reader.first), 0
    for i in range(len(starts)):
        for piece in at.get(i, ()):
            if piece is statement:
                begins = len(row)
            row += piece
        row += prose[i] if i < len(prose) else []
    answer = tuple(reader.encode(f" {target.answer}{form.ending}"))
    return row + question, len(row), answer, len(row) - begins


#: Whether the question is read with the text, so that kept tokens can be chosen by it.
SEEN = {"unseen": False, "seen": True}


@dataclass(frozen=True)
class NeedleMeasure(Measure):
    """A grid of depths and lengths for each kind of needle.

    Attributes:
        lengths: Tokens of prompts, question included.
        depths: Depths of the needle, from 0 to 1.
        of_each: Prompts for each kind, depth and length.
        kinds: Kinds of needles (`needles.KINDS`); kinds that the model cannot be asked for are left
            out.
        questions: "unseen", "seen" or both.
        batch: Prompts side by side.
    """

    lengths: tuple[int, ...] = (512, 1024)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.95)
    of_each: int = 2
    kinds: tuple[str, ...] = KINDS
    questions: tuple[str, ...] = tuple(SEEN)
    batch: int = 10

    name = "needles"
    briefly = "needles found"

    def __post_init__(self) -> None:
        for kind in self.kinds:
            _checks.choice("kinds", kind, KINDS)
        for question in self.questions:
            _checks.choice("questions", question, tuple(SEEN))

    def tokens(self) -> int:
        return max(self.lengths)

    def work(self) -> int:
        prompts = len(self.questions) * len(self.kinds) * len(self.depths) * self.of_each
        return prompts * sum(self.lengths)

    def passes(self) -> int:
        batches = -(-len(self.kinds) * len(self.depths) * self.of_each // self.batch)
        return len(self.lengths) * len(self.questions) * batches * ASKING

    def needles(self, reader: Reader) -> list[Needle]:
        """All kinds at all depths."""
        kinds = [kind for kind in self.kinds if kind in kinds_of(reader)]
        return [Needle(kind, depth) for kind in kinds for depth in self.depths]

    def of(self, reader: Reader, method: Method, tell: Tell) -> Result:
        records: list[dict[str, Any]] = []
        needles = self.needles(reader)
        for length in self.lengths:
            task = needle_task(reader, needles, length, self.of_each, reader.seed + length)
            for name in self.questions:
                right = answers_of(reader, method, task, self.batch, SEEN[name], tell)
                for i, needle in enumerate(needles):
                    rows = right[i * self.of_each : (i + 1) * self.of_each]
                    which = {"length": length, "kind": needle.kind, "depth": needle.depth}
                    records.append({**which, "question": name, "known": rows})
        return {"records": records}

    def brief(self, result: Result, full: Result) -> str:
        """The share found with the first of the questions: unseen, if both are asked."""
        records, first = (result["records"], full["records"]), self.questions[0]
        return fraction(*of_records(*records, question=first))

    def section(self, results: Results) -> Section:
        full = results[0][1]["records"]
        kinds = list(dict.fromkeys(record["kind"] for record in full))
        rows = []
        for method, result in results:
            cells = [method.name]
            for question in self.questions:
                of = [of_records(result["records"], full, question=question)]
                of += [
                    of_records(result["records"], full, question=question, kind=kind)
                    for kind in kinds
                ]
                cells += [fraction(*counts) for counts in of]
            rows.append(cells)
        columns = ["cache"]
        for question in self.questions:
            columns += [f"{question}: all", *(f"{question}: {kind}" for kind in kinds)]
        return Section(
            "Needles",
            "A fact at each depth of each length, then its question. Unseen: the text was read and "
            "cut down before the question came; seen: the question came with the text's last "
            "chunk. Only facts that the full cache answers count.",
            [Table("", columns, rows)],
        )


def answers_of(
    reader: Reader, method: Method, task: RecallTask, batch: int, in_view: bool, tell: Tell
) -> list[bool]:
    """Whether each prompt is answered correctly, with a new cache for each batch.

    Args:
        reader: Model and text.
        method: The method that makes the caches.
        task: The prompts.
        batch: Prompts side by side.
        in_view: Whether the question is read with the text; if not, the tokens after the shortest
            text come one by one.
        tell: Called with the tokens read since the last call.
    """
    P, T = task.prompts.shape
    right: list[bool] = []
    for rows in in_batches(P, batch):
        prompts = task.prompts[rows]
        text = T - 1 if in_view else min(task.questions[rows])
        cache = method.after(reader, prompts[:, :text], T, tell)
        logits = read(reader.model, cache, prompts[:, text:], 1, tell)
        answers = task.answers[rows]
        right += answers_right(reader.model, cache, logits, answers, task.least, tell)
    return right


def of_records(
    records: Sequence[dict[str, Any]], full: Sequence[dict[str, Any]], **which: Any
) -> tuple[int, int]:
    """Known and asked, summed over the records of some kind, depth, length or question."""
    right, total = 0, 0
    for ours, theirs in zip(records, full, strict=True):
        if all(ours[name] == value for name, value in which.items()):
            of_record = part_of(ours["known"], theirs["known"])
            right, total = right + of_record[0], total + of_record[1]
    return right, total
