"""Long answers: how far a cache's next-token distribution is from the full cache's, by position."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import mlx.core as mx

from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.measures.measure import Findings, Found, Measure
from mlx_h2o.evaluate.sections import Curves, Rows, Section
from mlx_h2o.evaluate.stage import Stage, read, step, untold
from mlx_h2o.evaluate.workers import Tell
from mlx_h2o.stock import stock_caches

#: The answer is cut into so many parts, whose means are reported.
PARTS = 8


@dataclass(frozen=True)
class AgreementMeasure(Measure):
    """An answer that the full cache draws, read along by each contender.

    Attributes:
        answers: Side by side.
        prompt: Tokens of the text that each goes on from.
        length: Tokens of prompt and answer: at a sixteenth of the bytes the answer is as long as
            sixteen budgets.
        temperature: Of the drawing.
    """

    answers: int = 4
    prompt: int = 64
    length: int = 1024
    temperature: float = 0.8

    name = "agreement"
    briefly = "KL of long answers, nats"

    def tokens(self) -> int:
        return self.length

    def work(self) -> int:
        return self.answers * self.length

    def of(self, stage: Stage, contender: Contender, tell: Tell) -> Found:
        spread = len(stage.tokens) // self.answers
        body = self.prompt - len(stage.first)
        rows = [[*stage.first, *stage.prose(body, i * spread)] for i in range(self.answers)]
        tokens = mx.array(rows)
        full, ours = stock_caches(stage.model), contender.make(stage.model, self.length)
        expected = read(stage.model, full, tokens, stage.chunk, untold)
        got = read(stage.model, ours, tokens, stage.chunk, tell)
        key = mx.random.key(stage.seed)
        apart, same = [], []
        for _ in range(self.length - self.prompt):
            divergence, agrees = compared(expected, got)
            apart.append(divergence)
            same.append(agrees)
            key, draw = mx.random.split(key)
            token = mx.random.categorical(expected / self.temperature, key=draw)
            expected = step(stage.model, full, token, untold)
            got = step(stage.model, ours, token, tell)
            mx.eval(apart[-1], same[-1])
        kl, top = mx.stack(apart).mean(axis=1), mx.stack(same).mean(axis=1)
        return {"kl": _parts(kl), "top": _parts(top)}

    def brief(self, found: Found, full: Found) -> str:
        return f"{statistics.fmean(found['kl']):.4f}"

    def section(self, findings: Findings) -> Section:
        size = (self.length - self.prompt) / PARTS
        middles = [self.prompt + (i + 0.5) * size for i in range(PARTS)]
        rows, apart, same = [], dict[str, list[float | None]](), dict[str, list[float | None]]()
        for contender, found in findings[1:]:
            mean, last = statistics.fmean(found["kl"]), found["kl"][-1]
            top, last_top = statistics.fmean(found["top"]), found["top"][-1]
            cells = f"{mean:.4f}", f"{last:.4f}", f"{top:.1%}", f"{last_top:.1%}"
            rows.append((contender.name, *cells))
            apart[contender.name], same[contender.name] = found["kl"], found["top"]
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
        expected: Logits `[B, vocabulary]`.
        got: Likewise.
    """
    p, q = (
        x - mx.logsumexp(x, axis=-1, keepdims=True)
        for x in (expected.astype(mx.float32), got.astype(mx.float32))
    )
    agrees = mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1)
    return (mx.exp(p) * (p - q)).sum(axis=-1), agrees.astype(mx.float32)


def _parts(values: mx.array) -> list[float]:
    """Means of equal parts of a row of values."""
    of = cast(list[float], values.tolist())
    edges = [round(i * len(of) / PARTS) for i in range(PARTS + 1)]
    return [statistics.fmean(of[a:b] or [0.0]) for a, b in pairwise(edges)]
