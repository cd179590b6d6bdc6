"""Sizes of the measures: a run of three minutes on two cores for a model of 135 million parameters,
and one of up to an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from mlx_h2o.evaluate.measures import (
    MEASURES,
    AgreementMeasure,
    KeptMeasure,
    Measure,
    NeedleMeasure,
    PerplexityMeasure,
    RulerMeasure,
    SpeedMeasure,
    TurnMeasure,
)

# Lengths are multiples of 256, the steps in which mlx-lm's full cache grows: its bytes are
# counted as allocated.
_QUICK: tuple[Measure, ...] = (
    # Half of each sample at once: a third of the run's time went into the steps of the other half.
    PerplexityMeasure(samples=4, length=256, prefill=128),
    NeedleMeasure(
        lengths=(256,),
        depths=(0.0, 0.5, 0.95),
        of_each=1,
        kinds=("single", "multi"),
        questions=("unseen",),
    ),
    RulerMeasure(length=256, of_each=1, answer=16),
    TurnMeasure(conversations=2, turns=3, turn=96, asked_after=(3,)),
    AgreementMeasure(answers=2, length=160),
    SpeedMeasure(prompt=256, steps=20),
    KeptMeasure(length=256),
)
_FULL: tuple[Measure, ...] = tuple(kind() for kind in MEASURES.values())
#: The parts of the bytes that a quick run measures.
QUICK_SHARES = (0.25,)


def measures(quick: bool, only: Sequence[str] = (), sizes: Sequence[str] = ()) -> list[Measure]:
    """The measures of a run: those named, or all.

    Args:
        quick: Whether to take the smaller sizes.
        only: Names of measures; empty means all.
        sizes: Changes of sizes, as in `needles.lengths=512,1024`.

    Raises:
        ValueError: There is no such measure or size.
    """
    unknown = [name for name in only if name not in MEASURES]
    if unknown:
        raise ValueError(f"There is no measure {unknown[0]!r}; choose from {', '.join(MEASURES)}.")
    chosen = [m for m in (_QUICK if quick else _FULL) if not only or m.name in only]
    for size in sizes:
        chosen = _resized(chosen, size)
    return chosen


def left_out(chosen: Sequence[Measure]) -> list[str]:
    """Sizes smaller than in a full run, as "perplexity: length 256 (full: 512)"."""
    full = {measure.name: measure for measure in _FULL}
    lines = []
    for measure in chosen:
        sizes = [
            f"{one.name} {_words(mine)} (full: {_words(whole)})"
            for one in fields(measure)  # type: ignore[arg-type]
            if (mine := getattr(measure, one.name))
            != (whole := getattr(full[measure.name], one.name))
        ]
        if sizes:
            lines.append(f"{measure.name}: {', '.join(sizes)}")
    return lines


def _words(size: Any) -> str:
    return " ".join(map(str, size)) if isinstance(size, tuple) else str(size)


def _resized(chosen: Sequence[Measure], size: str) -> list[Measure]:
    """The same measures with one size changed.

    Raises:
        ValueError: No measure has this size, or the value has another type.
    """
    where, equals, value = size.partition("=")
    name, dot, field = where.partition(".")
    of = next((measure for measure in chosen if measure.name == name), None)
    known = [one.name for one in fields(of)] if of is not None else []  # type: ignore[arg-type]
    if not (equals and dot) or field not in known:
        of_which = f"{name} has {', '.join(known)}" if known else "there is no such measure here"
        raise ValueError(f"{size!r} is no MEASURE.SIZE=VALUE: {of_which}.")
    before = getattr(of, field)
    try:
        changed: Any = type(before)(value)
        if isinstance(before, tuple):
            changed = tuple(type(before[0])(part) for part in value.split(","))
    except ValueError:
        raise ValueError(
            f"{where} is {before!r} otherwise; {value!r} is nothing like it."
        ) from None
    return [replace(m, **{field: changed}) if m is of else m for m in chosen]  # type: ignore[type-var]
