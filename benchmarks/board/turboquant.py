"""TurboQuant: rows rotated at random, each coordinate rounded to the best levels for a Gaussian.

Source: *TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate*,
https://arxiv.org/abs/2504.19874 (its variant for least squares). A row is divided by its length
and rotated, after which each coordinate is nearly Gaussian with variance 1/D; Lloyd and Max's
levels for that need no data. A row takes `bits` for each number, and 2 bytes for its length. Every
token stays.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.board.column_cache import ELEMENT, ColumnCache, kinds_of
from benchmarks.board.reading import having_read, through
from benchmarks.board.rivals import Rival
from benchmarks.board.tasks import Task
from mlx_h2o.evaluate.reader import Reader

#: Points of the Gaussian from which levels are computed, and steps of Lloyd's iteration.
POINTS, STEPS = 20_001, 300
TINY = 1e-9


@cache
def levels(bits: int) -> mx.array:
    """The 2^bits levels with the least squared error for a standard Gaussian, ascending."""
    x = np.linspace(-6, 6, POINTS)
    weight = np.exp(-0.5 * x * x)
    quantiles = np.quantile(
        np.random.default_rng(0).normal(size=POINTS), (np.arange(2**bits) + 0.5) / 2**bits
    )
    for _ in range(STEPS):
        nearest = np.searchsorted((quantiles[1:] + quantiles[:-1]) / 2, x)
        quantiles = np.bincount(nearest, weight * x, 2**bits) / np.bincount(
            nearest, weight, 2**bits
        )
    return mx.array(quantiles.astype(np.float32))


@cache
def rotation(width: int) -> mx.array:
    """A random rotation `[width, width]`, always the same."""
    drawn = np.random.default_rng(width).normal(size=(width, width))
    return mx.array(np.linalg.qr(drawn)[0].astype(np.float32))


def rounded(rows: mx.array, bits: int) -> mx.array:
    """Rows `[..., D]` as they are after packing and unpacking."""
    D = rows.shape[-1]
    lengths = mx.maximum(mx.linalg.norm(rows, axis=-1, keepdims=True), TINY)
    turned = rows / lengths @ rotation(D) * D**0.5
    of_bits = levels(bits)
    middles = (of_bits[1:] + of_bits[:-1]) / 2
    which = (turned[..., None] > middles).sum(axis=-1)
    result: mx.array = of_bits[which] @ rotation(D).T * (lengths / D**0.5)
    return result


class TurboCache(ColumnCache):
    """One layer.

    Args:
        bits: Bits of a number.
    """

    def __init__(self, bits: int):
        super().__init__()
        self.bits = bits

    @property
    def counted(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        rows = self.keys[..., 0].size
        return (self.keys.size + self.values.size) * self.bits // 8 + 2 * rows * ELEMENT

    def stored(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return rounded(keys, self.bits), rounded(values, self.bits)


def rivals() -> list[Rival]:
    """TurboQuant in several widths."""
    return [_rival(bits) for bits in (4, 3, 2)]


def _rival(bits: int) -> Rival:
    def sized(reader: Reader, part: Task, share: float) -> list[Any]:
        return having_read(reader, [TurboCache(bits) for _ in kinds_of(reader.model)], part)

    return Rival(
        f"TurboQuant, {bits} bits (from the paper)",
        "https://arxiv.org/abs/2504.19874",
        "keys and values alike, the variant for least squares; held unpacked here",
        through(sized),
        keeps_all=True,
    )
