"""The figures that stand for a run of `python -m benchmarks`: ratios of times."""

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
        more_is_better: Whether a larger value is better, instead of a smaller one.
    """

    name: str
    value: float
    quiet: float
    worst: float
    more_is_better: bool


def figure(name: str, pairs: Sequence[Pair], *, more_is_better: bool) -> list[Figure]:
    """The first arm's time over the second's, or nothing without pairs.

    Args:
        name: The figure's name.
        pairs: The cases.
        more_is_better: Which case is the worst.
    """
    if not pairs:
        return []
    ratios = [samples.ratio(arm, base) for samples, arm, base in pairs]
    quiet = statistics.median(samples.quiet_ratio(arm, base) for samples, arm, base in pairs)
    worst = min(ratios) if more_is_better else max(ratios)
    return [Figure(name, statistics.median(ratios), quiet, worst, more_is_better)]


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
    for dtype in ("float32", "float16", "bfloat16"):
        of_dtype = pairs(attention.MLX, attention.OFF, dtype)
        name = f"speed over MLX, {dtype}, {MANY_SLOTS} slots"
        figures += figure(name, of_dtype, more_is_better=True)
    shares = pairs(attention.READ, attention.OFF, "float32")
    name = f"share of read bandwidth, float32, {MANY_SLOTS} slots"
    figures += figure(name, shares, more_is_better=True)
    for price, text in (
        ("scores", "scores over no scores"),
        ("mass", "mass only over no scores"),
        ("ragged", "ragged over uniform heads"),
        ("ragged_step", "ragged over uniform heads, fused step"),
    ):
        cases = pairs(*attention.PRICES[price])
        name = f"time of {text}, from {MANY_SLOTS} slots"
        figures += figure(name, cases, more_is_better=False)
    scores, eight, four = attention.SCORES, attention.EIGHT, attention.FOUR
    for speed, cases in (
        ("8 bits over float32, both with scores", pairs(scores, eight, "float32")),
        ("8 bits over mlx-lm's, bfloat16", pairs(attention.COMPOSITE, eight, "bfloat16")),
        ("4 bits over 8 bits", pairs(eight, four)),
    ):
        figures += figure(f"speed of {speed}, {MANY_SLOTS} slots", cases, more_is_better=True)
    return figures


def model_figures(decoding: Samples, prompt: Samples) -> list[Figure]:
    """Speed of the policies over having none, over mlx-lm's window, and of reading a prompt."""
    figures = []
    for arm in (model.DEFAULT, model.FRAMED, model.H2O):
        for base in (model.STREAMING, model.WINDOW):
            name = f"decoding speed of {arm} over {base}"
            figures += figure(name, [(decoding, base, arm)], more_is_better=True)
    packed = (decoding, model.H2O, model.H2O_PACKED)
    name = f"decoding speed of {model.H2O_PACKED} over {model.H2O}"
    figures += figure(name, [packed], more_is_better=True)
    reading = (prompt, model.DEFAULT, model.PLAIN)
    name = f"time to read a prompt over {model.PLAIN}"
    return figures + figure(name, [reading], more_is_better=False)
