"""The most memory that a piece of work takes, as measured."""

from __future__ import annotations

import mlx.core as mx

from mlx_h2o.slots import reserved_range


class PeakMemory:
    """The memory from now on of MLX and of the reserved ranges, which MLX does not count.

    Args:
        counted: Bytes in memory already that count too, such as those of the caches.
    """

    def __init__(self, counted: int = 0) -> None:
        mx.clear_cache()
        self._before, self._in_ranges = mx.get_active_memory(), reserved_range.bytes_held()
        self._counted = counted
        mx.reset_peak_memory()

    @property
    def most(self) -> int:
        """The most bytes so far beyond those at the beginning."""
        return mx.get_peak_memory() - self._before + self._beside

    @property
    def now(self) -> int:
        """The bytes now beyond those at the beginning."""
        return mx.get_active_memory() - self._before + self._beside

    @property
    def _beside(self) -> int:
        return reserved_range.bytes_held() - self._in_ranges + self._counted
