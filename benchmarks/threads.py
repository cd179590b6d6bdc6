"""The cost of handing work to the thread pool, by the work and the time since the last."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.machine import probe
from benchmarks.measuring import Arm, Progress, Samples, in_turns

ALONE = "alone"
POOL = "pool"

#: Microseconds that a job takes on one thread; 0 is an empty job.
WORK = (0, 5, 20, 50, 100, 400)
#: Microseconds between jobs: none; about a layer of a small model; about one of a large model.
GAPS = (0, 50, 200, 1000)
# Items of a job per thread.
ITEMS_PER_THREAD = 2
# Approximate seconds of one measurement, and its fewest and most jobs.
VISIT = 0.01
FEWEST_JOBS, MOST_JOBS = 11, 1001
CALIBRATION_STEPS = 100_000


@dataclass(frozen=True)
class Handing:
    """One kind of job.

    Attributes:
        work: Microseconds that it takes on one thread.
        gap: Microseconds since the last job.
        samples: Seconds per job, alone and with the pool.
    """

    work: int
    gap: int
    samples: Samples

    def as_json(self) -> dict[str, Any]:
        """Both times, and the pool's gain."""
        return {
            "work_us": self.work,
            "gap_us": self.gap,
            "arms": self.samples.as_json(),
            "pool_over_alone": self.samples.speed(POOL, ALONE),
        }


def measure(rounds: int, progress: Progress | None = None) -> list[Handing]:
    """All kinds of jobs."""
    kinds = [(work, gap) for gap in GAPS for work in WORK]
    step = seconds_per_step()
    # All kinds are interleaved, so that a disturbance does not affect one of them alone.
    arms = {
        f"{name} {work} {gap}": job(name == POOL, work, gap, step)
        for work, gap in kinds
        for name in (ALONE, POOL)
    }
    times = in_turns(arms, rounds, progress=progress).seconds
    return [
        Handing(work, gap, Samples({name: times[f"{name} {work} {gap}"] for name in (ALONE, POOL)}))
        for work, gap in kinds
    ]


def seconds_per_step() -> float:
    """The time of one multiplication, the unit of a job's length."""
    fastest = probe().job_seconds(
        pooled=False, threads=1, jobs=21, items=1, steps=CALIBRATION_STEPS
    )
    return min(fastest) / CALIBRATION_STEPS


def job(pooled: bool, work: int, gap: int, step: float) -> Arm:
    """An arm: the median job of a series."""
    from mlx_h2o import _ext

    threads, native = _ext.threads(), probe()
    items = ITEMS_PER_THREAD * threads
    jobs = int(VISIT / (1e-6 * (work + gap) + 1e-5))
    return lambda: statistics.median(
        native.job_seconds(
            pooled=pooled,
            threads=threads,
            jobs=max(FEWEST_JOBS, min(MOST_JOBS, jobs)),
            items=items,
            steps=round(1e-6 * work / items / step),
            gap=round(1e-6 * gap / step),
        )
    )
