"""Long answers: the distance of a cache's next-token distribution from the full cache's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import mlx.core as mx

from mlx_h2o.evaluate.measures.base import Measure, Result, Results
from mlx_h2o.evaluate.methods import Method
from mlx_h2o.evaluate.reader import Reader, Tell, no_progress, read, step
from mlx_h2o.evaluate.report import Curves, Rows, Section
from mlx_h2o.evaluate.side_by_side import can_share, side_by_side
from mlx_h2o.hosts.stock_caches import stock_caches

#: The number of parts into which the answer is cut; each part's mean is reported.
PARTS = 8


@dataclass(frozen=True)
class AgreementMeasure(Measure):
    """An answer sampled with the full cache, read along by each method.

    Attributes:
        answers: Answers side by side.
        prompt: Tokens of the text before each answer.
        length: Tokens of prompt and answer: at a sixteenth of the bytes the answer is as long as
            sixteen budgets.
        temperature: The temperature of sampling.
    """

    answers: int = 4
    prompt: int = 64
    length: int = 1024
    temperature: float = 0.8

    name = "agreement"
    briefly = "KL of long answers, nats"
    shares = True

    def tokens(self) -> int:
        return self.length

    def work(self) -> int:
        return self.answers * self.length

    def passes(self) -> int:
        return self.length - self.prompt + 2

    def of(self, reader: Reader, method: Method, tell: Tell) -> Result:
        return self.of_all(reader, [method], tell)[0]

    def of_all(self, reader: Reader, methods: Sequence[Method], tell: Tell) -> list[Result]:
        spread = len(reader.tokens) // self.answers
        body = self.prompt - len(reader.first)
        rows = [[*reader.first, *reader.prose(body, i * spread)] for i in range(self.answers)]
        tokens = mx.array(rows)
        caches = [method.make(reader.model, self.length) for method in methods]
        caches.insert(0, stock_caches(reader.model))
        lists = [side_by_side(caches)] if all(map(can_share, caches)) else caches
        copies = len(caches) // len(lists)
        own = mx.tile(tokens, (copies, 1))
        logits = [read(reader.model, each, own, reader.chunk, no_progress) for each in lists]
        tell(len(methods) * tokens.size)
        key = mx.random.key(reader.seed)
        compared_pairs: list[list[tuple[mx.array, mx.array]]] = [[] for _ in methods]
        for _ in range(self.length - self.prompt):
            expected, *got = mx.split(mx.concatenate(logits), len(caches))
            for pairs, theirs in zip(compared_pairs, got, strict=True):
                pairs.append(compared(expected, theirs))
            key, draw = mx.random.split(key)
            token = mx.random.categorical(expected / self.temperature, key=draw)
            drawn = mx.tile(token, (copies,))
            logits = [step(reader.model, each, drawn, no_progress) for each in lists]
            tell(len(methods) * self.answers)
            mx.eval([pairs[-1] for pairs in compared_pairs])
        return [_curves(pairs) for pairs in compared_pairs]

    def brief(self, result: Result, full: Result) -> str:
        return f"{statistics.fmean(result['kl']):.4f}"

    def section(self, results: Results) -> Section:
        size = (self.length - self.prompt) / PARTS
        middles = [self.prompt + (i + 0.5) * size for i in range(PARTS)]
        rows, apart, same = [], dict[str, list[float | None]](), dict[str, list[float | None]]()
        for method, result in results[1:]:
            mean, last = statistics.fmean(result["kl"]), result["kl"][-1]
            top, last_top = statistics.fmean(result["top"]), result["top"][-1]
            cells = f"{mean:.4f}", f"{last:.4f}", f"{top:.1%}", f"{last_top:.1%}"
            rows.append((method.name, *cells))
            apart[method.name], same[method.name] = result["kl"], result["top"]
        columns = ("cache", "KL, nats", "in the last part", "same first choice", "in the last part")
        across = "tokens so far"
        return Section(
            "Long answers",
            f"{self.answers} answers drawn from the full cache at temperature {self.temperature}, "
            f"to {self.length} tokens in all, and read along by every cache: how far its "
            "prediction of each next token is from the full cache's.",
            [Rows("", columns, rows)],
            [
                Curves("Divergence by position", middles, apart, across, "KL, nats"),
                Curves("Same first choice by position", middles, same, across, "share"),
            ],
        )


def compared(expected: mx.array, got: mx.array) -> tuple[mx.array, mx.array]:
    """KL(expected || got) in nats and whether the first choices agree, `[B]` each.

    Args:
        expected: Logits `[B, vocabulary]` of the full cache.
        got: Logits `[B, vocabulary]` of the measured cache.
    """
    p, q = (
        x - mx.logsumexp(x, axis=-1, keepdims=True)
        for x in (expected.astype(mx.float32), got.astype(mx.float32))
    )
    agrees = mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1)
    return (mx.exp(p) * (p - q)).sum(axis=-1), agrees.astype(mx.float32)


def _curves(pairs: Sequence[tuple[mx.array, mx.array]]) -> Result:
    """Means over the answers by position, from each position's divergences and agreements `[B]`."""
    kl, top = (mx.stack(list(each)).mean(axis=1) for each in zip(*pairs, strict=True))
    return {"kl": _parts(kl), "top": _parts(top)}


def _parts(values: mx.array) -> list[float]:
    """Means of equal parts of a row of values."""
    of = cast(list[float], values.tolist())
    edges = [round(i * len(of) / PARTS) for i in range(PARTS + 1)]
    return [statistics.fmean(of[a:b] or [0.0]) for a, b in pairwise(edges)]
