"""An evaluation: every measure of every contender, kept as it comes, so that it can go on later."""

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

#: Contenders that read side by side: enough to share the weights, and few enough that two cores
#: have a group each and that full caches in it fit into memory.
MOST_TOGETHER = 4

#: What a call of the model costs, in tokens of a prompt that take as long: it reads all weights. A
#: step of SmolLM2-135M with a few sequences takes 0.11 to 0.3 s, a token of a prompt 4 ms.
PASS = 30

#: Told how much is done and how much there is in all, about.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Suite:
    """What is measured of which caches, on what.

    Attributes:
        stage: Model and text.
        contenders: The full cache first.
        measures: In the order of the report.
    """

    stage: Stage
    contenders: Sequence[Contender]
    measures: Sequence[Measure]

    def run(self, job: int, tell: Tell) -> dict[str, Any]:
        """One measure of a group, by name; what could not be made is a string that says why.

        Args:
            job: Its number.
            tell: Told of the work that is done, in all as much as `work_of` says.
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
        """Side by side what can be, the others one by one."""
        together = [c for c in group if self._can_share(measure, c)] if len(group) > 1 else []
        found: dict[str, Any] = {}
        if together:
            names = [contender.name for contender in together]
            try:
                found = dict(zip(names, measure.of_all(self.stage, together, tell), strict=True))
            except ValueError:  # one by one it shows whose it is
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
            if contender.arm.name == FULL:  # then it is the text or the sizes, and nothing goes
                raise
            return str(error)

    def jobs(self) -> list[int]:
        """Every job's number: its measure, and the first contender of its group."""
        count = len(self.contenders)
        return [
            i * count + first
            for i, measure in enumerate(self.measures)
            for first in range(0, count, self._size(measure))
        ]

    def group(self, job: int) -> tuple[Measure, Sequence[Contender]]:
        """What a job's number means: a measure, and the contenders that it measures."""
        at, first = divmod(job, len(self.contenders))
        measure = self.measures[at]
        return measure, self.contenders[first : first + self._size(measure)]

    def work_of(self, job: int) -> int:
        """About how long a job takes, in tokens of a prompt that take as long."""
        measure, group = self.group(job)
        readings = sum(contender.readings for contender in group)
        calls = 1 if measure.shares else readings
        return measure.work() * readings + PASS * calls * measure.passes()

    def _size(self, measure: Measure) -> int:
        """Contenders of a group: as many in each as can be, within the most."""
        count = len(self.contenders)
        return -(-count // -(-count // MOST_TOGETHER)) if measure.shares else 1

    def settings(self) -> dict[str, Any]:
        """Everything that figures depend on but the machine, as JSON types."""
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
    """A measure's fields as JSON has them: lists for tuples."""
    return dict(json.loads(json.dumps(asdict(measure))))  # type: ignore[call-overload]


class Evaluation(Measurements):
    """What is known so far of a suite.

    Args:
        suite: What is measured.
    """

    def __init__(self, suite: Suite):
        super().__init__(suite.settings(), len(suite.measures) * len(suite.contenders))
        self.suite, self.resumed = suite, False

    @classmethod
    def begin(cls, suite: Suite, file: Path | None = None, resume: bool = False) -> Evaluation:
        """A new one, or what a file of the same suite holds.

        Args:
            suite: What shall be measured.
            file: Where it is kept.
            resume: Whether to go on with what is in the file.

        Raises:
            ValueError: There is nothing to go on with, or it is of another suite.
        """
        made = cls(suite)
        if resume and file is not None:
            made.found, made.profiles = found_in(file, made.settings), profiles_in(file)
            made.resumed = True
        return made

    def jobs(self, alone: bool) -> list[int]:
        """What is still to do, longest first: of measures that run alone, or of the others."""
        open_jobs = []
        for job in self.suite.jobs():
            measure, group = self.suite.group(job)
            if measure.alone == alone and self.lacks(measure.name, [c.name for c in group]):
                open_jobs.append(job)
        return sorted(open_jobs, key=lambda job: -self.suite.work_of(job))

    def run(self, progress: Progress, keep: Callable[[], None]) -> None:
        """Do all that is still to do.

        Args:
            progress: Told how far it is.
            keep: Called whenever something was found.

        Raises:
            ValueError: What is to be resumed was measured with another profile of the model.
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
        """What a measure found so far, the full cache first; nothing without that."""
        found = self.found.get(measure.name, {})
        done = [
            (contender, found[contender.name])
            for contender in self.suite.contenders
            if isinstance(found.get(contender.name), dict)
        ]
        return done if done and done[0][0] is self.suite.contenders[0] else []

    def known(self) -> list[tuple[Measure, Findings]]:
        """Measures that found something so far, and what."""
        found = [(measure, self.findings(measure)) for measure in self.suite.measures]
        return [(measure, findings) for measure, findings in found if findings]

    def sections(self) -> list[Section]:
        """What all measures have to say so far."""
        return [measure.section(findings) for measure, findings in self.known()]

    def refusals(self) -> dict[str, list[str]]:
        """Why contenders could not be made, and which, by measure and name."""
        reasons: dict[str, list[str]] = {}
        for measure, of in self.found.items():
            for contender, found in of.items():
                if isinstance(found, str):
                    reasons.setdefault(found, []).append(f"{measure}, {contender}")
        return reasons
