"""RULER's tasks, answered freely; each expected string that occurs in the answer counts."""

from __future__ import annotations

import random
from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.measures.measure import Findings, Found, Measure, fraction, part_of
from mlx_h2o.evaluate.ruler import TASKS, found_in, prompt
from mlx_h2o.evaluate.sections import Rows, Section
from mlx_h2o.evaluate.stage import Stage, in_batches, said, step
from mlx_h2o.evaluate.workers import Tell


@dataclass(frozen=True)
class RulerMeasure(Measure):
    """Some prompts of each task.

    Attributes:
        length: Tokens of a prompt.
        of_each: Prompts of each task.
        answer: Tokens of an answer.
        batch: Prompts side by side.
    """

    length: int = 1024
    of_each: int = 4
    answer: int = 32
    batch: int = 7

    name = "ruler"
    briefly = "strings of RULER's tasks said"

    def tokens(self) -> int:
        return self.length

    def work(self) -> int:
        return len(TASKS) * self.of_each * (self.length + self.answer)

    def passes(self) -> int:
        return -(-len(TASKS) * self.of_each // self.batch) * (self.answer + 2)

    def of(self, stage: Stage, contender: Contender, tell: Tell) -> Found:
        rng = random.Random(stage.seed)
        made = [
            (name, *prompt(stage, name, self.length, rng))
            for _ in range(self.of_each)
            for name in TASKS
        ]
        tokens = mx.array([row for _, row, _ in made])
        found: dict[str, list[list[bool]]] = {name: [] for name in TASKS}
        for rows in in_batches(len(made), self.batch):
            prompts = tokens[rows]
            cache = contender.after(stage, prompts[:, :-1], self.length + self.answer, tell)
            logits = step(stage.model, cache, prompts[:, -1], tell)
            answers = said(stage.model, cache, logits, self.answer, tell)
            for (name, _, task), ids in zip(made[rows], answers, strict=True):
                found[name].append(found_in(stage.tokenizer.decode(ids), task.answers))
        return {"found": found}

    def brief(self, found: Found, full: Found) -> str:
        counts = [_part(found["found"][name], full["found"][name]) for name in TASKS]
        known, asked = map(sum, zip(*counts, strict=True))
        return fraction(known, asked)

    def section(self, findings: Findings) -> Section:
        full = findings[0][1]["found"]
        rows = []
        for contender, found in findings:
            counts = [_part(found["found"][name], full[name]) for name in TASKS]
            cells = [fraction(*of_task) for of_task in counts]
            rows.append((contender.name, self.brief(found, findings[0][1]), *cells))
        asked_for = {name: sum(map(len, full[name])) for name in TASKS}
        caption = "Strings asked for in all: " + ", ".join(
            f"{name} {count}" for name, count in asked_for.items()
        )
        return Section(
            "RULER's tasks",
            f"Prompts of {self.length} tokens read in chunks, the question with the last, and "
            f"{self.answer} tokens said freely. Only strings that the full cache says count.",
            [Rows("", ("cache", "all", *TASKS), rows, caption)],
        )


def _part(ours: list[list[bool]], full: list[list[bool]]) -> tuple[int, int]:
    """Strings said, among those that the full cache says."""
    pairs = [part_of(a, b) for a, b in zip(ours, full, strict=True)]
    return sum(known for known, _ in pairs), sum(asked for _, asked in pairs)
