"""mlx-lm's own server, noting the most bytes of KV that it holds at once, for benchmarks.soak."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx_lm.server

NOTED = Path(os.environ.get("SOAK_PEAK", os.devnull))


class Noting(mlx_lm.server.BatchGenerator):
    """Notes the bytes of running caches, and of idle ones, after each step."""

    peak = 0
    idle: Any = None

    def next(self) -> Any:
        done = super().next()
        size = self.prompt_cache_nbytes + (self.idle.nbytes if self.idle else 0)
        if size > Noting.peak:
            Noting.peak = size
            NOTED.write_text(str(size))
        return done


class Kept(mlx_lm.server.LRUPromptCache):
    """The server's idle caches."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        Noting.idle = self


if __name__ == "__main__":
    mlx_lm.server.BatchGenerator = Noting
    mlx_lm.server.LRUPromptCache = Kept
    mlx_lm.server.main()
