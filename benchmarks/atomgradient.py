"""The sweeps of the AtomGradient report (March 2026), on any model, in the report's form.

The report (github.com/AtomGradient/H2OAttnScore, "work in progress") compares mlx-lm's sliding
window with H2O of averaged |logits|, at equal slots: perplexity of samples of 512 tokens at 256
slots. Its page shows the figures of `HEADLINE`; the figures of its numbered tables, and the sizes
at which they were measured, were not available when this was written. So each sweep here varies the
quantity in the table's name, at sizes of our own, and its column of the report's figures is empty
except for the headline.

    python -m benchmarks.atomgradient 0 --model mlx-community/Qwen3-4B-4bit --text FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from benchmarks.attention_shape import budgets_by_entropy, shapes_of, text_of
from mlx_h2o.budgets.settings import DEFAULT_POLICY, ModelSettings
from mlx_h2o.cli import evaluate
from mlx_h2o.cli import main as run_main
from mlx_h2o.cli.parsing import Parser
from mlx_h2o.cli.tables import machine_line, rich_table, show
from mlx_h2o.evaluate.evaluation import Evaluation
from mlx_h2o.evaluate.measures import PerplexityMeasure, Results
from mlx_h2o.evaluate.measures.perplexity import Perplexity
from mlx_h2o.evaluate.methods import FULL, OURS, WINDOW, Method
from mlx_h2o.evaluate.report import Rows
from mlx_h2o.loading.load import CALIBRATION_TEXT
from mlx_h2o.models.make import bounded_caches
from mlx_h2o.policies import EMALogits

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
class SlotMethod(Method):
    """A cache of a given number of slots per head, as the report counts.

    Attributes:
        slots: Slots of each KV head; None means all tokens.
    """

    slots: int | None = None

    @property
    def size(self) -> str:
        return "" if self.slots is None else f"{self.slots} slots"

    def make(self, model: nn.Module, context: int) -> list[Any]:
        if self.policy is None:
            return Method(self.label, tokens=self.slots).make(model, context)
        settings = ModelSettings.of(
            self.slots,
            policy=self.policy,
            remainder=self.remainder,
            budgets=self.budgets,
            **dict(self.settings),
        )
        return bounded_caches(model, settings)


@dataclass(frozen=True)
class EntropyMethod(SlotMethod):
    """The same slots on average, divided among layers by the entropy of their attention."""

    @property
    def size(self) -> str:
        return f"{super().size}, by entropy"

    def make(self, model: nn.Module, context: int) -> list[Any]:
        assert self.slots is not None
        text = model.mlx_h2o_tokenizer.encode(CALIBRATION_TEXT.read_text())[:SHAPE_TOKENS]
        shapes = shapes_of(model, mx.array([text]))
        budgets = budgets_by_entropy(shapes, self.slots, self.slots // LEAST_PART)
        settings = ModelSettings.of(
            policy=self.policy, remainder=self.remainder, budgets=budgets, **dict(self.settings)
        )
        return bounded_caches(model, settings)


@dataclass(frozen=True)
class Part:
    """A row group of a table: one length of samples, and caches.

    Attributes:
        label: The value varied in this part; empty if the caches' names say it.
        measure: The measure of all the part's methods.
        methods: The methods, the full cache first.
    """

    label: str
    measure: PerplexityMeasure
    methods: Sequence[Method]


@dataclass(frozen=True)
class ReportTable:
    """A sweep of the report.

    Attributes:
        number: The number of the report's table; 0 is its headline.
        title: The quantity that is varied.
        parts: The table's row groups.
        figures_by_model: The report's own figures by cache, for models that it has.
    """

    number: int
    title: str
    parts: Sequence[Part]
    figures_by_model: dict[str, tuple[float, ...]] = field(default_factory=dict)


def reports_policy(recent: float) -> EMALogits:
    """The report's policy, with so many newest tokens that stay, or a share of the slots."""
    return EMALogits(sink=SINK, recent=recent, unit="layer", prompt="full")


def reports_method(slots: int, heavy: float = 0.5, **settings: Any) -> SlotMethod:
    """The report's H2O: |logits| averaged, one choice for a layer, no remainder.

    Args:
        slots: Slots of each head.
        heavy: The part of them for heavy hitters; the newest tokens and the sinks have the rest.
        settings: Options of the caches, such as `bits`.
    """
    recent = max(slots - SINK - round(heavy * slots), 1)
    label = ", ".join([REPORTS, *(f"{name} {value}" for name, value in settings.items())])
    own = tuple(settings.items())
    return SlotMethod(label, reports_policy(recent), False, "uniform", own, slots=slots)


def by_layer(slots: int) -> list[Method]:
    """The report's H2O with even slots, and by each layer's entropy; `recent` is a share."""
    even = reports_method(slots)
    recent = (slots // 2 - SINK) / slots
    even = replace(even, policy=reports_policy(recent))
    return [even, EntropyMethod(**vars(even))]


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


def _against_the_window(slots: int) -> list[Method]:
    """The window, the report's H2O and ours, with `slots` slots each."""
    window, ours = SlotMethod(WINDOW, slots=slots), SlotMethod(OURS, DEFAULT_POLICY, slots=slots)
    return [window, reports_method(slots), ours]


def _measured(tokens: int = HEADLINE_TOKENS, samples: int = HEADLINE_SAMPLES) -> PerplexityMeasure:
    return PerplexityMeasure(samples, tokens, HEADLINE_PREFILL)


def tables(samples: int = HEADLINE_SAMPLES) -> dict[int, ReportTable]:
    """All sweeps by number.

    Args:
        samples: Samples of the text for each sweep.
    """
    full = SlotMethod(FULL)
    slots = HEADLINE_SLOTS
    splits = [
        replace(reports_method(slots, heavy), label=f"{heavy:.0%} heavy")
        for heavy in (0.0, 0.125, 0.25, 0.5, 0.75, 0.9)
    ]
    bits = [
        reports_method(slots, **packed)
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


def rows_of(table: ReportTable, results: Sequence[Results], model: str) -> Rows:
    """A table in the report's form: perplexity, and how far above the full cache's.

    Args:
        table: The sweep.
        results: The results of its parts, in order; parts not measured are empty.
        model: The model, for the report's figures if they are known.
    """
    figures = next((of for name, of in table.figures_by_model.items() if name in model), ())
    rows = []
    for part, of_part in zip(table.parts, results, strict=True):
        for i, (method, of) in enumerate(of_part):
            ours, full = Perplexity(of["nll"]), Perplexity(of_part[0][1]["nll"])
            above = "" if i == 0 else f"{100 * ours.loss_against(full):+.1f} %"
            name = " | ".join(filter(None, (part.label, method.name)))
            report = f"{figures[i]:.2f}" if i < len(figures) else "not known"
            rows.append((name, f"{ours.value:.2f}", above, report))
    which = f"Table {table.number}" if table.number else "The headline"
    return Rows(
        f"{which} of the AtomGradient report: {table.title}",
        ("cache", "perplexity", "above full", "the report's perplexity"),
        rows,
        "" if figures else "The report's own figures for this table and model are not known here.",
    )


def parser() -> Parser:
    """The parser of the command line."""
    made = Parser(
        prog="benchmarks.atomgradient",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("table", type=int, choices=sorted(tables()), help="0 is the headline")
    evaluate.add_reader_options(made)
    made.add_argument("--samples", type=int, default=HEADLINE_SAMPLES, metavar="N")
    evaluate.add_run_options(made)
    made.set_defaults(run=run, command="atomgradient")
    return made


def run(args: argparse.Namespace) -> None:
    """Measure a table's parts, and print it; Ctrl-C keeps finished parts."""
    table = tables(args.samples)[args.table]
    reader = evaluate.reader_of(args)
    parts = [Evaluation(reader, part.methods, [part.measure]) for part in table.parts]
    folder: Path | None = args.out
    try:
        for i, (part, evaluation) in enumerate(zip(table.parts, parts, strict=True)):
            file = folder / f"table-{table.number}-{i}.json" if folder else None
            evaluate.measure(evaluation, file, args, f"table {table.number}: {part.label}")
    finally:
        _report(table, parts, args)


def _report(table: ReportTable, parts: list[Evaluation], args: argparse.Namespace) -> None:
    """Print the results so far."""
    results = [part.results_of(part.measures[0]) for part in parts]
    if not any(results):
        return
    if args.json:
        print(json.dumps({"table": table.number, "parts": [part.as_json() for part in parts]}))
        return
    if table.number == SHAPES:
        reader = parts[0].reader
        show(rich_table(shape_rows(reader.model, text_of(reader, SHAPE_TOKENS))), args.markdown)
    show(rich_table(rows_of(table, results, args.model)), args.markdown)
    print(machine_line(parts[0].machine), file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit codes are those of the command `mlx_h2o`."""
    return run_main(argv, parser)


if __name__ == "__main__":
    sys.exit(main())
