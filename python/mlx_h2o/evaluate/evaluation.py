"""An evaluation: every measure of every method, on disk as it comes, so that it can go on.

reader = Reader("smollm2-135m", text, "cloze", chunk=256)
evaluation = Evaluation(reader, sized(default_methods(["h2o"]), [0.25]), [PerplexityMeasure()])
evaluation.run()
evaluation.sections()
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_h2o._files import replacing
from mlx_h2o._progress import Progress
from mlx_h2o.evaluate.machine import machine
from mlx_h2o.evaluate.measures import Measure, Results
from mlx_h2o.evaluate.methods import FULL, Method, profile_digests
from mlx_h2o.evaluate.reader import Reader, Tell
from mlx_h2o.evaluate.report import Section
from mlx_h2o.evaluate.side_by_side import can_share

#: The version of the file format.
FORM = 2
#: Methods that read side by side: enough to share the weights, and few enough that the group's full
#: caches fit into memory.
MOST_TOGETHER = 4
#: The cost of a model call, which reads all weights, in prompt tokens that take as long. A step of
#: SmolLM2-135M with a few sequences takes 0.11 to 0.3 s, a token of a prompt 4 ms.
PASS = 30

#: One measure of a group of methods.
Job = tuple[Measure, Sequence[Method]]


class Evaluation:
    """The measures and methods of an evaluation, and their results so far.

    Args:
        reader: Model and text.
        methods: The methods, the full cache first.
        measures: The measures, in the order of the report.

    Attributes:
        machine: The measuring machine.
        results: Results as JSON types, by the names of measure and method; that of a method that
            failed is the reason, a string.
        profiles: The digest of each method's profile by the method's name; None if not known yet.
    """

    def __init__(self, reader: Reader, methods: Sequence[Method], measures: Sequence[Measure]):
        if not methods or methods[0].label != FULL:
            raise ValueError("The first method of an evaluation must be the full cache.")
        self.reader, self.methods, self.measures = reader, methods, measures
        self.machine: dict[str, Any] = machine()
        self.results: dict[str, dict[str, Any]] = {}
        self.profiles: dict[str, str] | None = None

    @property
    def count(self) -> int:
        """The number of measurements that are done."""
        return sum(map(len, self.results.values()))

    @property
    def total(self) -> int:
        """The number of measurements in all."""
        return len(self.measures) * len(self.methods)

    # -- measuring --------------------------------------------------------------------------------

    def jobs(self) -> Iterator[Job]:
        """The jobs left, in the order of the report."""
        for measure in self.measures:
            results = self.results.get(measure.name, {})
            left = [method for method in self.methods if method.name not in results]
            # Equal groups, as large as `MOST_TOGETHER` allows.
            groups = max(-(-len(left) // (MOST_TOGETHER if measure.shares else 1)), 1)
            size = max(-(-len(left) // groups), 1)
            for first in range(0, len(left), size):
                yield measure, left[first : first + size]

    def run(
        self,
        progress: Progress = lambda done, whole: None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """Do all jobs that are left.

        Args:
            progress: Called with the approximate amounts of work done and in all.
            keep: Called after each new result.

        Raises:
            ValueError: The text is too short.
        """
        self._check_profiles(profile_digests(self.reader.model, self.methods))
        jobs = list(self.jobs())
        whole, before = sum(map(work_of, jobs)), 0
        for job in jobs:
            work = work_of(job)
            amount = 0

            def tell(tokens: int, before: int = before, work: int = work) -> None:
                nonlocal amount  # each call of the model calls this
                amount = min(amount + tokens + PASS, work)
                progress(before + amount, whole)

            self.results.setdefault(job[0].name, {}).update(self.measure_group(job, tell))
            before += work
            progress(before, whole)
            keep()

    def measure_group(self, job: Job, tell: Tell) -> dict[str, Any]:
        """A job's results, by the methods' names.

        Args:
            job: One measure of a group of methods.
            tell: Called with the tokens read since the last call.

        Raises:
            ValueError: The full cache fails: the text or the sizes are at fault.
        """
        measure, group = job
        together = [m for m in group if self._can_share(measure, m)] if len(group) > 1 else []
        results: dict[str, Any] = {}
        if together:
            names = [method.name for method in together]
            try:
                of_all = measure.of_all(self.reader, together, tell)
                results = dict(zip(names, of_all, strict=True))
            except ValueError:  # measured one by one, the method at fault shows
                pass
        for method in group:
            if method.name not in results:
                try:
                    results[method.name] = measure.of(self.reader, method, tell)
                except ValueError as error:
                    if method.label == FULL:
                        raise
                    results[method.name] = str(error)
        return results

    def _can_share(self, measure: Measure, method: Method) -> bool:
        """Whether it can be made, and read side by side with others."""
        try:
            return can_share(method.make(self.reader.model, measure.tokens()))
        except ValueError:
            return False

    # -- results ----------------------------------------------------------------------------------

    def results_of(self, measure: Measure) -> Results:
        """A measure's results so far, the full cache first; empty without the full cache."""
        results = self.results.get(measure.name, {})
        done = [
            (method, results[method.name])
            for method in self.methods
            if isinstance(results.get(method.name), dict)
        ]
        return done if done and done[0][0] is self.methods[0] else []

    def by_measure(self) -> list[tuple[Measure, Results]]:
        """Measures with results so far, and the results."""
        pairs = [(measure, self.results_of(measure)) for measure in self.measures]
        return [(measure, results) for measure, results in pairs if results]

    def sections(self) -> list[Section]:
        """The sections of all measures so far."""
        return [measure.section(results) for measure, results in self.by_measure()]

    def refusals(self) -> list[str]:
        """The reasons why methods could not be measured, with measures and methods."""
        reasons: dict[str, list[str]] = {}
        for measure, results in self.results.items():
            for method, result in results.items():
                if isinstance(result, str):
                    reasons.setdefault(result, []).append(f"{measure}, {method}")
        return [f"{reason} ({'; '.join(where)})" for reason, where in reasons.items()]

    # -- files ------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Everything but the machine on which figures depend, as JSON types."""
        text = self.reader.text
        return {
            "model": self.reader.model_name,
            "text": f"{len(text)} characters",
            "digest": hashlib.sha256(text.encode()).hexdigest(),
            "facts": self.reader.facts,
            "chunk": self.reader.chunk,
            "seed": self.reader.seed,
            "methods": {method.name: method.described() for method in self.methods},
            "measures": {measure.name: sizes_of(measure) for measure in self.measures},
        }

    def as_json(self) -> dict[str, Any]:
        """All results, as JSON types."""
        return {
            "form": FORM,
            "settings": self.settings(),
            "machine": self.machine,
            "profiles": self.profiles,
            "results": self.results,
        }

    def save(self, file: Path) -> None:
        """Write all results, replacing the file once they are written."""
        text = json.dumps(self.as_json(), indent=1) + "\n"
        with replacing(file) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def take_up(self, file: Path) -> bool:
        """Take over a file's results if its settings and versions are the same.

        Args:
            file: The file that may hold earlier results.

        Returns:
            Whether any were taken over.
        """
        now = self.as_json()
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
            results = dict(before["results"])
            same = all(before[name] == now[name] for name in ("form", "settings"))
            same = same and before["machine"]["versions"] == now["machine"]["versions"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if same:
            self.results, self.profiles = results, before.get("profiles")
        return same and bool(results)

    def _check_profiles(self, profiles: dict[str, str]) -> None:
        """Note the methods' profiles; figures measured with other profiles are measured again."""
        if self.results and self.profiles is not None and self.profiles != profiles:
            names = {**profiles, **self.profiles}
            changed = sorted(n for n in names if profiles.get(n) != self.profiles.get(n))
            print(
                f"The profile of {', '.join(changed)} is not the one that was measured with: "
                "everything is measured again.",
                file=sys.stderr,
            )
            self.results = {}
        self.profiles = profiles


def work_of(job: Job) -> int:
    """The approximate duration of a job, in prompt tokens that take as long."""
    measure, group = job
    readings = sum(method.readings for method in group)
    calls = 1 if measure.shares else readings
    return measure.work() * readings + PASS * calls * measure.passes()


def sizes_of(measure: Measure) -> dict[str, Any]:
    """A measure's fields as JSON types: lists for tuples."""
    return dict(json.loads(json.dumps(asdict(measure))))  # type: ignore[call-overload]
