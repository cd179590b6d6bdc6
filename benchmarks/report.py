"""The benchmark's results as JSON and as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import attention, model, products
from benchmarks.figures import Figure, attention_figures, model_figures
from benchmarks.measuring import Samples
from mlx_h2o.evaluate.report import Table

CellsOf = Callable[[attention.Result], Sequence[str]]
# The columns that identify a row's case.
CASE = ("heads, KV heads, width", "slots", "dtype")


@dataclass
class Report:
    """The results of one run; parts that were left out are empty or None.

    Attributes:
        machine: The machine (`machine.describe`).
        settings: The run's options.
        attention: One result a case.
        decoding: Seconds per token.
        prompt: Seconds to the first token.
        products: Times of matrix products.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    attention: list[attention.Result] = field(default_factory=list)
    decoding: Samples | None = None
    prompt: Samples | None = None
    products: list[products.Product] = field(default_factory=list)

    def figures(self) -> list[Figure]:
        """The figures that stand for the run, as far as they were measured."""
        figures = attention_figures(self.attention)
        if self.decoding and self.prompt:
            figures += model_figures(self.decoding, self.prompt)
        return figures

    def as_json(self) -> dict[str, Any]:
        """All results, as JSON types."""
        return {
            "machine": self.machine,
            "settings": self.settings,
            "attention": [result.as_json() for result in self.attention],
            "decoding": decoding_json(self.decoding),
            "prompt": prompt_json(self.prompt),
            "products": [product.as_json() for product in self.products],
            "figures": [asdict(figure) for figure in self.figures()],
        }

    def tables(self) -> list[Table]:
        """One table for each part that was measured."""
        tables = []
        if self.attention:
            tables += [table(self.attention) for table in (times_table, speeds_table, prices_table)]
            if packed := [result for result in self.attention if result.case.packs]:
                tables.append(packed_table(packed))
        if self.decoding:
            tables.append(decoding_table(self.decoding))
        if self.prompt:
            tables.append(prompt_table(self.prompt))
        if self.products:
            tables.append(products_table(self.products))
        if self.figures():
            tables.append(figures_table(self.figures()))
        return tables


def decoding_json(samples: Samples | None) -> dict[str, Any] | None:
    """Tokens per second, and ratios to the two baselines."""
    if samples is None:
        return None
    arms: dict[str, Any] = {}
    for arm, seconds in samples.as_json().items():
        arms[arm] = {
            **seconds,
            "tokens_per_second": 1 / seconds["seconds"],
            "over_streaming": samples.speed(arm, model.STREAMING),
            "over_window": samples.speed(arm, model.WINDOW),
        }
    return arms


def prompt_json(samples: Samples | None) -> dict[str, Any] | None:
    """Seconds, and ratios to the plain cache's."""
    if samples is None:
        return None
    return {
        arm: {**seconds, "time_over_plain": samples.ratio(arm, model.PLAIN)}
        for arm, seconds in samples.as_json().items()
    }


def of_cases(
    title: str, columns: Sequence[str], results: list[attention.Result], cells: CellsOf
) -> Table:
    """A table with one row a case, whose cells a function gives."""
    rows = [(str(r.case.shape), f"{r.case.slots}", r.case.dtype, *cells(r)) for r in results]
    return Table(title, (*CASE, *columns), rows)


def times_table(results: list[attention.Result]) -> Table:
    """Milliseconds of MLX and ours."""
    arms = (attention.MLX, attention.OFF, attention.SCORES, attention.MASS, *attention.STEPS)
    return of_cases(
        "attention for one token, milliseconds",
        arms,
        results,
        lambda r: [f"{1e3 * r.samples.median(arm):.3f}" for arm in arms],
    )


def speeds_table(results: list[attention.Result]) -> Table:
    """Speed over MLX's, and the share of the read bandwidth."""
    arms = (attention.OFF, attention.SCORES, attention.STEP_DISTINCT)
    return of_cases(
        "times as fast as MLX, and share of the bandwidth of a plain read",
        ("read, GB/s", *arms),
        results,
        lambda r: [
            f"{r.bandwidth / 1e9:.1f}",
            *(
                f"{r.samples.speed(arm, attention.MLX):.1f}x, {r.share_of_bandwidth(arm):.0%}"
                for arm in arms
            ),
        ],
    )


def prices_table(results: list[attention.Result]) -> Table:
    """The cost of each feature over going without."""
    columns = (
        "scores",
        "mass only",
        "ragged heads",
        "ragged, fused step",
        "h2o's step",
        "distinct's step",
    )

    def cells(result: attention.Result) -> list[str]:
        measured = result.samples.arms
        return [
            f"{result.price(arm, base):+.1%}" if arm in measured and base in measured else "-"
            for arm, base in attention.PRICES.values()
        ]

    return of_cases("how much longer it takes", columns, results, cells)


def packed_table(results: list[attention.Result]) -> Table:
    """Milliseconds with scores over dense and packed rows, and their ratios."""
    arms = (attention.SCORES, *attention.PACKED, attention.COMPOSITE)
    title = "attention with scores over packed rows, milliseconds and times as fast as dense"

    def cells(result: attention.Result) -> list[str]:
        samples = result.samples
        return [
            f"{1e3 * samples.median(attention.SCORES):.3f}",
            *(
                f"{1e3 * samples.median(arm):.3f}, {samples.speed(arm, attention.SCORES):.2f}x"
                for arm in arms[1:]
            ),
            f"{samples.speed(attention.EIGHT, attention.COMPOSITE):.1f}x",
        ]

    return of_cases(title, ("dense", *arms[1:], "8 bits over mlx-lm"), results, cells)


def decoding_table(samples: Samples) -> Table:
    """Tokens per second."""
    rows = [
        (
            arm,
            f"{1 / samples.median(arm):.1f}",
            f"{samples.speed(arm, model.STREAMING):.3f}",
            f"{samples.speed(arm, model.WINDOW):.3f}",
        )
        for arm in samples.arms
    ]
    columns = ("cache", "tokens/s", "over streaming", "over the window")
    return Table("decoding inside the budget", columns, rows)


def prompt_table(samples: Samples) -> Table:
    """Seconds to the first token."""
    rows = [
        (arm, f"{samples.median(arm):.2f}", f"{samples.ratio(arm, model.PLAIN):.3f}")
        for arm in samples.arms
    ]
    return Table("reading the prompt", ("cache", "seconds", "time over plain"), rows)


def products_table(results: list[products.Product]) -> Table:
    """Milliseconds with both BLAS."""
    rows = []
    for product in results:
        samples = product.samples
        times = (f"{1e3 * samples.median(arm):.3f}" for arm in samples.arms)
        gain = samples.speed(products.OPENBLAS, products.LINKED)
        rows.append((", ".join(map(str, product.shape)), *times, f"{gain:.1f}"))
    columns = ("rows, columns, terms", products.LINKED, products.OPENBLAS, "times as fast")
    return Table("a float32 matrix product, milliseconds", columns, rows)


def figures_table(figures: list[Figure]) -> Table:
    """Ratios of times: the speed that bounded memory costs or gains."""
    rows = [
        (
            figure.name,
            *(f"{value:.3g}" for value in (figure.value, figure.quiet, figure.worst)),
            "more" if figure.more_is_better else "less",
        )
        for figure in figures
    ]
    columns = ("", "measured", "quietest rounds", "worst case", "better is")
    return Table("ratios", columns, rows)


def meaning(report: Report) -> list[str]:
    """The meaning of the figures for people who run a model here, in a line each."""
    lines = []
    if report.decoding:
        arm, window = model.DEFAULT, model.WINDOW
        lines.append(
            f"A conversation in bounded memory ({arm}) decodes "
            f"{1 / report.decoding.median(arm):.1f} tokens/s, "
            f"{report.decoding.speed(arm, window):.2f} times the speed of mlx-lm's sliding window "
            "of as many tokens, however long it gets."
        )
    if report.prompt:
        ratio = report.prompt.ratio(model.DEFAULT, model.PLAIN)
        lines.append(
            f"Reading a prompt takes {ratio:.2f} times as long as with mlx-lm's full cache."
        )
    if report.attention:
        speeds = [r.samples.speed(attention.SCORES, attention.MLX) for r in report.attention]
        lines.append(
            "Attention for one token, with the scores that eviction needs, is "
            f"{min(speeds):.1f} to {max(speeds):.1f} times as fast as MLX's without them."
        )
    return lines
