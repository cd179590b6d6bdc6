"""The distance of a kernel's outputs from the definition's, in units of the tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np


class Tolerance(NamedTuple):
    """The tolerated error: absolute + relative * |expected|."""

    absolute: float
    relative: float


#: For outputs in a model's dtype, whose numbers are about 1: two to four of its roundings.
OUT = {
    mx.float32: Tolerance(1e-4, 1e-4),
    mx.float16: Tolerance(1e-3, 2e-3),
    mx.bfloat16: Tolerance(8e-3, 1.6e-2),
}
#: For logits and their log-sum-exp, float32 for every dtype of the operands.
LOGITS = Tolerance(5e-4, 2e-4)
#: For masses and scores made from them: probabilities, many of them small.
MASS = Tolerance(1e-6, 2e-3)
#: For outputs that must be equal.
EXACT = Tolerance(0.0, 0.0)


class Pair(NamedTuple):
    """An output of a kernel, the definition's, and their tolerance."""

    found: mx.array
    expected: mx.array
    tolerance: Tolerance


class Error(NamedTuple):
    """The largest error of a check.

    Attributes:
        size: The error in units of the tolerance; above 1 it is too large.
        where: The output with the error, and what is wrong with it; empty if all is equal.
    """

    size: float
    where: str

    @property
    def held(self) -> bool:
        """Whether it is tolerated; a NaN is not."""
        return self.size <= 1


def worst(pairs: Mapping[str, Pair]) -> Error:
    """The largest error among outputs, given by name."""
    return max((error(name, pair) for name, pair in pairs.items()), key=lambda e: e.size)


def error(name: str, pair: Pair) -> Error:
    """The error of one output. Infinities of one sign agree; a NaN agrees with nothing."""
    found, expected = (np.array(x.astype(mx.float32), np.float64) for x in pair[:2])
    if found.shape != expected.shape:
        return Error(np.inf, f"{name} has the shape {found.shape}, not {expected.shape}")
    if np.isnan(found).any():
        return Error(np.inf, f"{name} has a NaN")
    absolute, relative = pair.tolerance
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.where(found == expected, 0.0, np.abs(found - expected))
        size = np.where(apart == 0, 0.0, apart / (absolute + relative * np.abs(expected)))
    size = np.where(np.isnan(size) | (np.isinf(expected) & (apart > 0)), np.inf, size)
    largest = float(size.max(initial=0.0))
    if not largest:
        return Error(0.0, "")
    place = np.unravel_index(int(size.argmax()), size.shape)
    tolerated = absolute + relative * abs(expected[place])
    return Error(
        largest, f"{name} differs by {apart[place]:.2g} where {tolerated:.2g} is tolerated"
    )
