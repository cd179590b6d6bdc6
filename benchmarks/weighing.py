"""What a process holds for caches, weighed: for benchmarks.memory."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_h2o.models.free_memory import give_back
from mlx_h2o.slots import reserved_range

#: Held over told, and what belongs to no cache: scalars and masks.
MOST_OVER, LOOSE = 1.05, 1 << 18
#: Conversations of a batch.
SEQUENCES = 4
MIB = 1 << 20


def resident() -> int:
    """Bytes of this process that are in memory now, or 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@dataclass(frozen=True)
class Weight:
    """Bytes after a stage; `nbytes` is what the caches say, the others are over the beginning.

    Attributes:
        caches: The arm.
        stage: What was done.
        nbytes: `nbytes` of the caches.
        active: MLX's active memory, and pages of reserved ranges.
        pool: Its free buffers, before they were given back.
        peak: The most that was active during the stage, with the pages of ranges at its end.
        resident: Of the process, free buffers given back.
    """

    caches: str
    stage: str
    nbytes: int
    active: int
    pool: int
    peak: int
    resident: int

    @property
    def is_too_much(self) -> bool:
        """Whether one of ours holds more than it tells."""
        return "mlx-h2o" in self.caches and self.active > MOST_OVER * self.nbytes + LOOSE

    @property
    def cells(self) -> list[str]:
        """As a row of the table, in MiB."""
        sizes = [f"{size / MIB:.1f}" for size in (self.nbytes, self.active)]
        rest = [f"{size / MIB:.1f}" for size in (self.pool, self.peak, self.resident)]
        return [self.caches, self.stage, *sizes, f"{self.active / self.nbytes:.3f}", *rest]


class Scale:
    """Weighs the process, over what it weighed when this was made."""

    def __init__(self, arm: str):
        give_back()
        self._arm, self._resident = arm, resident()
        self._active, self._in_ranges = mx.get_active_memory(), reserved_range.bytes_held()
        mx.reset_peak_memory()

    def weighed(self, stage: str, reported: int) -> Weight:
        """The bytes held now, and their peak since the previous call."""
        pool = mx.get_cache_memory()
        peak = mx.get_peak_memory() - self._active
        peak += reserved_range.bytes_held() - self._in_ranges
        give_back()
        in_ranges = reserved_range.bytes_held() - self._in_ranges
        active = mx.get_active_memory() - self._active + in_ranges
        own = resident() - self._resident
        mx.reset_peak_memory()
        return Weight(self._arm, stage, reported, active, pool, peak, own)


def parser() -> argparse.ArgumentParser:
    """What understands the command line."""
    made = argparse.ArgumentParser(
        description="Memory that is told and memory that is held, by these caches and by mlx-lm's."
    )
    made.add_argument("--tokens", type=int, default=2048, help="of the long prompt")
    made.add_argument("--slots", type=int, default=512, help="of the bounded caches")
    made.add_argument("--chunk", type=int, default=256, help="tokens that are read at once")
    made.add_argument("--json", type=Path, help="write the figures there, too")
    made.add_argument("--arm", help=argparse.SUPPRESS)
    return made
