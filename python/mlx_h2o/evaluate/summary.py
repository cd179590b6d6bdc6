"""A report's beginning: one sentence that answers, and a figure for each method and size."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_h2o.evaluate.evaluation import Evaluation
from mlx_h2o.evaluate.measures import Measure, Results
from mlx_h2o.evaluate.methods import OURS, WINDOW, Method
from mlx_h2o.evaluate.report import Rows, Section

#: The heading of the column of caches that keep every token.
KEEPS_ALL = "keeps all"
#: Shares in words, and the share that a sentence is about where there are several.
WORDS = {0.5: "half", 0.25: "a quarter", 0.125: "an eighth", 0.0625: "a sixteenth"}
MAIN_SHARE = 0.25


def answer_of(evaluation: Evaluation, text: str = "your text") -> str:
    """What a part of the bytes costs, in a sentence; empty without figures of mlx-h2o.

    Args:
        evaluation: The evaluation, complete or not.
        text: The text in words.
    """
    for measure, results in evaluation.by_measure():
        if not measure.briefly:
            continue
        ours = [method for method, _ in results if method.label == OURS and not method.keeps_all]
        if not ours:
            continue
        method = min(ours, key=lambda m: (abs((m.share or 0) - MAIN_SHARE), -(m.tokens or 0)))
        figures = {other.name: measure.brief(result, results[0][1]) for other, result in results}
        figure = figures[method.name]
        what = f"costs {figure} of perplexity" if measure.name == "perplexity" else ""
        what = what or f"leaves {figure} ({measure.briefly})"
        window = next((m for m, _ in results if m.label == WINDOW and m.size == method.size), None)
        beside = f"; the sliding window in the same bytes: {figures[window.name]}" if window else ""
        return f"On {text} {size_in_words(method)} {what} with mlx-h2o{beside}."
    return ""


def size_in_words(method: Method) -> str:
    """The bytes of a method: "a quarter of the bytes"."""
    if method.tokens is not None:
        return f"a cache of the bytes of {method.tokens} tokens"
    share = method.share or 1.0
    return f"{WORDS.get(share, f'{share:.0%}')} of the bytes"


def at_a_glance(known: Sequence[tuple[Measure, Results]]) -> Section:
    """A table for each measure that has a `brief` figure: methods down, sizes across.

    Args:
        known: Measures, and the results of each.
    """
    return Section(
        "At a glance",
        "Every cache in each share of a full 16-bit cache's bytes, everything counted, against the "
        "full cache. Needles and facts: found, of those that the full cache finds.",
        [table_of(*each) for each in known if each[0].briefly and len(each[1]) > 1],
    )


def table_of(measure: Measure, results: Results) -> Rows:
    """A measure's `brief` figures: methods down, sizes across.

    Args:
        measure: A measure with such a figure.
        results: The measure's results, the full cache first.
    """
    (_, full), *others = results
    cells = {(m.label, m.size): measure.brief(result, full) for m, result in others}
    labels = dict.fromkeys(label for label, _ in cells)
    sizes = dict.fromkeys(size for _, size in cells)
    return Rows(
        f"{measure.briefly}, by bytes",
        ("cache", *(size or KEEPS_ALL for size in sizes)),
        [(label, *(cells.get((label, size), "") for size in sizes)) for label in labels],
    )
