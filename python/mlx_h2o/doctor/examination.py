"""The whole examination, part after part; what is broken off keeps what was found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mlx_h2o._utils.progress import Told
from mlx_h2o.doctor import checks, conversation, held_memory, timings
from mlx_h2o.doctor.chips import chip_of
from mlx_h2o.doctor.machine import machine
from mlx_h2o.doctor.report import Over, Report
from mlx_h2o.doctor.variants import checks as every_check

PARTS = ("kernels", "conversation", "timings", "memory")
# Shares of the time after which the parts that can stop early do; the others take seconds.
_KERNELS_UNTIL, _TIMINGS_UNTIL = 0.5, 0.85
#: With --quick one of so many cases is looked at.
QUICK = 7


@dataclass(frozen=True)
class Plan:
    """What shall be examined.

    Attributes:
        parts: Some of `PARTS`.
        quick: Whether one of `QUICK` variants does.
        minutes: After which nothing new is begun.
        slots: The numbers of slots to time.
        rounds: The number of timed rounds.
    """

    parts: tuple[str, ...] = PARTS
    quick: bool = False
    minutes: float = 5.0
    slots: tuple[int, ...] = timings.SLOTS
    rounds: int = timings.ROUNDS


def examine(plan: Plan, told: Told) -> Report:
    """Examine; at Ctrl-C the report is what there is by then, and not complete.

    Args:
        plan: What.
        told: Shows how far it is.
    """
    start = time.monotonic()
    report = Report(machine())
    try:
        for name, part in _parts(plan, told, start, report).items():
            if name in plan.parts:
                told.about(name)
                part()
        report.complete = True
    except KeyboardInterrupt as stop:
        report.stopped = stop
    report.seconds = time.monotonic() - start
    return report


def _parts(plan: Plan, told: Told, start: float, report: Report) -> dict[str, Callable[[], None]]:
    """What makes each part, in order."""

    def over(share: float) -> Over:
        return lambda: time.monotonic() - start > share * 60 * plan.minutes

    begun, every = report.begun, QUICK if plan.quick else 1
    chip = chip_of(str(report.machine["device information"].get("device_name", "")))
    return {
        "kernels": lambda: checks.section(
            begun, list(every_check())[::every], told, over(_KERNELS_UNTIL)
        ),
        "conversation": lambda: conversation.section(begun),
        "timings": lambda: timings.section(
            begun, plan.slots, plan.rounds, chip, told, over(_TIMINGS_UNTIL)
        ),
        "memory": lambda: held_memory.section(begun),
    }
