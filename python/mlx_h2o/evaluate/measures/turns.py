"""Turns: a fact and a rule of the first turn, asked for after many more, pinned or not."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o.caches.conversation import new_turn, pin
from mlx_h2o.evaluate.facts import Fact
from mlx_h2o.evaluate.measures.base import ASKING, Measure, Result, Results, fraction, part_of
from mlx_h2o.evaluate.measures.needles import facts_of
from mlx_h2o.evaluate.methods import Method
from mlx_h2o.evaluate.reader import Reader, Tell, answers_right, read
from mlx_h2o.evaluate.report import Curves, Section, Table
from mlx_h2o.slots.pins import Span

_SIGNALS = "bell drum horn whistle gong trumpet siren clapper".split()
_REPLIES = "copper walnut velvet thunder lemon harbour feather marble candle saddle".split()

#: Tokens of text beyond the last turn, for questions of unequal lengths.
MORE = 64
#: The way in which facts are pinned, beside those that carry a part of the past.
PINNED = "pinned"


def rule(rng: random.Random) -> Fact:
    """A rule: a signal that is always answered by the same word."""
    signal, reply = rng.choice(_SIGNALS), rng.choice(_REPLIES)
    return Fact(
        f"There is one rule here. Whenever the {signal} sounds, everybody says the word {reply}.",
        f"Hear! Whenever the {signal} sounds, everybody says the word",
        reply,
    )


@dataclass(frozen=True)
class Conversation:
    """One conversation: its tokens, the span of the fact and rule in it, and both."""

    tokens: list[int]
    span: Span
    fact: Fact
    rule: Fact


@dataclass(frozen=True)
class TurnMeasure(Measure):
    """Conversations whose first turn states a fact and a rule; both are asked for after later
    turns.

    Attributes:
        conversations: Conversations side by side.
        turns: The number of turns; each turn's text follows on the last turn's.
        turn: Tokens of a turn.
        asked_after: Turns after which fact and rule are asked for, on copies of the cache, so that
            asking leaves no trace.
        carries: How much of the past counts in each turn (`new_turn`): for each, the conversations
            are held once. mlx-lm's own caches have no turns, and hold them once.
        pinned: Whether they are held once more with the facts and rules pinned.
    """

    conversations: int = 8
    turns: int = 8
    turn: int = 128
    asked_after: tuple[int, ...] = (2, 4, 6, 8)
    carries: tuple[float, ...] = (1.0,)
    pinned: bool = False

    name = "turns"
    briefly = "facts of the first turn known after the last"

    def __post_init__(self) -> None:
        if not self.carries or any(not 1 <= turn <= self.turns for turn in self.asked_after):
            raise ValueError("turns: needs a carry, and turns to ask after that are among them.")

    def tokens(self) -> int:
        return self.turns * self.turn

    def work(self) -> int:
        return self.conversations * self.tokens() * len(list(self.ways()))

    def passes(self) -> int:
        # Fact and rule are asked for separately.
        asking = 2 * len(self.asked_after) * ASKING
        return (2 * self.turns + asking) * len(list(self.ways()))

    def ways(self) -> Iterator[str]:
        """The names of the ways in which conversations are held."""
        yield from (f"carry {carry:g}" for carry in self.carries)
        if self.pinned:
            yield PINNED

    def of(self, reader: Reader, method: Method, tell: Tell) -> Result:
        rng = random.Random(reader.seed)
        facts = [facts_of(reader, "single", rng)[0] for _ in range(self.conversations)]
        rules = [rule(rng) for _ in range(self.conversations)]
        made = [self._conversation(reader, *each, rng) for each in zip(facts, rules, strict=True)]
        ways = list(self.ways()) if method.policy else list(self.ways())[:1]
        return {
            way: self._answers(reader, method.make(reader.model, self.tokens()), made, way, tell)
            for way in ways
        }

    def _answers(
        self,
        reader: Reader,
        cache: list[Any],
        conversations: list[Conversation],
        way: str,
        tell: Tell,
    ) -> dict[str, dict[str, list[bool]]]:
        """Whether fact and rule of each conversation are known after each turn that asks."""
        tokens = mx.array([each.tokens[: self.tokens()] for each in conversations])
        carry = float(way.removeprefix("carry ")) if way != PINNED else 1.0
        if way == PINNED:
            pin(cache, [each.span for each in conversations])
        right: dict[str, dict[str, list[bool]]] = {"fact": {}, "rule": {}}
        for turn in range(1, self.turns + 1):
            if turn > 1 and carry != 1.0:
                new_turn(cache, carry)
            first, end = (turn - 1) * self.turn, turn * self.turn
            read(reader.model, cache, tokens[:, first:end], reader.chunk, tell)
            if turn in self.asked_after:
                rest = [each.tokens[end:] for each in conversations]
                for name, facts in (
                    ("fact", [each.fact for each in conversations]),
                    ("rule", [each.rule for each in conversations]),
                ):
                    answers = _probe(reader, cache, facts, rest, name == "rule", tell)
                    right[name][str(turn)] = answers
        return right

    def _conversation(
        self, reader: Reader, fact: Fact, rule: Fact, rng: random.Random
    ) -> Conversation:
        """All turns, with fact and rule in the first, and a little more text."""
        statements = reader.encode(f"{rule.statement}\n\n{fact.statement}\n\n")
        first = len(reader.first)
        room = self.tokens() + MORE - first - len(statements)
        if len(statements) + first > self.turn:
            raise ValueError(f"Fact and rule do not fit into a turn of {self.turn} tokens.")
        prose = reader.prose(room, rng.randrange(len(reader.tokens)))
        span = (first, first + len(statements))
        return Conversation([*reader.first, *statements, *prose], span, fact, rule)

    def brief(self, result: Result, full: Result) -> str:
        last = str(max(self.asked_after))
        way = next(self.ways())
        return fraction(*part_of(result[way]["fact"][last], full[way]["fact"][last]))

    def section(self, results: Results) -> Section:
        first = next(self.ways())
        full = results[0][1][first]
        turns = [str(turn) for turn in self.asked_after]
        tables, lines = [], dict[str, list[float | None]]()
        for name in ("fact", "rule"):
            rows = []
            for method, result in results:
                for way, answers in result.items():
                    counts = [part_of(answers[name][turn], full[name][turn]) for turn in turns]
                    ways = [way] if len(list(self.ways())) > 1 else []
                    rows.append((method.name, *ways, *(fraction(*count) for count in counts)))
                    if name == "fact" and method is not results[0][0]:
                        line = [a / b if b else None for a, b in counts]
                        lines[", ".join([method.name, *ways])] = line
            columns = ["cache", *(["way"] * (len(list(self.ways())) > 1))]
            columns += [f"after turn {turn}" for turn in turns]
            tables.append(Table(f"The {name} of the first turn", columns, rows))
        after = [float(turn) for turn in self.asked_after]
        chart = Curves(
            "The first turn's fact", after, lines, "turn", "known, of what the full cache is"
        )
        return Section(
            "Turns",
            f"{self.conversations} conversations of {self.turns} turns of {self.turn} tokens. The "
            "first tells a rule and a fact; asking for them leaves no trace. Only what the full "
            "cache answers after the same turn counts.",
            tables,
            [chart] if len(turns) > 1 else [],
        )


def _probe(
    reader: Reader,
    cache: list[Any],
    facts: list[Fact],
    further: list[list[int]],
    free: bool,
    tell: Tell,
) -> list[bool]:
    """Whether each sequence's fact is known now; the cache stays as it is.

    Args:
        reader: Model and text.
        cache: The cache of all sequences.
        facts: The fact or rule of each sequence.
        further: Each sequence's further text; its first tokens make all questions equally long.
        free: Whether questions are sentences to complete, for which the likeliest word counts.
        tell: Called with the tokens read since the last call.
    """
    template, ending, least = reader.form.question, reader.form.ending, reader.form.least
    if free:
        template, ending, least = "{}", "", 0.0
    questions = [reader.encode("\n\n" + template.format(fact.question)) for fact in facts]
    longest = max(map(len, questions))
    rows = [
        text[: longest - len(question)] + question
        for text, question in zip(further, questions, strict=True)
    ]
    answers = [reader.encode(f" {fact.answer}{ending}") for fact in facts]
    twin = copy.deepcopy(cache)
    logits = read(reader.model, twin, mx.array(rows), 1, tell)
    return answers_right(reader.model, twin, logits, answers, least, tell)
