"""Few of many combinations, in which every pair of two choices occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Combinations that are drawn, and those looked at for each one taken: more find fewer that hold all
# pairs, and take longer.
DRAWN, LOOKED_AT = 3000, 40


def pairs_covered(
    choices: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool], seed: int = 0
) -> list[dict[str, Any]]:
    """Combinations in which each pair of values that can occur together does, most pairs first.

    Args:
        choices: The values of each part, by name.
        allowed: Whether a combination exists.
        seed: The seed of the order in which combinations are tried.
    """
    every = itertools.product(*choices.values())
    named = (dict(zip(choices, values, strict=True)) for values in every)
    all_allowed = [combination for combination in named if allowed(combination)]
    random.Random(seed).shuffle(all_allowed)
    left = [(combination, _pairs(combination)) for combination in all_allowed[:DRAWN]]
    missing = set().union(*(pairs for _, pairs in left)) if left else set()
    chosen = []
    while missing:
        some = [drawn for drawn in left[:LOOKED_AT] if drawn[1] & missing]
        left = left[LOOKED_AT:] + some
        if some:
            best = max(some, key=lambda drawn: len(drawn[1] & missing))
            chosen.append(best[0])
            missing -= best[1]
    return chosen


def _pairs(combination: dict[str, Any]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    named = [(name, repr(value)) for name, value in combination.items()]
    return set(itertools.combinations(named, 2))
