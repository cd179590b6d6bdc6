"""Presets: measures with their sizes, and the sizes of caches.

`quick` takes minutes on two cores for a model of 135 million parameters, `full` up to hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mlx_h2o.evaluate.measures import (
    MEASURES,
    Measure,
    NeedleMeasure,
    PerplexityMeasure,
    TurnMeasure,
)
from mlx_h2o.evaluate.methods import SHARES


@dataclass(frozen=True)
class Preset:
    """Defaults of an evaluation.

    Attributes:
        about: What it is for.
        measures: The measures, in the order of the report.
        shares: Shares of a full 16-bit cache's bytes.
        tokens: Tokens whose bytes caches get, instead of shares.
        policies: Policies beside the default, as `methods.parse_method` reads them.
    """

    about: str
    measures: tuple[Measure, ...]
    shares: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    policies: tuple[str, ...] = ()


# Lengths are multiples of 256, the steps in which mlx-lm's full cache grows: its bytes are
# counted as allocated.
PRESETS = {
    "full": Preset(
        "every measure in four sizes", tuple(kind() for kind in MEASURES.values()), SHARES
    ),
    "quick": Preset(
        "fewer and shorter samples, and only a quarter of the bytes",
        (
            # Half of each sample at once: a third of the run's time went into the other half.
            PerplexityMeasure(samples=4, length=256, prefill=128),
            NeedleMeasure(
                lengths=(256,),
                depths=(0.0, 0.5, 0.95),
                of_each=1,
                kinds=("single", "multi"),
                questions=("unseen",),
            ),
            TurnMeasure(conversations=2, turns=3, turn=96, asked_after=(3,)),
        ),
        (0.25,),
    ),
    "compare": Preset(
        "perplexity and facts in the bytes of 128 tokens, beside H2O as published",
        (
            PerplexityMeasure(samples=4, length=640, prefill=128),
            NeedleMeasure((400,), of_each=3, kinds=("single",), questions=("unseen",)),
        ),
        tokens=(128,),
        policies=("mlx-h2o:bits=16", "h2o", "h2o:remainder=false"),
    ),
    "turns": Preset(
        "a fact of the first turn asked for in the last, carried over, forgotten or pinned",
        (TurnMeasure(turns=6, turn=84, asked_after=(6,), carries=(1.0, 0.0), pinned=True),),
        tokens=(128,),
        policies=("h2o", "snapkv", "tova", "keydiff", "streaming"),
    ),
}


def chosen_measures(
    preset: Preset, only: Sequence[str] = (), sizes: Sequence[str] = ()
) -> list[Measure]:
    """The measures of a run: those of a preset, or those named.

    Args:
        preset: Says the sizes.
        only: Names of measures, with the full run's sizes where the preset has none of them; empty
            means those of the preset.
        sizes: Changes of sizes, as in `needles.lengths=512,1024`.

    Raises:
        ValueError: There is no such measure or size.
    """
    unknown = [name for name in only if name not in MEASURES]
    if unknown:
        raise ValueError(f"There is no measure {unknown[0]!r}; choose from {', '.join(MEASURES)}.")
    of_preset = {measure.name: measure for measure in preset.measures}
    named = [name for name in MEASURES if name in (only or of_preset)]
    chosen = [of_preset[name] if name in of_preset else MEASURES[name]() for name in named]
    changes: dict[str, dict[str, Any]] = {}
    for size in sizes:
        name, field, value = _size(chosen, size)
        changes.setdefault(name, {})[field] = value
    return [replace(m, **changes.get(m.name, {})) for m in chosen]  # type: ignore[type-var]


def _size(chosen: Sequence[Measure], size: str) -> tuple[str, str, Any]:
    """The measure, field and value of a changed size.

    Raises:
        ValueError: No measure has this size, or the value has another type.
    """
    where, equals, value = size.partition("=")
    name, dot, field = where.partition(".")
    of = next((measure for measure in chosen if measure.name == name), None)
    names = [one.name for one in fields(of)] if of is not None else []  # type: ignore[arg-type]
    if not (equals and dot) or field not in names:
        of_which = f"{name} has {', '.join(names)}" if names else "there is no such measure here"
        raise ValueError(f"{size!r} is no MEASURE.SIZE=VALUE: {of_which}.")
    before = getattr(of, field)
    try:
        changed: Any
        if isinstance(before, tuple):
            changed = tuple(type(before[0])(part) for part in value.split(","))
        elif isinstance(before, bool):
            changed = {"true": True, "false": False}[value.lower()]
        else:
            changed = type(before)(value)
    except (KeyError, ValueError):
        raise ValueError(
            f"{where} is {before!r} otherwise; {value!r} is nothing like it."
        ) from None
    return name, field, changed
