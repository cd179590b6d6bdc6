"""Several arms measured side by side, in turns, so that a busy machine affects all of them alike.

Only ratios within one run mean much on a machine that others use too: every round visits every arm,
and a ratio is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Does its work once and returns the seconds it took.
Arm = Callable[[], float]
#: Called with the visits done and the visits in all.
Progress = Callable[[int, int], None]

# Shorter work is repeated for at least these seconds: the clock and a thread's wake-up then hardly
# matter.
SHORTEST = 1e-3


@dataclass(frozen=True)
class Samples:
    """Seconds per arm, one number per round.

    Attributes:
        seconds: Seconds by arm.
    """

    seconds: dict[str, list[float]]

    @property
    def arms(self) -> list[str]:
        return list(self.seconds)

    def median(self, arm: str) -> float:
        return statistics.median(self.seconds[arm])

    def ratio(self, arm: str, base: str) -> float:
        """An arm's time over another's: the median of the rounds' ratios."""
        rounds = zip(self.seconds[arm], self.seconds[base], strict=True)
        return statistics.median(a / b for a, b in rounds)

    def speed(self, arm: str, base: str) -> float:
        """An arm's speed over another's."""
        return self.ratio(base, arm)

    def quiet_ratio(self, arm: str, base: str) -> float:
        """The ratio of the arms' lower quartiles.

        Other processes only ever make a time longer, so this holds if most rounds were disturbed.
        """
        low = [summary(self.seconds[name])["lower_quartile"] for name in (arm, base)]
        return low[0] / low[1]

    def as_json(self) -> dict[str, dict[str, float]]:
        """Median, quartiles and the fastest round, by arm."""
        return {arm: summary(seconds) for arm, seconds in self.seconds.items()}


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, quartiles and the fastest."""
    low, median, high = (
        statistics.quantiles(seconds, n=4, method="inclusive") if seconds[1:] else seconds * 3
    )
    return {
        "seconds": median,
        "lower_quartile": low,
        "upper_quartile": high,
        "fastest": min(seconds),
    }


def in_turns(
    arms: Mapping[str, Arm], rounds: int, *, seed: int = 0, progress: Progress | None = None
) -> Samples:
    """Visit every arm once in every round.

    The order differs from round to round, since the arm after a slow one finds other data in
    the caches and sleeping threads.

    Args:
        arms: The arms by name.
        rounds: The number of rounds, at least 1.
        seed: The seed of the order.
        progress: Called after every visit.

    Raises:
        ValueError: There is nothing to measure.
    """
    if rounds < 1 or not arms:
        raise ValueError("A measurement needs an arm and a round.")
    order = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds):
        for visit, name in enumerate(order.sample(list(arms), len(arms)), 1):
            seconds[name].append(arms[name]())
            if progress:
                progress(turn * len(arms) + visit, rounds * len(arms))
    return Samples(seconds)


def timed(
    work: Callable[[], object],
    shortest: float = SHORTEST,
    clock: Callable[[], float] = time.perf_counter,
) -> Arm:
    """An arm that does some work once untimed, then for at least `shortest` seconds.

    Returns:
        Seconds that the work takes once.
    """

    def arm() -> float:
        work()
        calls, start = 0, clock()
        while True:
            work()
            calls += 1
            passed = clock() - start
            if passed >= shortest:
                return passed / calls

    return arm
