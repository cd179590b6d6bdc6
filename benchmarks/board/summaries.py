"""Cells summed up: a rival's figures with one part of the bytes, over all tasks of a model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.board.cells import Cell, Outcome
from benchmarks.board.rivals import FULL, OURS
from benchmarks.board.tasks import HARD_NEEDLES, MEMORY, NEEDLES, TEXTS_TASK
from mlx_h2o.evaluate.measures.base import part_of
from mlx_h2o.evaluate.measures.perplexity import mean_interval

Interval = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """A rival's figures.

    Attributes:
        rival: The rival's name.
        share: The part of the bytes; None if it keeps every token.
        kl: Mean KL of the texts' tokens, nats.
        kl_interval: Its interval over the texts' samples.
        over_ours: By how much its KL exceeds ours with the same bytes; None for rivals that keep
            every token.
        over_interval: The interval of that, paired by sample; None where `over_ours` is None.
        changed: The share of tokens whose likeliest is another.
        loss: The perplexity's loss against the full cache, as a share.
        facts: Known and asked, by task; only facts that the full cache knows.
        counted: Counted bytes of a text's cache.
        held: Held bytes.
        token_seconds: Seconds of a text's token.
        peak: The greatest number of bytes that reading one prompt took; None if not measured.
    """

    rival: str
    share: float | None
    kl: float
    kl_interval: Interval
    over_ours: float | None
    over_interval: Interval | None
    changed: float
    loss: float
    facts: dict[str, tuple[int, int]]
    counted: int
    held: int
    token_seconds: float
    peak: int | None

    @property
    def beats_ours(self) -> bool:
        """Whether its KL is below ours by more than chance explains."""
        return self.over_interval is not None and self.over_interval[1] < 0


def means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Each row's mean."""
    return [statistics.fmean(row) for row in rows]


def summed_up(
    outcomes: Mapping[Cell, Outcome],
    model: str,
    rival: str,
    share: float | None,
    task: str = TEXTS_TASK,
) -> Summary:
    """A rival's figures; tasks that failed are left out.

    Args:
        outcomes: All cells.
        model: The model.
        rival: The rival.
        share: The part of the bytes.
        task: The task whose tokens are summed up.

    Raises:
        KeyError: It has no figures for the task.
    """
    own = outcomes[Cell(model, task, rival, share)]
    ours = outcomes.get(Cell(model, task, OURS, share), {})
    facts = {
        task: of
        for task in (NEEDLES, HARD_NEEDLES)
        if (of := facts_known(outcomes, model, task, rival, share))
    }
    full = outcomes[Cell(model, task, FULL, None)]
    kl = means(own["kl"])
    above = [a - b for a, b in zip(means(own["nll"]), means(full["nll"]), strict=True)]
    paired = [a - b for a, b in zip(kl, means(ours["kl"]), strict=True)] if "kl" in ours else []
    over = statistics.fmean(paired) if paired else None
    if rival == OURS:
        over, paired = None, []
    return Summary(
        rival,
        share,
        statistics.fmean(kl),
        mean_interval(kl),
        over,
        mean_interval(paired) if paired else None,
        statistics.fmean(means(own["changed"])),
        math.expm1(statistics.fmean(above)),
        facts,
        own["counted"],
        own["held"],
        own["token_seconds"],
        outcomes.get(Cell(model, MEMORY, rival, share), {}).get("peak"),
    )


def facts_known(
    outcomes: Mapping[Cell, Outcome], model: str, task: str, rival: str, share: float | None
) -> tuple[int, int] | None:
    """Answers known and asked, of those that the full cache knows; None if it was not measured."""
    own = outcomes.get(Cell(model, task, rival, share), {})
    full = outcomes.get(Cell(model, task, FULL, None), {})
    return part_of(own["known"], full["known"]) if "known" in own and "known" in full else None
