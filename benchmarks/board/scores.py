"""How far a rival's predictions are from the full cache's, token by token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

import mlx.core as mx

from benchmarks.board.reading import Reading
from benchmarks.board.tasks import Task
from mlx_h2o.evaluate.facts import is_known

#: Digits of a divergence that are kept in a record.
DIGITS = 7


@dataclass
class Scores:
    """One cell of the board: a rival with a part of the bytes, on one task.

    Attributes:
        kl: KL(full || rival) in nats of each counted token, by row.
        changed: Whether the likeliest token is another than the full cache's, by row.
        nll: Nats of each counted token, by row.
        known: Whether each answer comes, row after row; empty for texts.
        counted: As in `Reading`.
        held: As in `Reading`.
        prompt_seconds: As in `Reading`.
        token_seconds: As in `Reading`.
        peak: As in `Reading`.
    """

    kl: list[list[float]]
    changed: list[list[bool]]
    nll: list[list[float]]
    known: list[bool]
    counted: int
    held: int
    prompt_seconds: float
    token_seconds: float
    peak: int | None

    def as_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        return asdict(self)


def scores_of(task: Task, full: mx.array, reading: Reading) -> Scores:
    """Compare a rival with the full cache.

    Args:
        task: What both have read.
        full: The full cache's logits `[n, C - 1, vocabulary]`.
        reading: The rival's.
    """
    kl, changed, nll, right_answers = [], [], [], []
    targets = mx.array(task.continuations)[:, 1:]
    for i, length in enumerate(task.lengths):
        # Of a question and its answer, the answer counts.
        first = 0 if task.answers is None else max(task.answers[i] - 1, 0)
        which = slice(first, length - 1)
        own, target = reading.logits[i, which], targets[i, which]
        p, q = (_log_softmax(logits) for logits in (full[i, which], own))
        apart = mx.maximum((mx.exp(p) * (p - q)).sum(axis=-1), 0)
        kl.append([round(x, DIGITS) for x in cast(list[float], apart.tolist())])
        differs = mx.argmax(p, axis=-1) != mx.argmax(q, axis=-1)
        changed.append(cast(list[bool], differs.tolist()))
        worth = -mx.take_along_axis(q, target[:, None], axis=-1)[:, 0]
        nll.append([round(x, DIGITS) for x in cast(list[float], worth.tolist())])
        if task.answers is not None:
            right = cast(list[bool], is_known(own, target, task.least).tolist())
            places = [(first + 1, length)] if task.parts is None else task.parts[i]
            # The token at place p of a continuation is the one of index p - 1 that is predicted.
            right_answers += [all(right[a - 1 - first : b - 1 - first]) for a, b in places]
    sizes = reading.counted, reading.held, reading.prompt_seconds, reading.token_seconds
    return Scores(kl, changed, nll, right_answers, *sizes, reading.peak)


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
