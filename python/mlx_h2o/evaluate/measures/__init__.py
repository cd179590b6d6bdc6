"""Measures, one a file: frozen dataclasses of their sizes, with one interface (`measure.py`)."""

from mlx_h2o.evaluate.measures.agreement import AgreementMeasure
from mlx_h2o.evaluate.measures.kept import KeptMeasure
from mlx_h2o.evaluate.measures.measure import Findings, Found, Measure
from mlx_h2o.evaluate.measures.needles import NeedleMeasure
from mlx_h2o.evaluate.measures.perplexity import PerplexityMeasure
from mlx_h2o.evaluate.measures.ruler import RulerMeasure
from mlx_h2o.evaluate.measures.speed import SpeedMeasure
from mlx_h2o.evaluate.measures.turns import TurnMeasure

#: Measures by name, in the order of a report.
MEASURES: dict[str, type[Measure]] = {
    kind.name: kind
    for kind in (
        PerplexityMeasure,
        NeedleMeasure,
        RulerMeasure,
        TurnMeasure,
        AgreementMeasure,
        SpeedMeasure,
        KeptMeasure,
    )
}

__all__ = [
    "MEASURES",
    "AgreementMeasure",
    "Findings",
    "Found",
    "KeptMeasure",
    "Measure",
    "NeedleMeasure",
    "PerplexityMeasure",
    "RulerMeasure",
    "SpeedMeasure",
    "TurnMeasure",
]
