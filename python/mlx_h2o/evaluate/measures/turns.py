"""Turns: the first turn's fact, asked for after many more, and a rule that must always hold."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.measures.measure import ASKING, Findings, Found, Measure, fraction, part_of
from mlx_h2o.evaluate.needles import facts_of
from mlx_h2o.evaluate.recall import Fact
from mlx_h2o.evaluate.sections import Curves, Rows, Section
from mlx_h2o.evaluate.stage import Stage, known, read
from mlx_h2o.evaluate.workers import Tell

_SIGNALS = "bell drum horn whistle gong trumpet siren clapper".split()
_REPLIES = "copper walnut velvet thunder lemon harbour feather marble candle saddle".split()

#: Tokens of text beyond the last turn, for questions of unequal lengths.
MORE = 64


def rule(rng: random.Random) -> Fact:
    """A rule: a signal that is always answered by the same word."""
    signal, reply = rng.choice(_SIGNALS), rng.choice(_REPLIES)
    return Fact(
        f"There is one rule here. Whenever the {signal} sounds, everybody says the word {reply}.",
        f"Hear! Whenever the {signal} sounds, everybody says the word",
        reply,
    )


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
    """

    conversations: int = 8
    turns: int = 8
    turn: int = 128
    asked_after: tuple[int, ...] = (2, 4, 6, 8)

    name = "turns"
    briefly = "facts of the first turn known after the last"

    def tokens(self) -> int:
        return self.turns * self.turn

    def work(self) -> int:
        return self.conversations * self.tokens()

    def passes(self) -> int:
        # Fact and rule are asked for separately.
        return 2 * self.turns + 2 * len(self.asked_after) * ASKING

    def of(self, stage: Stage, contender: Contender, tell: Tell) -> Found:
        rng = random.Random(stage.seed)
        facts = [facts_of(stage, "single", rng)[0] for _ in range(self.conversations)]
        rules = [rule(rng) for _ in range(self.conversations)]
        rows = [self._conversation(stage, *told, rng) for told in zip(facts, rules, strict=True)]
        tokens = mx.array(rows)[:, : self.tokens()]
        cache = contender.make(stage.model, self.tokens())
        right: dict[str, dict[str, list[bool]]] = {"fact": {}, "rule": {}}
        for turn in range(1, self.turns + 1):
            part = tokens[:, (turn - 1) * self.turn : turn * self.turn]
            read(stage.model, cache, part, stage.chunk, tell)
            if turn in self.asked_after:
                rest = [row[turn * self.turn :] for row in rows]
                right["fact"][str(turn)] = _asked(stage, cache, facts, rest, False, tell)
                right["rule"][str(turn)] = _asked(stage, cache, rules, rest, True, tell)
        return right

    def _conversation(self, stage: Stage, fact: Fact, rule: Fact, rng: random.Random) -> list[int]:
        """Token ids of all turns, with fact and rule in the first, and of a little more text."""
        told = stage.encode(f"{rule.statement}\n\n{fact.statement}\n\n")
        room = self.tokens() + MORE - len(stage.first) - len(told)
        if len(told) + len(stage.first) > self.turn:
            raise ValueError(f"Fact and rule do not fit into a turn of {self.turn} tokens.")
        return [*stage.first, *told, *stage.prose(room, rng.randrange(len(stage.tokens)))]

    def brief(self, found: Found, full: Found) -> str:
        last = str(max(self.asked_after))
        return fraction(*part_of(found["fact"][last], full["fact"][last]))

    def section(self, findings: Findings) -> Section:
        full = findings[0][1]
        turns = [str(turn) for turn in self.asked_after]
        tables, lines = [], dict[str, list[float | None]]()
        for name in ("fact", "rule"):
            rows = []
            for contender, found in findings:
                counts = [part_of(found[name][turn], full[name][turn]) for turn in turns]
                rows.append((contender.name, *(fraction(*count) for count in counts)))
                if name == "fact" and found is not full:
                    lines[contender.name] = [a / b if b else None for a, b in counts]
            columns = ("cache", *(f"after turn {turn}" for turn in turns))
            tables.append(Rows(f"The {name} of the first turn", columns, rows))
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
            [chart],
        )


def _asked(
    stage: Stage,
    cache: list[object],
    told: list[Fact],
    going_on: list[list[int]],
    free: bool,
    tell: Tell,
) -> list[bool]:
    """Whether each sequence's fact is known now; the cache stays as it is.

    Args:
        stage: Model and text.
        cache: The cache of all sequences.
        told: The fact or rule that each sequence was told.
        going_on: Each sequence's further text; its first tokens make all questions equally long.
        free: Whether questions are sentences to complete, for which the likeliest word counts.
        tell: Called with the tokens read since the last call.
    """
    asking, ending, least = stage.form.asking, stage.form.ending, stage.form.least
    if free:
        asking, ending, least = "{}", "", 0.0
    questions = [stage.encode("\n\n" + asking.format(fact.question)) for fact in told]
    longest = max(map(len, questions))
    rows = [
        text[: longest - len(question)] + question
        for text, question in zip(going_on, questions, strict=True)
    ]
    answers = [stage.encode(f" {fact.answer}{ending}") for fact in told]
    asked = copy.deepcopy(cache)
    logits = read(stage.model, asked, mx.array(rows), 1, tell)
    return known(stage.model, asked, logits, answers, least, tell)
