"""Writes golden vectors, computed by the definition alone (docs/reference/golden.md).

    python -m golden.generate [--out golden] [--groups NAME ...]

The cases are those of the groups (groups.py), which golden/verify.py replays.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from golden import manifest
from golden.group import Arrays, Group, Parameters
from golden.groups import GROUPS
from golden.manifest import Case, GoldenError
from golden.margins import LEAST_MARGIN
from mlx_h2o._blas import use_openblas
from mlx_h2o._progress import progress_bar
from mlx_h2o.attention.backends.choice import only_reference

# Seeds to try until no choice of a case is a near-tie.
SEEDS = 16


def generate(
    folder: Path,
    groups: Sequence[str] = tuple(GROUPS),
    progress: Callable[[str], None] = lambda case: None,
) -> list[Case]:
    """Write the golden vectors of some groups into a folder; its other groups stay.

    Args:
        folder: The folder; it is created if it is missing.
        groups: Names of groups.
        progress: Called with each case's name.

    Raises:
        GoldenError: A case has near-ties with every seed tried.
    """
    cases: list[Case] = []
    arrays: dict[str, Arrays] = {}
    with only_reference():
        for name in groups:
            group, of_group = GROUPS[name], dict[str, mx.array]()
            for case_name, parameters in group.cases():
                progress(f"{name}/{case_name}")
                chosen, inputs, results, margin = clear_of_ties(group, case_name, parameters)
                for kind, of_kind in (("in", inputs), ("out", results)):
                    for array_name, array in of_kind.items():
                        mx.eval(array)
                        of_group[f"{case_name}/{kind}.{array_name}"] = array
                finite = None if math.isinf(margin) else margin
                cases.append(Case(name, case_name, chosen, finite))
            arrays[name] = of_group
        write(folder, cases, arrays, tuple(GROUPS))
    return cases


def clear_of_ties(
    group: Group, name: str, parameters: Parameters
) -> tuple[Parameters, Arrays, Arrays, float]:
    """Parameters with the first seed that leaves no choice to rounding; inputs, results, margin.

    Raises:
        GoldenError: There is no such seed.
    """
    best = 0.0
    for attempt in range(SEEDS):
        tried = {**parameters, "seed": parameters["seed"] + attempt}
        inputs = group.inputs(tried)
        results, margin = group.watched(tried, inputs)
        if margin >= LEAST_MARGIN:
            return tried, inputs, results, margin
        best = max(best, margin)
    raise GoldenError(
        f"Case {name} leaves choices to rounding: its margin is {best:.1e}, below {LEAST_MARGIN}."
    )


def write(
    folder: Path, cases: Sequence[Case], arrays: dict[str, Arrays], order: Sequence[str] = ()
) -> None:
    """Write the files of some groups, beside those of other groups in the folder.

    Args:
        folder: The folder; it is created if it is missing.
        cases: The groups' cases.
        arrays: Arrays by group and then by "case/in.name" or "case/out.name".
        order: All groups, in the manifest's order.

    Raises:
        GoldenError: A file of another group in the folder is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    others = set(order) - set(arrays)
    if others and (folder / manifest.FILE_NAME).exists():
        others_cases = [
            case for case in manifest.read(folder, others).cases if case.group in others
        ]
        cases = [*cases, *others_cases]
    places = {group: i for i, group in enumerate(order)}
    cases = sorted(cases, key=lambda case: places.get(case.group, 0))
    for group, of_group in arrays.items():
        metadata = {"format": manifest.FORMAT, "schema": str(manifest.SCHEMA), "group": group}
        mx.save_safetensors(str(folder / f"{group}.safetensors"), dict(of_group), metadata)
    names = [f"{group}.safetensors" for group in dict.fromkeys(case.group for case in cases)]
    (folder / manifest.CASES_NAME).write_text("\n".join(manifest.flat_text(cases)) + "\n")
    head = {
        "format": manifest.FORMAT,
        "schema": manifest.SCHEMA,
        "versions": {"mlx_h2o": version("mlx-h2o"), "mlx": version("mlx")},
        "platform": f"{platform.system()} {platform.machine()}",
        "least_margin": LEAST_MARGIN,
        "tolerances": manifest.TOLERANCES,
        "files": {name: manifest.digest(folder / name) for name in (*names, manifest.CASES_NAME)},
    }
    lines = [json.dumps(vars(case), separators=(",", ":")) for case in cases]
    text = json.dumps(head, indent=1)[:-2] + ',\n "cases": [\n' + ",\n".join(lines) + "\n ]\n}\n"
    (folder / manifest.FILE_NAME).write_text(text)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="DIR")
    made.add_argument(
        "--groups", nargs="+", choices=GROUPS, metavar="NAME", default=tuple(GROUPS),
        help=f"only some of {', '.join(GROUPS)}",
    )  # fmt: skip
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Write the vectors, and print the number of cases."""
    args = parser().parse_args(argv)
    use_openblas()
    with progress_bar("generating", transient=True) as bar:
        cases = generate(args.out, args.groups, bar.about)
    size = sum(path.stat().st_size for path in args.out.iterdir() if path.is_file())
    print(f"{len(cases)} cases, {size:,} bytes in {args.out}.")


if __name__ == "__main__":
    main()
