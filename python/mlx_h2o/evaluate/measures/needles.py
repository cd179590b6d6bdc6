"""Recall: needles at each depth and length, the question known before memory is cut down or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_h2o._utils import checks
from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.measures.measure import ASKING, Findings, Found, Measure, fraction, part_of
from mlx_h2o.evaluate.needles import KINDS, Needle, kinds_of, needle_task
from mlx_h2o.evaluate.recall import RecallTask
from mlx_h2o.evaluate.sections import Maps, Rows, Section
from mlx_h2o.evaluate.stage import Stage, in_batches, known, read
from mlx_h2o.evaluate.workers import Tell

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
            checks.choice("kinds", kind, KINDS)
        for question in self.questions:
            checks.choice("questions", question, tuple(SEEN))

    def tokens(self) -> int:
        return max(self.lengths)

    def work(self) -> int:
        prompts = len(self.questions) * len(self.kinds) * len(self.depths) * self.of_each
        return prompts * sum(self.lengths)

    def passes(self) -> int:
        batches = -(-len(self.kinds) * len(self.depths) * self.of_each // self.batch)
        return len(self.lengths) * len(self.questions) * batches * ASKING

    def needles(self, stage: Stage) -> list[Needle]:
        """All kinds at all depths."""
        kinds = [kind for kind in self.kinds if kind in kinds_of(stage)]
        return [Needle(kind, depth) for kind in kinds for depth in self.depths]

    def of(self, stage: Stage, contender: Contender, tell: Tell) -> Found:
        records: list[dict[str, Any]] = []
        needles = self.needles(stage)
        for length in self.lengths:
            task = needle_task(stage, needles, length, self.of_each, stage.seed + length)
            for name in self.questions:
                right = asked(stage, contender, task, self.batch, SEEN[name], tell)
                for i, needle in enumerate(needles):
                    rows = right[i * self.of_each : (i + 1) * self.of_each]
                    which = {"length": length, "kind": needle.kind, "depth": needle.depth}
                    records.append({**which, "question": name, "known": rows})
        return {"records": records}

    def brief(self, found: Found, full: Found) -> str:
        """The share found with the first of the questions: unseen, if both are asked."""
        records, first = (found["records"], full["records"]), self.questions[0]
        return fraction(*of_records(*records, question=first))

    def section(self, findings: Findings) -> Section:
        full = findings[0][1]["records"]
        kinds = list(dict.fromkeys(record["kind"] for record in full))
        rows = []
        for contender, found in findings:
            cells = [contender.name]
            for question in self.questions:
                of = [of_records(found["records"], full, question=question)]
                of += [
                    of_records(found["records"], full, question=question, kind=kind)
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
            [Rows("", columns, rows)],
            [self._map(findings, question) for question in self.questions],
        )

    def _map(self, findings: Findings, question: str) -> Maps:
        """Depth by length, over all kinds."""
        full = findings[0][1]["records"]
        grids = {}
        for contender, found in findings[1:]:
            grids[contender.name] = [
                [
                    share(of_records(found["records"], full, question=question, **place))
                    for length in self.lengths
                    for place in ({"depth": depth, "length": length},)
                ]
                for depth in self.depths
            ]
        return Maps(
            f"Needles found, question {question}",
            grids,
            "tokens",
            "depth",
            [str(length) for length in self.lengths],
            [f"{depth:.0%}" for depth in self.depths],
            numbers=True,
        )


def asked(
    stage: Stage, contender: Contender, task: RecallTask, batch: int, seen: bool, tell: Tell
) -> list[bool]:
    """Whether each prompt is answered correctly, with a new cache for each batch.

    Args:
        stage: Model and text.
        contender: The contender that makes the caches.
        task: The prompts.
        batch: Prompts side by side.
        seen: Whether the question is read with the text; if not, the tokens after the shortest text
            come one by one.
        tell: Called with the tokens read since the last call.
    """
    P, T = task.prompts.shape
    right: list[bool] = []
    for rows in in_batches(P, batch):
        prompts = task.prompts[rows]
        text = T - 1 if seen else min(task.questions[rows])
        cache = contender.after(stage, prompts[:, :text], T, tell)
        logits = read(stage.model, cache, prompts[:, text:], 1, tell)
        answers = task.answers[rows]
        right += known(stage.model, cache, logits, answers, task.least, tell)
    return right


def of_records(
    records: Sequence[dict[str, Any]], full: Sequence[dict[str, Any]], **which: Any
) -> tuple[int, int]:
    """Known and asked, summed over the records of some kind, depth, length or question."""
    known_, asked_ = 0, 0
    for ours, theirs in zip(records, full, strict=True):
        if all(ours[name] == value for name, value in which.items()):
            right, of = part_of(ours["known"], theirs["known"])
            known_, asked_ = known_ + right, asked_ + of
    return known_, asked_


def share(counts: tuple[int, int]) -> float | None:
    """Known divided by asked, or None if nothing was asked."""
    right, of = counts
    return right / of if of else None
