"""Inputs that every language can generate: integers hashed, then floats without rounding."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

# The tensors of a case (docs/reference/golden.md has the table).
Q, K, V, SINKS, MASK, LSE, LOGIT, MEAN_KEY, MEAN_VALUE, VARIANCE, WEIGHT, WORTH = range(12)


def hashed(seed: int, count: int) -> np.ndarray:
    """SplitMix64 (Steele et al. 2014) at the counters 1 to count: uint64 `[count]`."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes: np.ndarray = z ^ (z >> np.uint64(31))
    return hashes


def bell(seed: int, shape: Sequence[int]) -> np.ndarray:
    """Nearly normal numbers within -4 to 4, deviation 1.155, exact in float32.

    The sum of a hash's four 16-bit parts, less its mean, times 2^-15.
    """
    z = hashed(seed, int(np.prod(shape)))
    parts = [(z >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]
    total = np.stack(parts).astype(np.int64).sum(axis=0) - 131070
    numbers: np.ndarray = total.astype(np.float32) * np.float32(2.0**-15)
    return numbers.reshape(shape)


def seed_of(case: int, which: int, layer: int = 0) -> int:
    """The seed of one tensor of a case.

    Args:
        case: The case's seed.
        which: The tensor's number (docs/reference/golden.md).
        layer: The layer's number.
    """
    return case * 65536 + layer * 16 + which


def tensor(
    case: int,
    which: int,
    shape: Sequence[int],
    dtype: str = "float32",
    layer: int = 0,
    power: int = 0,
) -> mx.array:
    """A case's tensor: `bell` times 2^power, rounded to the dtype.

    Args:
        case: The case's seed.
        which: The tensor's number (docs/reference/golden.md).
        shape: The tensor's shape.
        dtype: The dtype to which it is rounded.
        layer: The layer's number.
        power: The power of two by which it is multiplied.
    """
    numbers = np.ldexp(bell(seed_of(case, which, layer), shape), power)
    return mx.array(numbers).astype(getattr(mx, dtype))
