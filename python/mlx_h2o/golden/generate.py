"""Writing golden vectors, by the definition and nothing faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.golden import manifest
from mlx_h2o.golden.group import Arrays, Group, Parameters
from mlx_h2o.golden.groups import GROUPS
from mlx_h2o.golden.manifest import Case, GoldenError
from mlx_h2o.golden.margins import LEAST_MARGIN

# Seeds tried until no choice of a case is a near-tie.
SEEDS = 16


def generate(
    folder: Path,
    groups: Sequence[str] = tuple(GROUPS),
    progress: Callable[[str], None] = lambda case: None,
) -> list[Case]:
    """Write the golden vectors of some groups into a folder; others that it has stay.

    Args:
        folder: Made if it is missing.
        groups: Names.
        progress: Called with each case's name.

    Raises:
        GoldenError: A case has near-ties with every seed that was tried.
    """
    cases: list[Case] = []
    arrays: dict[str, Arrays] = {}
    with only_reference():
        for name in groups:
            group, of_group = GROUPS[name], dict[str, mx.array]()
            for case_name, parameters in group.cases():
                progress(f"{name}/{case_name}")
                chosen, inputs, results, margin = clear_of_ties(group, case_name, parameters)
                for kind, found in (("in", inputs), ("out", results)):
                    for array_name, array in found.items():
                        mx.eval(array)
                        of_group[f"{case_name}/{kind}.{array_name}"] = array
                noted = None if math.isinf(margin) else margin
                cases.append(Case(name, case_name, chosen, noted))
            arrays[name] = of_group
        manifest.write(folder, cases, arrays, tuple(GROUPS))
    return cases


def clear_of_ties(
    group: Group, name: str, parameters: Parameters
) -> tuple[Parameters, Arrays, Arrays, float]:
    """Parameters with the first seed that leaves no choice to rounding, inputs, results, margin.

    Raises:
        GoldenError: There is none.
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
