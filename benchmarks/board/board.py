"""A run of the board: every rival, every part of the bytes, every task, cell after cell."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from benchmarks.board.cells import Cell, Outcome, Record
from benchmarks.board.in_package import full_reading
from benchmarks.board.rivals import FULL, Rival
from benchmarks.board.ruler import KINDS
from benchmarks.board.scores import scores_of
from benchmarks.board.tasks import (
    GROWING,
    HARD_NEEDLES,
    MEMORY,
    NEEDLES,
    RULER,
    RULER_SHARE,
    SPEAKERS,
    TEXTS_TASK,
    Task,
    growing,
    hard_needles,
    memory,
    needles,
    ruler_task,
    texts,
)
from mlx_h2o.doctor.commit import commit
from mlx_h2o.evaluate.reader import Reader

#: Called with the cell that is about to be measured, the cells done, and all cells.
Tell = Callable[[Cell, int, int], None]


@dataclass(frozen=True)
class Sizes:
    """How much of everything is measured.

    Attributes:
        prompt: Tokens of a text's prompt, and of a fact's prompt with its question.
        continuation: Tokens of a text's continuation; the first is given.
        samples: Samples of each text.
        facts: Prompts of needles.
        hard: Prompts of hard needles; 0 leaves that task out.
        ruler: Prompts of each of RULER's tasks; 0 leaves them out.
        shares: Parts of the bytes of a prompt's full 16-bit cache.
        growing: Tokens of a text that comes token by token; 0 leaves that task out.
    """

    prompt: int
    continuation: int
    samples: int
    facts: int
    hard: int
    shares: tuple[float, ...]
    growing: int = 0
    ruler: int = 0


@dataclass(frozen=True)
class Plan:
    """A task that is made when its first cell is measured.

    Attributes:
        name: The task's name.
        make: Makes it.
        grows: As in `Task`.
        share: The part of the bytes with which it is measured; None: those of the run.
    """

    name: str
    make: Callable[[], Task]
    grows: bool = False
    share: float | None = None


def plans_of(reader: Reader, sizes: Sizes, words: Sequence[str] = ()) -> list[Plan]:
    """Texts, also of several speakers and growing; needles, also hard ones; memory; RULER's tasks.

    Args:
        reader: The model's tokenizer.
        sizes: How much of everything.
        words: Only tasks whose names contain one of these; none means all.
    """
    P = sizes.prompt
    made = [
        *(
            Plan(name, partial(texts, reader, P, sizes.continuation, sizes.samples, name))
            for name in (TEXTS_TASK, SPEAKERS)
        ),
        Plan(NEEDLES, partial(needles, reader, P, sizes.facts)),
        Plan(MEMORY, partial(memory, reader, P, sizes.continuation)),
    ]
    if sizes.growing:
        made.insert(0, Plan(GROWING, partial(growing, reader, sizes.growing, 1), grows=True))
    if sizes.hard:
        made.append(Plan(HARD_NEEDLES, partial(hard_needles, reader, P, sizes.hard)))
    for kind in KINDS if sizes.ruler else ():
        make = partial(ruler_task, reader, kind, P, sizes.ruler)
        made.append(Plan(f"{RULER} {kind}", make, share=RULER_SHARE))
    return [plan for plan in made if is_chosen(plan.name, words)]


def is_chosen(name: str, words: Sequence[str]) -> bool:
    """Whether the name of a task or a rival contains one of some words; none means all."""
    return not words or any(word in name for word in words)


def cells_of(
    model: str, plans: Sequence[Plan], rivals: Sequence[Rival], shares: Sequence[float]
) -> Iterator[tuple[Cell, Rival]]:
    """All cells of a model, task after task."""
    for plan in plans:
        for rival in rivals:
            if plan.grows and rival.prompts_only:
                continue
            at = shares if plan.share is None else [plan.share]
            for share in [None] if rival.keeps_all else at:
                yield Cell(model, plan.name, rival.name, share), rival


def measure(
    reader: Reader,
    plans: Sequence[Plan],
    rivals: Sequence[Rival],
    shares: Sequence[float],
    record: Record,
    tell: Tell,
    until: float = math.inf,
    again: bool = False,
) -> int:
    """Measure the cells that a record lacks, and return how many it lacks still.

    A rival that cannot run leaves its reason in its cell.

    Args:
        reader: The model.
        plans: Its tasks.
        rivals: The rivals.
        shares: Parts of the bytes.
        record: What was measured before; new cells are added.
        tell: Called before each cell.
        until: The time, by `time.monotonic`, after which no further cell is begun.
        again: Whether cells of other commits are measured anew.
    """
    model = reader.model_name
    named = {plan.name: plan for plan in plans}
    whole = list(cells_of(model, plans, rivals, shares))
    at = commit()
    which = at if again else None
    missing = [(cell, rival) for cell, rival in whole if not record.has(cell, which)]
    ready: tuple[Task, mx.array] | None = None
    for i, (cell, rival) in enumerate(missing):
        if time.monotonic() > until:
            return len(missing) - i
        tell(cell, len(whole) - len(missing) + i, len(whole))
        if ready is None or ready[0].name != cell.task:
            task = named[cell.task].make()
            ready = task, _full(reader, task, record)
        record.add(
            cell, {**outcome_of(reader, ready[0], rival, cell.share, ready[1]), "commit": at}
        )
    return 0


def _full(reader: Reader, task: Task, record: Record) -> mx.array:
    """The full cache's logits; its own scores are kept, too."""
    reading = full_reading(reader, task)
    cell = Cell(reader.model_name, task.name, FULL, None)
    if cell not in record.outcomes:
        record.add(cell, scores_of(task, reading.logits, reading).as_json())
    return reading.logits


def outcome_of(
    reader: Reader, task: Task, rival: Rival, share: float | None, full: mx.array
) -> Outcome:
    """A cell's scores, or why there are none.

    Args:
        reader: The model.
        task: The task.
        rival: The rival.
        share: The part of the bytes.
        full: The full cache's logits.
    """
    try:
        reading = rival.read(reader, task, share or 1.0)
        return scores_of(task, full, reading).as_json()
    except Exception as error:  # a rival that does not run must not end the board
        return {"failed": f"{type(error).__name__}: {error}"[:400]}


def protocol_of(model: str, sizes: Sizes, chunk: int, seed: int) -> dict[str, Any]:
    """What the scores of a model's cells depend on."""
    # A task that is left out is left out here, too; a cell names its own part of the bytes.
    how = {name: value for name, value in asdict(sizes).items() if value and name != "shares"}
    return {"model": model, "sizes": how, "chunk": chunk, "seed": seed}
