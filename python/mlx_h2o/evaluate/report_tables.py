"""The sweeps of the AtomGradient report (March 2026), on any model, in the report's form.

The report (github.com/AtomGradient/H2OAttnScore, "work in progress") compares mlx-lm's sliding
window with H2O of averaged |logits|, at equal slots: perplexity of samples of 512 tokens at 256
slots. Its page shows the figures of `HEADLINE`; the figures of its numbered tables, and the sizes
at which they were measured, were not available when this was written. So each sweep here varies the
quantity in the table's name, at sizes of our own, and its column of the report's figures is empty
except for the headline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.budgets.settings import DEFAULT_POLICY, ModelSettings
from mlx_h2o.evaluate.arms import FULL, OURS, WINDOW, Arm
from mlx_h2o.evaluate.attention_shape import budgets_by_entropy, shapes_of
from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.measures import Findings, PerplexityMeasure
from mlx_h2o.evaluate.perplexity import Perplexity
from mlx_h2o.evaluate.sections import Rows
from mlx_h2o.loading.load import CALIBRATION_TEXT
from mlx_h2o.model_caches.make import bounded_caches

SINK = 4
#: The figures on the report's page, at 256 slots of 10 x 512 tokens on an M2 Ultra: perplexity of
#: the full cache, of the sliding window and of H2O with half heavy hitters.
HEADLINE = {
    "Qwen3-4B-4bit": (7.70, 7.94, 7.81),
    "Qwen3-8B-4bit": (6.26, 6.43, 6.32),
    "Qwen3-8B-3bit": (7.62, 7.89, 7.73),
}
HEADLINE_SLOTS, HEADLINE_TOKENS, HEADLINE_SAMPLES, HEADLINE_PREFILL = 256, 512, 10, 32
REPORTS = "the report's H2O"
#: The table of entropies; the tokens of their measurement where slots depend on them; and the part
#: of an even share that every layer keeps.
SHAPES, SHAPE_TOKENS, LEAST_PART = 14, 512, 4


@dataclass(frozen=True)
class SlotContender(Contender):
    """A cache of a given number of slots per head, as the report counts.

    Attributes:
        slots: Slots of each KV head; None means all tokens.
    """

    slots: int | None = None

    @property
    def name(self) -> str:
        return self.arm.name if self.slots is None else f"{self.arm.name}, {self.slots} slots"

    def make(self, model: nn.Module, tokens: int) -> list[Any]:
        return self.arm.make(model, self.slots or tokens, "slots", tokens)


@dataclass(frozen=True)
class EntropyContender(SlotContender):
    """The same slots on average, divided among layers by the entropy of their attention."""

    @property
    def name(self) -> str:
        return f"{super().name}, by entropy"

    def make(self, model: nn.Module, tokens: int) -> list[Any]:
        assert self.slots is not None
        text = model.mlx_h2o_tokenizer.encode(CALIBRATION_TEXT.read_text())[:SHAPE_TOKENS]
        shapes = shapes_of(model, mx.array([text]))
        budgets = budgets_by_entropy(shapes, self.slots, self.slots // LEAST_PART)
        arm = self.arm
        settings = ModelSettings.of(
            policy=arm.policy, remainder=arm.remainder, budgets=budgets, **dict(arm.settings)
        )
        return bounded_caches(model, settings)


@dataclass(frozen=True)
class Part:
    """A row group of a table: one length of samples, and caches.

    Attributes:
        label: The value varied in this part; empty if the caches' names say it.
        measure: The measure of all the part's contenders.
        contenders: The contenders, the full cache first.
    """

    label: str
    measure: PerplexityMeasure
    contenders: Sequence[Contender]


@dataclass(frozen=True)
class ReportTable:
    """A sweep of the report.

    Attributes:
        number: The number of the report's table; 0 is its headline.
        title: The quantity that is varied.
        parts: The table's row groups.
        known: The report's own figures by cache, for models that it has.
    """

    number: int
    title: str
    parts: Sequence[Part]
    known: dict[str, tuple[float, ...]] = field(default_factory=dict)


def reports_arm(slots: int, heavy: float = 0.5, **settings: Any) -> Arm:
    """The report's H2O: |logits| averaged, one choice for a layer, no remainder.

    Args:
        slots: Slots of each head.
        heavy: The part of them for heavy hitters; the newest tokens and the sinks have the rest.
        settings: Other settings, such as `bits`.
    """
    recent = max(slots - SINK - round(heavy * slots), 1)
    fields = {"sink": SINK, "recent": recent, "unit": "layer", "prompt": "full", **settings}
    arm = Arm(REPORTS, "ema-logits", False, "uniform", tuple(fields.items()))
    said = ", ".join(f"{name} {value}" for name, value in settings.items())
    return replace(arm, name=", ".join(filter(None, (REPORTS, said))))


def by_layer(slots: int) -> list[Contender]:
    """The report's H2O with even slots, and by each layer's entropy; `recent` is a share."""
    recent = (slots // 2 - SINK) / slots
    arm = reports_arm(slots)
    fields = {**dict(arm.settings), "recent": recent}
    arm = replace(arm, settings=tuple(fields.items()))
    return [SlotContender(arm, None, slots), EntropyContender(arm, None, slots)]


def shape_rows(model: nn.Module, tokens: mx.array) -> Rows:
    """Table 14's first half: entropy and concentration of each layer on a text `[1, T]`."""
    shapes = shapes_of(model, tokens)
    budgets = budgets_by_entropy(shapes, HEADLINE_SLOTS, HEADLINE_SLOTS // LEAST_PART)
    rows = [
        (str(i), f"{shape.entropy:.3f}", f"{shape.concentration:.1%}", str(slots))
        for i, (shape, slots) in enumerate(zip(shapes, budgets, strict=True))
    ]
    columns = ("layer", "entropy, of even attention's", "mass of the strongest tenth", "slots")
    return Rows(f"Attention by layer, {tokens.shape[1]} tokens", columns, rows)


def _against_the_window(slots: int) -> list[Contender]:
    """The window, the report's H2O and ours, with `slots` slots each."""
    ours = Arm(OURS, DEFAULT_POLICY)
    return [SlotContender(arm, None, slots) for arm in (Arm(WINDOW), reports_arm(slots), ours)]


def _measured(tokens: int = HEADLINE_TOKENS, samples: int = HEADLINE_SAMPLES) -> PerplexityMeasure:
    return PerplexityMeasure(samples, tokens, HEADLINE_PREFILL)


def tables(samples: int = HEADLINE_SAMPLES) -> dict[int, ReportTable]:
    """All sweeps by number.

    Args:
        samples: Samples of the text for each sweep.
    """
    full = SlotContender(Arm(FULL))
    slots = HEADLINE_SLOTS
    splits = [
        SlotContender(replace(reports_arm(slots, heavy), name=f"{heavy:.0%} heavy"), None, slots)
        for heavy in (0.0, 0.125, 0.25, 0.5, 0.75, 0.9)
    ]
    bits = [
        SlotContender(reports_arm(slots, **packed), None, slots)
        for packed in ({}, {"bits": 8}, {"bits": 4}, {"k_bits": 8, "v_bits": 4},
                       {"k_bits": 4, "v_bits": 8})
    ]  # fmt: skip
    usual = _measured(samples=samples)
    sizes = [c for size in (64, 128, 192, 256, 384) for c in _against_the_window(size)]

    def lengths(tokens: Sequence[int], slots: int) -> list[Part]:
        return [
            Part(
                f"{length} tokens", _measured(length, samples), [full, *_against_the_window(slots)]
            )
            for length in tokens
        ]

    made = (
        ReportTable(0, "headline", [Part("", usual, [full, *_against_the_window(slots)])],
                    dict(HEADLINE)),
        ReportTable(4, "budget split", [Part("", usual, [full, *splits])]),
        ReportTable(7, "KV size", [Part("", usual, [full, *sizes])]),
        ReportTable(8, "sequence length", lengths((384, 512, 1024, 2048), slots)),
        ReportTable(9, "stress", lengths((1024, 2048), slots // 4)),
        *(ReportTable(number, "bits", [Part("", usual, [full, *bits])]) for number in (10, 11, 12)),
        ReportTable(SHAPES, "slots by entropy", [Part("", usual, [full, *by_layer(slots)])]),
    )  # fmt: skip
    return {table.number: table for table in made}


def rows_of(table: ReportTable, findings: Sequence[Findings], model: str) -> Rows:
    """A table in the report's form: perplexity, and how far above the full cache's.

    Args:
        table: The sweep.
        findings: The findings of its parts, in order; parts not measured are empty.
        model: The model, for the report's figures if they are known.
    """
    figures = next((of for name, of in table.known.items() if name in model), ())
    rows = []
    for part, found in zip(table.parts, findings, strict=True):
        for i, (contender, of) in enumerate(found):
            ours, full = Perplexity(of["nll"]), Perplexity(found[0][1]["nll"])
            above = "" if i == 0 else f"{100 * ours.loss_against(full):+.1f} %"
            name = " | ".join(filter(None, (part.label, contender.name)))
            report = f"{figures[i]:.2f}" if i < len(figures) else "not known"
            rows.append((name, f"{ours.value:.2f}", above, report))
    which = f"Table {table.number}" if table.number else "The headline"
    return Rows(
        f"{which} of the AtomGradient report: {table.title}",
        ("cache", "perplexity", "above full", "the report's perplexity"),
        rows,
        "" if figures else "The report's own figures for this table and model are not known here.",
    )
