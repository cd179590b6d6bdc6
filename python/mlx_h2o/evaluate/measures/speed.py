"""Speed and memory: each cache in a process of its own, with nothing else running."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.measures.measure import Findings, Found, Measure
from mlx_h2o.evaluate.sections import Rows, Section
from mlx_h2o.evaluate.stage import Stage, read, step
from mlx_h2o.evaluate.workers import Tell

#: The file in which Linux gives the number of memory pages that a process holds.
STATM = Path("/proc/self/statm")
MEGA = 1e6


@dataclass(frozen=True)
class SpeedMeasure(Measure):
    """One conversation: a short beginning, a prompt, and decoding with eviction active.

    Attributes:
        prompt: Tokens of the prompt.
        beginning: Tokens of the conversation that are decoded before anything is evicted.
        steps: Timed steps; their median counts.
    """

    prompt: int = 1024
    beginning: int = 16
    steps: int = 60

    name = "speed"
    alone = True

    def tokens(self) -> int:
        return self.prompt

    def work(self) -> int:
        return self.prompt + self.beginning + 2 * self.steps

    def passes(self) -> int:
        return 2 * self.steps + 4

    def of(self, stage: Stage, contender: Contender, tell: Tell) -> Found:
        tokens = mx.array([stage.prose(self.prompt, 0)])
        mx.eval(stage.model.parameters())
        before = resident()
        mx.reset_peak_memory()
        early = contender.make(stage.model, self.prompt)
        logits = read(stage.model, early, tokens[:, : self.beginning], stage.chunk, tell)
        # At most the number of steps that the smallest cache can take before it evicts.
        free = self._timed(stage, early, logits, min(self.steps, self.beginning), tell)
        del early
        cache = contender.make(stage.model, self.prompt)
        start = time.perf_counter()
        logits = read(stage.model, cache, tokens, stage.chunk, tell)
        prefill = time.perf_counter() - start
        evicting = self._timed(stage, cache, logits, self.steps, tell)
        return {
            "prefill": prefill,
            "before": 1 / free,
            "after": 1 / evicting,
            "nbytes": bytes_in_16_bits(cache),
            "peak_mlx": mx.get_peak_memory(),
            "grown": resident() - before,
            "peak_process": peak_resident(),
        }

    def _timed(
        self, stage: Stage, cache: list[Any], logits: mx.array, steps: int, tell: Tell
    ) -> float:
        """The median step, in seconds."""
        seconds = []
        for _ in range(steps):
            token = mx.argmax(logits, axis=-1)
            start = time.perf_counter()
            logits = step(stage.model, cache, token, tell)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def section(self, findings: Findings) -> Section:
        rows = [
            (
                contender.name,
                f"{found['prefill']:.2f}",
                f"{found['before']:.0f}",
                f"{found['after']:.0f}",
                f"{found['nbytes']:,}",
                f"{found['peak_mlx'] / MEGA:.0f}",
                f"{found['grown'] / MEGA:.0f}",
                f"{found['peak_process'] / MEGA:.0f}",
            )
            for contender, found in findings
        ]
        columns = ("cache", f"prefill of {self.prompt}, s", "tokens/s before", "after")
        memory = ("KV bytes", "MLX's peak, MB", "process grew by, MB", "process's peak, MB")
        return Section(
            "Speed and memory",
            f"One conversation, each cache in a process of its own: {self.prompt} tokens in "
            f"chunks, then {self.steps} tokens one by one with eviction active (after), and before "
            "anything is evicted (before). KV bytes are as a 16-bit model has them.",
            [Rows("", (*columns, *memory), rows)],
        )


def resident() -> int:
    """Bytes of memory that this process holds now, or its peak if the system gives only that."""
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    return peak_resident()


def peak_resident() -> int:
    """The most bytes that this process has held."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
