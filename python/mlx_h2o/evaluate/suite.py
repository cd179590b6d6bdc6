"""An evaluation: every measure of every contender, kept as it comes, so that it can go on later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlx_h2o.bench.machine import machine
from mlx_h2o.evaluate.arms import FULL
from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.measures import Findings, Measure
from mlx_h2o.evaluate.sections import Section
from mlx_h2o.evaluate.stage import Stage
from mlx_h2o.evaluate.workers import Tell, cores, finished
from mlx_h2o.files import replacing

FILE_NAME = "evaluation.json"
#: Of the file's form.
FORM = 1

#: Told how many tokens are done and how many there are in all, about.
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

    def run(self, job: int, tell: Tell) -> Any:
        """One measure of one contender; what could not be made is a string that says why."""
        measure, contender = self.pair(job)
        try:
            return measure.of(self.stage, contender, tell)
        except ValueError as error:
            if contender.arm.name == FULL:  # then it is the text or the sizes, and nothing goes
                raise
            return str(error)

    def pair(self, job: int) -> tuple[Measure, Contender]:
        """What a job's number means."""
        measure, contender = divmod(job, len(self.contenders))
        return self.measures[measure], self.contenders[contender]

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


@dataclass
class Evaluation:
    """What is known so far.

    Attributes:
        suite: What is measured.
        machine: What measured it.
        found: By measure and contender: what was found, or a string that says why it could not be.
    """

    suite: Suite
    machine: dict[str, Any]
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

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
        made = cls(suite, machine())
        if resume and file is not None:
            made.found = _found_in(file, suite.settings())
        return made

    def jobs(self, alone: bool) -> list[int]:
        """What is still to do, longest first: of measures that run alone, or of the others."""
        measures, contenders = self.suite.measures, self.suite.contenders
        open_jobs = [
            i * len(contenders) + j
            for i, measure in enumerate(measures)
            for j, contender in enumerate(contenders)
            if measure.alone == alone and contender.name not in self.found.get(measure.name, {})
        ]
        return sorted(open_jobs, key=lambda job: -self.work_of(job))

    def work_of(self, job: int) -> int:
        """About how many tokens a job tells of."""
        measure, contender = self.suite.pair(job)
        return measure.work() * contender.readings

    def run(self, progress: Progress, keep: Callable[[], None]) -> None:
        """Do all that is still to do.

        Args:
            progress: Told how far it is.
            keep: Called whenever something was found.
        """
        waiting = {alone: self.jobs(alone) for alone in (False, True)}
        works = {job: self.work_of(job) for jobs in waiting.values() for job in jobs}
        whole, before = sum(works.values()), 0
        for alone, jobs in waiting.items():
            of_part = sum(works[job] for job in jobs)

            def told(done: int, before: int = before, most: int = of_part) -> None:
                progress(before + min(done, most), whole)

            workers = 1 if alone else cores()
            for job, found in finished(self.suite, jobs, told, workers, fresh=alone):
                measure, contender = self.suite.pair(job)
                self.found.setdefault(measure.name, {})[contender.name] = found
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

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "form": FORM,
            "settings": self.suite.settings(),
            "machine": self.machine,
            "found": self.found,
        }

    def save(self, file: Path) -> None:
        """Write everything, replacing what is there when all is written."""
        text = json.dumps(self.as_json(), indent=1) + "\n"
        with replacing(file) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _found_in(file: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a file holds, of a suite with these settings.

    Raises:
        ValueError: It cannot be read, or is of another suite; the message says what differs.
    """
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        found, made_with, form = kept["found"], kept["settings"], kept["form"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"There is no evaluation to go on with in {file}: {error}.") from error
    if form != FORM:
        raise ValueError(f"{file} is of another version: begin anew, without --resume.")
    differs = [name for name in settings if made_with.get(name) != settings[name]]
    if differs:
        raise ValueError(
            f"{file} was begun with another {', '.join(differs)}: give the same options, or begin "
            "anew, without --resume."
        )
    return {name: dict(of) for name, of in found.items()}
