"""Replays golden vectors with this machine's backends, and compares (docs/reference/golden.md).

python -m golden.verify [--out golden] [--backend reference|kernels] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from golden import manifest
from golden.groups import GROUPS
from golden.manifest import GoldenError
from mlx_h2o import cli
from mlx_h2o._progress import progress_bar
from mlx_h2o.attention.backends import choice, reference
from mlx_h2o.cli.parsing import Parser
from mlx_h2o.cli.tables import show
from mlx_h2o.evaluate.report import Table


@dataclass(frozen=True)
class Difference:
    """A result that differs from the golden one; `size` is its error in units of the tolerance."""

    backend: str
    group: str
    case: str
    array: str
    what: str
    size: float = np.inf

    def __str__(self) -> str:
        return f"{self.backend}: {self.group}/{self.case}: {self.array}: {self.what}"


@dataclass(frozen=True)
class Verdict:
    """The result of replaying a group with a backend.

    Attributes:
        backend: The backend's name.
        group: The group's name.
        cases: The number of cases.
        worst: The largest error, in units of the tolerance.
        differences: The results that differ.
    """

    backend: str
    group: str
    cases: int
    worst: float
    differences: list[Difference]


def backends() -> list[str]:
    """The backends here: the definition, and the kernels of the default device if it has any."""
    return ["reference"] if choice.backend() is reference else ["reference", "kernels"]


@contextmanager
def computing_by(backend: str) -> Iterator[None]:
    """Compute with a backend of `backends` in the block."""
    if backend == "reference":
        with choice.only_reference():
            yield
    elif backend in backends():
        yield
    else:
        raise GoldenError(f"There is no backend {backend!r} here; choose from {backends()}.")


def verify(
    folder: Path,
    by: list[str] | None = None,
    progress: Callable[[str], None] = lambda case: None,
) -> list[Verdict]:
    """Replay the golden vectors of a folder.

    Args:
        folder: The folder of the files.
        by: The backends; all by default.
        progress: Called with each case's name.

    Raises:
        GoldenError: The files cannot be used.
    """
    golden = manifest.read(folder)
    unknown = sorted({case.group for case in golden.cases} - set(GROUPS))
    if unknown:
        raise GoldenError(f"The golden vectors hold unknown groups: {', '.join(unknown)}.")
    verdicts = []
    for backend in by or backends():
        with computing_by(backend):
            for group in dict.fromkeys(case.group for case in golden.cases):
                cases = [case for case in golden.cases if case.group == group]
                worst, differences = 0.0, []
                for case in cases:
                    progress(f"{backend}: {group}/{case.name}")
                    results = GROUPS[group].run(case.parameters, golden.of(case, "in"))
                    errors, what = compared(
                        results, golden.of(case, "out"), golden.tolerances, size_of(case)
                    )
                    worst = max(worst, errors)
                    differences += [
                        Difference(backend, group, case.name, array, text, size)
                        for array, text, size in what
                    ]
                verdicts.append(Verdict(backend, group, len(cases), worst, differences))
    return verdicts


def size_of(case: manifest.Case) -> float:
    """The size of a case's generated numbers: 1, or 2^power if that is larger."""
    return float(2.0 ** max(0, case.parameters.get("power", 0)))


def compared(
    results: Mapping[str, mx.array],
    golden: Mapping[str, mx.array],
    tolerances: Mapping[str, Mapping[str, float]],
    size: float = 1.0,
) -> tuple[float, list[tuple[str, str, float]]]:
    """The largest error in units of the tolerance, and the differences: array, words, error.

    Args:
        results: The computed arrays.
        golden: The files' arrays.
        tolerances: As in the manifest.
        size: The size of the input numbers; a sum of large ones may cancel, and its absolute error
            is then of their size.
    """
    worst, differences = 0.0, []
    for name in sorted(set(results) | set(golden)):
        if name not in results or name not in golden:
            where = "here" if name in results else "in the file"
            differences.append((name, f"found only {where}", np.inf))
            continue
        a, b = results[name], golden[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            differences.append((name, f"{a.shape} {a.dtype}, not {b.shape} {b.dtype}", np.inf))
            continue
        error = distance(a, b, tolerances, size)
        worst = max(worst, error)
        if not error <= 1:
            how = "differs" if np.isinf(error) else f"is off by {error:.3g} times the tolerance"
            differences.append((name, how, error))
    return worst, differences


def distance(
    result: mx.array,
    golden: mx.array,
    tolerances: Mapping[str, Mapping[str, float]],
    size: float = 1.0,
) -> float:
    """The largest error in units of the tolerance; infinite if exactness is required and missed.

    Args:
        result: The computed array.
        golden: The file's array.
        tolerances: As in the manifest.
        size: The size of the input numbers.
    """
    if not mx.issubdtype(golden.dtype, mx.floating):
        return 0.0 if mx.array_equal(result, golden).item() else np.inf
    tolerance = tolerances[str(golden.dtype).rpartition(".")[-1]]
    a = np.array(result.astype(mx.float32)).astype(np.float64)
    b = np.array(golden.astype(mx.float32)).astype(np.float64)
    # Infinities of the same sign agree; a NaN agrees with a NaN.
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        allowed = size * tolerance["absolute"] + tolerance["relative"] * np.abs(b)
        error = np.abs(a - b) / allowed
    error = np.where(same, 0, np.where(np.isnan(error) | np.isinf(b), np.inf, error))
    return float(error.max(initial=0))


def parser() -> Parser:
    """The parser of the command line."""
    made = Parser(
        prog="golden.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--out", type=Path, default=Path(__file__).parent, metavar="DIR",
        help="the folder of the vectors (default: this one)",
    )  # fmt: skip
    made.add_argument(
        "--backend", choices=("reference", "kernels"), action="append",
        help="only this one (may be given again)",
    )  # fmt: skip
    made.add_argument("--json", action="store_true", help="print the outcome as JSON")
    made.set_defaults(run=run, command="verify")
    return made


def run(args: argparse.Namespace) -> None:
    """Replay, and print the outcome."""
    with progress_bar("replaying", transient=True) as bar:
        verdicts = verify(args.out, args.backend, bar.about)
    differences = [difference for verdict in verdicts for difference in verdict.differences]
    if args.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts]))
    else:
        show(table(verdicts))
    for difference in differences:
        print(difference, file=sys.stderr)
    if differences:
        raise GoldenError(f"{len(differences)} results differ from the golden ones.")


def table(verdicts: list[Verdict]) -> Table:
    """The verdicts for a terminal."""
    columns = ("backend", "group", "cases", "worst error / tolerated", "differences")
    rows = [
        (
            verdict.backend,
            verdict.group,
            str(verdict.cases),
            f"{verdict.worst:.2f}",
            str(len(verdict.differences)),
        )
        for verdict in verdicts
    ]
    return Table("golden vectors", columns, rows, texts=(0, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Replay; the exit code is 2 where a result differs or the files cannot be used."""
    return cli.main(argv, parser)


if __name__ == "__main__":
    sys.exit(main())
