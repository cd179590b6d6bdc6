"""The measures of an evaluation, one in a file."""

from __future__ import annotations

from mlx_h2o.evaluate.measures.base import Measure, Result, Results
from mlx_h2o.evaluate.measures.needles import NeedleMeasure
from mlx_h2o.evaluate.measures.perplexity import PerplexityMeasure
from mlx_h2o.evaluate.measures.turns import TurnMeasure

#: Measures by name, in the order of a report.
MEASURES: dict[str, type[Measure]] = {
    kind.name: kind for kind in (PerplexityMeasure, NeedleMeasure, TurnMeasure)
}

__all__ = [
    "MEASURES",
    "Measure",
    "NeedleMeasure",
    "PerplexityMeasure",
    "Result",
    "Results",
    "TurnMeasure",
]
