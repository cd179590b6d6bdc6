"""Facts planted, buried and asked for: the model's answers with each cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o._progress import Progress
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.facts import RecallTask
from mlx_h2o.evaluate.methods import FULL, PACKED, WINDOW, Method, parse_method
from mlx_h2o.evaluate.plotting import drawing
from mlx_h2o.hosts.loaded import logits_of

#: The most tokens of an answer.
ANSWER_TOKENS = 8


@dataclass(frozen=True)
class Answers:
    """The model's answers with one cache.

    Attributes:
        method: The cache's name.
        texts: One answer for each prompt.
        right: Whether each answer is the planted one.
        nbytes: Bytes of one prompt's cache when it was answered, rows counted in 16 bits.
    """

    method: str
    texts: tuple[str, ...]
    right: tuple[bool, ...]
    nbytes: int


def demo_methods(ours: Method) -> list[Method]:
    """The caches of the demo: those that people use, H2O as published, and ours."""
    packed = next(name for name, bits in PACKED.items() if bits == 4)
    h2o = replace(parse_method("h2o:remainder=false"), label="H2O")
    return [Method(FULL), Method(WINDOW), Method(packed), h2o, ours]


def answers_of(
    model: nn.Module,
    tokenizer: Any,
    method: Method,
    task: RecallTask,
    *,
    prefill: int,
    chunk: int,
    step: Callable[[int], None],
) -> Answers:
    """Read the prompts through a cache, side by side, and let the model complete them.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        method: The cache, with a size unless it keeps every token.
        task: The prompts.
        prefill: Tokens given at once at the beginning.
        chunk: Other tokens given at once, with evictions after each chunk; the answer goes token by
            token.
        step: Called with the number of tokens after each chunk.
    """
    P, T = task.prompts.shape
    cache = method.make(model, T + ANSWER_TOKENS)

    def read(tokens: mx.array) -> mx.array:
        logits = logits_of(model, tokens, cache)[:, -1]
        mx.eval(logits, [entry.state for entry in cache])
        step(tokens.shape[1])
        return logits

    logits = read(task.prompts[:, :prefill])
    for i in range(prefill, T, chunk):
        logits = read(task.prompts[:, i : i + chunk])
    answers = []
    for _ in range(ANSWER_TOKENS):
        answers.append(mx.argmax(logits, axis=-1))
        logits = read(answers[-1][:, None])
    tokens = cast(list[list[int]], mx.stack(answers, axis=1).tolist())
    texts = tuple(_first_words(tokenizer.decode(row)) for row in tokens)
    expected = [tokenizer.decode(list(answer)).strip() for answer in task.answers]
    right = tuple(text == want for text, want in zip(texts, expected, strict=True))
    return Answers(method.label, texts, right, bytes_in_16_bits(cache, P))


def _first_words(text: str) -> str:
    """An answer up to the end of its sentence or line."""
    line = text.strip().split("\n")[0]
    return line.split(".")[0].strip()


def plant_and_ask(
    model: nn.Module,
    tokenizer: Any,
    methods: Sequence[Method],
    task: RecallTask,
    *,
    prefill: int,
    chunk: int,
    progress: Progress | None = None,
) -> list[Answers]:
    """Every method's answers, one after the other; arguments as in `answers_of`."""
    whole = len(methods) * (task.prompts.shape[1] + ANSWER_TOKENS)
    done = 0

    def step(tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress:
            progress(done, whole)

    sizes = {"prefill": prefill, "chunk": chunk}
    return [answers_of(model, tokenizer, each, task, **sizes, step=step) for each in methods]


def draw(results: Sequence[Answers], title: str, path: str | Path) -> None:
    """Facts known and bytes held, side by side, as a PNG.

    Args:
        results: The methods' answers.
        title: The chart's title.
        path: The file to write.

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = drawing()
    names = [result.method for result in results]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 1.2 + 0.42 * len(names)), sharey=True, layout="constrained"
    )
    rows = range(len(names))
    bars = (
        (left, [sum(r.right) for r in results], f"facts answered, of {len(results[0].right)}"),
        (right, [r.nbytes / 1e6 for r in results], "megabytes of keys and values"),
    )
    for axes, numbers, label in bars:
        axes.barh(rows, numbers, color=["#8c8c8c"] * (len(names) - 1) + ["#2a7f62"])
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
        for row, number in enumerate(numbers):
            text = f" {number:.1f}" if isinstance(number, float) else f" {number}"
            axes.annotate(text, (number, row), va="center", fontsize=9)
    left.set_yticks(rows, names)
    left.invert_yaxis()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
