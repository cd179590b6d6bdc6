"""The figures that this library means to reach, and whether it did."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_h2o.bench import attention, model
from mlx_h2o.bench.attention import LARGE
from mlx_h2o.bench.measuring import Samples

# From so many slots on, prices of exporting count.
MANY_SLOTS = 4096


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: For people.
        value: What was measured (the median, where several cases tell).
        worst: The worst of those cases.
        bound: What is aimed at.
        at_least: Whether more is better.
    """

    name: str
    value: float
    worst: float
    bound: float
    at_least: bool

    @property
    def reached(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def figure(name: str, values: Iterable[float], bound: float, at_least: bool) -> list[Figure]:
    """A figure from the cases that tell, or nothing if none was measured."""
    found = list(values)
    if not found:
        return []
    worst = min(found) if at_least else max(found)
    return [Figure(name, statistics.median(found), worst, bound, at_least)]


def attention_figures(results: Sequence[attention.Result]) -> list[Figure]:
    """Speed over MLX, share of the bandwidth, prices."""
    large = [r for r in results if r.case.shape == LARGE and r.case.slots == MANY_SLOTS]
    many = [r for r in results if r.case.slots >= MANY_SLOTS]
    by_dtype = {r.case.dtype: r for r in large}
    figures = []
    for dtype, bound in (("float32", 12.0), ("float16", 25.0), ("bfloat16", 25.0)):
        speeds = [
            r.samples.speed(attention.OFF, attention.MLX) for d, r in by_dtype.items() if d == dtype
        ]
        figures += figure(f"times as fast as MLX, {dtype}, {MANY_SLOTS} slots", speeds, bound, True)
    shares = [r.share_of_bandwidth(attention.OFF) for r in large if r.case.dtype == "float32"]
    figures += figure(f"share of read bandwidth, float32, {MANY_SLOTS} slots", shares, 0.6, True)
    for price, text, bound in (
        ("scores", "price of exporting scores", 0.03),
        ("mass", "price of mass only", 0.05),
        ("ragged", "price of ragged heads", 0.1),
        ("ragged_step", "price of ragged heads, fused step", 0.1),
    ):
        arm, base = attention.PRICES[price]
        prices = [r.price(arm, base) for r in many if arm in r.samples.arms]
        figures += figure(f"{text}, from {MANY_SLOTS} slots", prices, bound, False)
    return figures


def model_figures(decoding: Samples, prompt: Samples) -> list[Figure]:
    """Speed of the policies over having none, over mlx-lm's window, and of reading a prompt."""
    figures = []
    for arm in (model.DEFAULT, model.H2O):
        for base, bound in ((model.STREAMING, 0.97), (model.WINDOW, 1.0)):
            speed = decoding.speed(arm, base)
            figures += figure(f"decoding speed of {arm} over {base}", [speed], bound, True)
    longer = prompt.ratio(model.DEFAULT, model.PLAIN)
    figures += figure(f"time to read a prompt over {model.PLAIN}", [longer], 1.0, False)
    return figures
