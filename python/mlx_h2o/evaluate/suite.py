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
from mlx_h2o.evaluate.side_by_side import can_share
from mlx_h2o.evaluate.stage import Stage
from mlx_h2o.evaluate.workers import Tell, cores, finished
from mlx_h2o.files import replacing

FILE_NAME = "evaluation.json"
#: Of the file's form.
FORM = 1

#: Contenders that read side by side: enough to share the weights, and few enough that two cores
#: have a group each and that full caches in it fit into memory.
MOST_TOGETHER = 4

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

    def run(self, job: int, tell: Tell) -> dict[str, Any]:
        """One measure of a group, by name; what could not be made is a string that says why."""
        measure, group = self.group(job)
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

    def take_up(self, file: Path) -> bool:
        """Go on with what a file holds of this very suite and these versions, if it is unfinished.

        Args:
            file: Where an evaluation may have been kept.

        Returns:
            Whether there was anything.
        """
        try:
            versions = json.loads(file.read_text(encoding="utf-8"))["machine"]["versions"]
            found = _found_in(file, self.suite.settings())
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if versions != self.machine["versions"]:
            return False
        self.found = found
        if self.measured == self.measurements:  # whoever asks again wants it measured again
            self.found = {}
        return bool(self.found)

    @property
    def measurements(self) -> int:
        """How many there are in all: each measure of each contender."""
        return len(self.suite.measures) * len(self.suite.contenders)

    @property
    def measured(self) -> int:
        """How many of them are done."""
        return sum(len(self.found.get(measure.name, {})) for measure in self.suite.measures)

    def jobs(self, alone: bool) -> list[int]:
        """What is still to do, longest first: of measures that run alone, or of the others."""
        open_jobs = []
        for job in self.suite.jobs():
            measure, group = self.suite.group(job)
            found = self.found.get(measure.name, {})
            if measure.alone == alone and any(c.name not in found for c in group):
                open_jobs.append(job)
        return sorted(open_jobs, key=lambda job: -self.work_of(job))

    def work_of(self, job: int) -> int:
        """About how many tokens a job tells of."""
        measure, group = self.suite.group(job)
        return sum(measure.work() * contender.readings for contender in group)

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
                measure, _ = self.suite.group(job)
                self.found.setdefault(measure.name, {}).update(found)
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
