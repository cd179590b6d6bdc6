"""A run of the board: every rival, every part of the bytes, every task, cell after cell."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from benchmarks.board import ruler, tasks
from benchmarks.board.cells import Cell, Found, Record
from benchmarks.board.in_package import full_reading
from benchmarks.board.rivals import FULL, Rival
from benchmarks.board.scores import scores_of
from benchmarks.board.tasks import Task
from mlx_h2o._utils.commit import commit
from mlx_h2o.evaluate.stage import Stage

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


def tasks_of(stage: Stage, sizes: Sizes, words: Sequence[str] = ()) -> list[Task]:
    """The texts, the needles, the hard needles, and RULER's tasks.

    Args:
        stage: The model's tokenizer.
        sizes: How much of everything.
        words: Only tasks whose names contain one of these are made; none means all.
    """
    prompt = sizes.prompt
    makers: dict[str, Callable[[], Task]] = {
        tasks.GROWING: lambda: tasks.growing(stage, sizes.growing, 1),
        tasks.TEXTS_TASK: lambda: tasks.texts(stage, prompt, sizes.continuation, sizes.samples),
        tasks.NEEDLES: lambda: tasks.needles(stage, prompt, sizes.facts),
        tasks.HARD_NEEDLES: lambda: tasks.hard_needles(stage, prompt, sizes.hard),
    }
    left_out = [] if sizes.growing else [tasks.GROWING]
    left_out += [] if sizes.hard else [tasks.HARD_NEEDLES]
    for kind in ruler.KINDS if sizes.ruler else ():
        makers[f"{tasks.RULER} {kind}"] = partial(
            tasks.ruler_task, stage, kind, prompt, sizes.ruler
        )
    return [
        make()
        for name, make in makers.items()
        if name not in left_out and (not words or any(word in name for word in words))
    ]


def cells_of(
    model: str, of_model: Sequence[Task], rivals: Sequence[Rival], shares: Sequence[float]
) -> Iterator[tuple[Cell, Rival]]:
    """All cells of a model, task after task."""
    for task in of_model:
        for rival in rivals:
            if task.grows and rival.prompts_only:
                continue
            at = shares if task.share is None else [task.share]
            for share in [None] if rival.keeps_all else at:
                yield Cell(model, task.name, rival.name, share), rival


def measure(
    stage: Stage,
    of_model: Sequence[Task],
    rivals: Sequence[Rival],
    shares: Sequence[float],
    record: Record,
    tell: Tell,
    until: float = math.inf,
) -> int:
    """Measure the cells that a record lacks, and return how many it lacks still.

    A rival that cannot run leaves its reason in its cell.

    Args:
        stage: The model.
        of_model: Its tasks.
        rivals: The rivals.
        shares: Parts of the bytes.
        record: What was measured before; new cells are added.
        tell: Called before each cell.
        until: The time, by `time.monotonic`, after which no further cell is begun.
    """
    model = stage.model_name
    named = {task.name: task for task in of_model}
    whole = list(cells_of(model, of_model, rivals, shares))
    missing = [(cell, rival) for cell, rival in whole if not record.has(cell)]
    full: tuple[str, mx.array] | None = None
    at = commit()
    for i, (cell, rival) in enumerate(missing):
        if time.monotonic() > until:
            return len(missing) - i
        tell(cell, len(whole) - len(missing) + i, len(whole))
        task = named[cell.task]
        if full is None or full[0] != cell.task:
            full = cell.task, _full(stage, task, record)
        record.add(cell, {**found(stage, task, rival, cell.share, full[1]), "commit": at})
    return 0


def _full(stage: Stage, task: Task, record: Record) -> mx.array:
    """The full cache's logits; its own scores are kept, too."""
    reading = full_reading(stage, task)
    cell = Cell(stage.model_name, task.name, FULL, None)
    if cell not in record.found:
        record.add(cell, scores_of(task, reading.logits, reading).as_json())
    return reading.logits


def found(stage: Stage, task: Task, rival: Rival, share: float | None, full: mx.array) -> Found:
    """A cell's scores, or why there are none.

    Args:
        stage: The model.
        task: The task.
        rival: The rival.
        share: The part of the bytes.
        full: The full cache's logits.
    """
    try:
        reading = rival.read(stage, task, share or 1.0)
        return scores_of(task, full, reading).as_json()
    except Exception as error:  # a rival that does not run must not end the board
        return {"failed": f"{type(error).__name__}: {error}"[:400]}


def protocol_of(model: str, sizes: Sizes, chunk: int, seed: int) -> dict[str, Any]:
    """What the scores of a model's cells depend on."""
    # A task that is left out is left out here, too; a cell names its own part of the bytes.
    how = {name: value for name, value in asdict(sizes).items() if value and name != "shares"}
    return {"model": model, "sizes": how, "chunk": chunk, "seed": seed}
