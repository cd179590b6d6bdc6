"""Few cases in which every pair of values meets: most faults need no more than two to show."""

import os
import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

Case = dict[str, Any]

# Of numbered cases each STEP-th runs; `make test` takes larger steps.
STEP = int(os.environ.get("MLX_H2O_STEP", "1"))


def covering(
    factors: dict[str, list[Any]], allowed: Callable[[Case], bool], seed: int = 0
) -> list[Case]:
    """Cases that together hold every pair of two factors' values; the same ones for the same seed.

    Args:
        factors: The values of each factor.
        allowed: Whether a case may be used. A pair that is in no allowed case is left out.
        seed: Other cases for other seeds.
    """
    rng = random.Random(seed)
    names = list(factors)
    places = list(combinations(range(len(names)), 2))
    missing = {
        (a, x, b, y)
        for a, b in places
        for x in range(len(factors[names[a]]))
        for y in range(len(factors[names[b]]))
    }
    cases = []
    while missing:
        a, x, b, y = wanted = min(missing)
        best, best_gain = None, 0
        for _ in range(40):
            row = [rng.randrange(len(factors[name])) for name in names]
            row[a], row[b] = x, y
            case = {name: factors[name][i] for name, i in zip(names, row, strict=True)}
            gain = sum((i, row[i], j, row[j]) in missing for i, j in places)
            if gain > best_gain and allowed(case):
                best, best_gain = (row, case), gain
        if best is None:
            missing.remove(wanted)
            continue
        row, case = best
        missing -= {(i, row[i], j, row[j]) for i, j in places}
        cases.append(case)
    return cases


def cover(cases: list[Case]) -> set[int]:
    """The numbers of few of these cases that together hold every pair of values that is in any.

    Cases of one factor have no pairs: then every value is kept.
    """
    held = [set(combinations(sorted(case.items()), 2)) or set(case.items()) for case in cases]
    missing = set().union(*held)
    chosen = set()
    while missing:
        # The first of the best, so that the choice is the same in every run.
        best = max(range(len(cases)), key=lambda i: len(held[i] & missing))
        chosen.add(best)
        missing -= held[best]
    return chosen
