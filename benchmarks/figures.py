"""The target figures of this library, and whether they are reached. All are ratios of times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import attention, model
from benchmarks.attention import LARGE
from benchmarks.measuring import Samples

# Prices of exporting count from this many slots on.
MANY_SLOTS = 4096

#: Two arms that were measured side by side.
Pair = tuple[Samples, str, str]


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: The figure's name, for people.
        value: The measured value (the median of several cases).
        quiet: The same value from each arm's fastest quarter of rounds.
        worst: The value of the worst case.
        bound: The target.
        at_least: Whether the value must be at least the target, instead of at most.
    """

    name: str
    value: float
    quiet: float
    worst: float
    bound: float
    at_least: bool

    @property
    def reached(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def at_least(name: str, bound: float, pairs: Sequence[Pair]) -> list[Figure]:
    """A figure with a lower bound: the first arm's time over the second's."""
    return [_figure(name, bound, pairs, True)] if pairs else []


def at_most(name: str, bound: float, pairs: Sequence[Pair]) -> list[Figure]:
    """A figure with an upper bound: the first arm's time over the second's."""
    return [_figure(name, bound, pairs, False)] if pairs else []


def _figure(name: str, bound: float, pairs: Sequence[Pair], more: bool) -> Figure:
    ratios = [samples.ratio(arm, base) for samples, arm, base in pairs]
    quiet = [samples.quiet_ratio(arm, base) for samples, arm, base in pairs]
    worst = min(ratios) if more else max(ratios)
    return Figure(name, statistics.median(ratios), statistics.median(quiet), worst, bound, more)


def attention_figures(results: Sequence[attention.Result]) -> list[Figure]:
    """Speed over MLX, share of the bandwidth, prices."""

    def pairs(arm: str, base: str, dtype: str | None = None) -> list[Pair]:
        """The pairs of all large cases, or of the case of one dtype for which speeds are given."""
        return [
            (r.samples, arm, base)
            for r in results
            if (
                r.case.slots >= MANY_SLOTS
                if dtype is None
                else (r.case.shape, r.case.slots, r.case.dtype) == (LARGE, MANY_SLOTS, dtype)
            )
            and {arm, base} <= set(r.samples.arms)
        ]

    figures = []
    for dtype, bound in (("float32", 12.0), ("float16", 25.0), ("bfloat16", 25.0)):
        of_dtype = pairs(attention.MLX, attention.OFF, dtype)
        figures += at_least(f"speed over MLX, {dtype}, {MANY_SLOTS} slots", bound, of_dtype)
    shares = pairs(attention.READ, attention.OFF, "float32")
    figures += at_least(f"share of read bandwidth, float32, {MANY_SLOTS} slots", 0.6, shares)
    for price, text, bound in (
        ("scores", "scores over no scores", 1.03),
        ("mass", "mass only over no scores", 1.05),
        ("ragged", "ragged over uniform heads", 1.1),
        ("ragged_step", "ragged over uniform heads, fused step", 1.1),
    ):
        cases = pairs(*attention.PRICES[price])
        figures += at_most(f"time of {text}, from {MANY_SLOTS} slots", bound, cases)
    scores, eight, four = attention.SCORES, attention.EIGHT, attention.FOUR
    for speed, bound, cases in (
        ("8 bits over float32, both with scores", 1.5, pairs(scores, eight, "float32")),
        ("8 bits over mlx-lm's, bfloat16", 20, pairs(attention.COMPOSITE, eight, "bfloat16")),
        ("4 bits over 8 bits", 1, pairs(eight, four)),
    ):
        figures += at_least(f"speed of {speed}, {MANY_SLOTS} slots", bound, cases)
    return figures


def model_figures(decoding: Samples, prompt: Samples) -> list[Figure]:
    """Speed of the policies over having none, over mlx-lm's window, and of reading a prompt."""
    figures = []
    for arm in (model.DEFAULT, model.FRAMED, model.H2O):
        for base, bound in ((model.STREAMING, 0.97), (model.WINDOW, 1)):
            name = f"decoding speed of {arm} over {base}"
            figures += at_least(name, bound, [(decoding, base, arm)])
    packed = (decoding, model.H2O, model.H2O_PACKED)
    figures += at_least(f"decoding speed of {model.H2O_PACKED} over {model.H2O}", 0.98, [packed])
    reading = (prompt, model.DEFAULT, model.PLAIN)
    return figures + at_most(f"time to read a prompt over {model.PLAIN}", 1, [reading])
