"""An evaluation: every measure of every contender, saved as it comes, so that it can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_h2o.evaluate.arms import FULL, profile_digests
from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.measurements import Measurements, found_in, profiles_in
from mlx_h2o.evaluate.measures import Findings, Measure
from mlx_h2o.evaluate.sections import Section
from mlx_h2o.evaluate.side_by_side import can_share
from mlx_h2o.evaluate.stage import Stage
from mlx_h2o.evaluate.workers import Tell, cores, finished

FILE_NAME = "evaluation.json"

#: Contenders that read side by side: enough to share the weights, and few enough that each of two
#: cores has a group and that the group's full caches fit into memory.
MOST_TOGETHER = 4

#: The cost of a model call, which reads all weights, in prompt tokens that take as long. A step of
#: SmolLM2-135M with a few sequences takes 0.11 to 0.3 s, a token of a prompt 4 ms.
PASS = 30

#: Called with the approximate amounts of work done and in all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Suite:
    """The measures and contenders of an evaluation, and its model and text.

    Attributes:
        stage: Model and text.
        contenders: The contenders, the full cache first.
        measures: The measures, in the order of the report.
    """

    stage: Stage
    contenders: Sequence[Contender]
    measures: Sequence[Measure]

    def run(self, job: int, tell: Tell) -> dict[str, Any]:
        """One measure of a group, by name; the result of a contender that failed is the reason, a
        string.

        Args:
            job: The job's number.
            tell: Called with the work done since the last call, in all as much as `work_of` says.
        """
        measure, group = self.group(job)
        whole, told = self.work_of(job), 0

        def note(tokens: int) -> None:  # at each call of the model
            nonlocal told
            more = min(tokens + PASS, whole - told)
            told += more
            tell(more)

        found = self._of_group(measure, group, note)
        tell(whole - told)
        return found

    def _of_group(self, measure: Measure, group: Sequence[Contender], tell: Tell) -> dict[str, Any]:
        """Measure contenders side by side where they can be, and the others one by one."""
        together = [c for c in group if self._can_share(measure, c)] if len(group) > 1 else []
        found: dict[str, Any] = {}
        if together:
            names = [contender.name for contender in together]
            try:
                found = dict(zip(names, measure.of_all(self.stage, together, tell), strict=True))
            except ValueError:  # measured one by one, the contender at fault shows
                together = []
        rest = [contender for contender in group if contender not in together]
        return found | {c.name: self._of_one(measure, c, tell) for c in rest}

    def _can_share(self, measure: Measure, contender: Contender) -> bool:
        """Whether it can be made, and read side by side with others."""
        try:
            return can_share(contender.make(self.stage.model, measure.tokens()))
        except ValueError:
            return False

    def _of_one(self, measure: Measure, contender: Contender, tell: Tell) -> Any:
        try:
            return measure.of(self.stage, contender, tell)
        except ValueError as error:
            if contender.arm.name == FULL:  # the text or the sizes are at fault
                raise
            return str(error)

    def jobs(self) -> list[int]:
        """Each job's number: it stands for a measure and the first contender of its group."""
        count = len(self.contenders)
        return [
            i * count + first
            for i, measure in enumerate(self.measures)
            for first in range(0, count, self._size(measure))
        ]

    def group(self, job: int) -> tuple[Measure, Sequence[Contender]]:
        """The measure of a job, and the contenders that it measures."""
        at, first = divmod(job, len(self.contenders))
        measure = self.measures[at]
        return measure, self.contenders[first : first + self._size(measure)]

    def work_of(self, job: int) -> int:
        """The approximate duration of a job, in prompt tokens that take as long."""
        measure, group = self.group(job)
        readings = sum(contender.readings for contender in group)
        calls = 1 if measure.shares else readings
        return measure.work() * readings + PASS * calls * measure.passes()

    def _size(self, measure: Measure) -> int:
        """Contenders of a group: equal groups, as large as `MOST_TOGETHER` allows."""
        count = len(self.contenders)
        return -(-count // -(-count // MOST_TOGETHER)) if measure.shares else 1

    def settings(self) -> dict[str, Any]:
        """Everything but the machine on which figures depend, as JSON types."""
        text = self.stage.text
        return {
            "model": self.stage.model_name,
            "text": f"{len(text)} characters",
            "digest": hashlib.sha256(text.encode()).hexdigest(),
            "facts": self.stage.facts,
            "chunk": self.stage.chunk,
            "seed": self.stage.seed,
            "contenders": {c.name: c.arm.described() for c in self.contenders},
            "measures": {measure.name: sizes_of(measure) for measure in self.measures},
        }


def sizes_of(measure: Measure) -> dict[str, Any]:
    """A measure's fields as JSON types: lists for tuples."""
    return dict(json.loads(json.dumps(asdict(measure))))  # type: ignore[call-overload]


class Evaluation(Measurements):
    """The measurements of a suite so far.

    Args:
        suite: The measures and contenders.
    """

    def __init__(self, suite: Suite):
        super().__init__(suite.settings(), len(suite.measures) * len(suite.contenders))
        self.suite, self.resumed = suite, False

    @classmethod
    def begin(cls, suite: Suite, file: Path | None = None, resume: bool = False) -> Evaluation:
        """A new evaluation, or the one that a file of the same suite holds.

        Args:
            suite: The measures and contenders.
            file: The file that holds it.
            resume: Whether to continue the evaluation in the file.

        Raises:
            ValueError: There is nothing to continue, or it is of another suite.
        """
        made = cls(suite)
        if resume and file is not None:
            made.found, made.profiles = found_in(file, made.settings), profiles_in(file)
            made.resumed = True
        return made

    def jobs(self, alone: bool) -> list[int]:
        """The jobs left, longest first: of measures that run alone, or of the others."""
        open_jobs = []
        for job in self.suite.jobs():
            measure, group = self.suite.group(job)
            if measure.alone == alone and self.lacks(measure.name, [c.name for c in group]):
                open_jobs.append(job)
        return sorted(open_jobs, key=lambda job: -self.suite.work_of(job))

    def run(self, progress: Progress, keep: Callable[[], None]) -> None:
        """Do all jobs that are left.

        Args:
            progress: Called with the approximate amounts of work done and in all.
            keep: Called after each new result.

        Raises:
            ValueError: The evaluation to resume was measured with another profile of the model.
        """
        arms = [contender.arm for contender in self.suite.contenders]
        profiles = profile_digests(self.suite.stage.model, arms)
        self.measured_with(profiles, must_be_same=self.resumed)
        waiting = {alone: self.jobs(alone) for alone in (False, True)}
        works = {job: self.suite.work_of(job) for jobs in waiting.values() for job in jobs}
        whole, before = sum(works.values()), 0
        for alone, jobs in waiting.items():
            of_part = sum(works[job] for job in jobs)

            def told(done: int, before: int = before, most: int = of_part) -> None:
                progress(before + min(done, most), whole)

            workers = 1 if alone else cores()
            for job, found in finished(self.suite, jobs, told, workers, fresh=alone):
                measure, _ = self.suite.group(job)
                self.add(measure.name, found)
                keep()
            before += of_part

    def findings(self, measure: Measure) -> Findings:
        """A measure's findings so far, the full cache first; empty without the full cache."""
        found = self.found.get(measure.name, {})
        done = [
            (contender, found[contender.name])
            for contender in self.suite.contenders
            if isinstance(found.get(contender.name), dict)
        ]
        return done if done and done[0][0] is self.suite.contenders[0] else []

    def known(self) -> list[tuple[Measure, Findings]]:
        """Measures with findings so far, and the findings."""
        found = [(measure, self.findings(measure)) for measure in self.suite.measures]
        return [(measure, findings) for measure, findings in found if findings]

    def sections(self) -> list[Section]:
        """The sections of all measures so far."""
        return [measure.section(findings) for measure, findings in self.known()]

    def refusals(self) -> dict[str, list[str]]:
        """The reasons why contenders could not be made, and their names, by measure."""
        reasons: dict[str, list[str]] = {}
        for measure, of in self.found.items():
            for contender, found in of.items():
                if isinstance(found, str):
                    reasons.setdefault(found, []).append(f"{measure}, {contender}")
        return reasons
