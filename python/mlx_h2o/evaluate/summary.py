"""A report's beginning: one sentence that answers."""

from __future__ import annotations

from mlx_h2o.evaluate.evaluation import Evaluation
from mlx_h2o.evaluate.methods import OURS, WINDOW, Method

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
