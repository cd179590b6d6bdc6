"""Speed and memory of one conversation, cache after cache, with nothing else running."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.measures.base import Measure, Result, Results
from mlx_h2o.evaluate.methods import Method
from mlx_h2o.evaluate.reader import Reader, Tell, read, step
from mlx_h2o.evaluate.report import Rows, Section
from mlx_h2o.models.free_memory import give_back

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

    def tokens(self) -> int:
        return self.prompt

    def work(self) -> int:
        return self.prompt + self.beginning + 2 * self.steps

    def passes(self) -> int:
        return 2 * self.steps + 4

    def of(self, reader: Reader, method: Method, tell: Tell) -> Result:
        tokens = mx.array([reader.prose(self.prompt, 0)])
        mx.eval(reader.model.parameters())
        give_back()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        early = method.make(reader.model, self.prompt)
        logits = read(reader.model, early, tokens[:, : self.beginning], reader.chunk, tell)
        # At most the number of steps that the smallest cache can take before it evicts.
        free = self._timed(reader, early, logits, min(self.steps, self.beginning), tell)
        del early
        cache = method.make(reader.model, self.prompt)
        start = time.perf_counter()
        logits = read(reader.model, cache, tokens, reader.chunk, tell)
        prefill = time.perf_counter() - start
        evicting = self._timed(reader, cache, logits, self.steps, tell)
        return {
            "prefill": prefill,
            "before": 1 / free,
            "after": 1 / evicting,
            "nbytes": bytes_in_16_bits(cache),
            "peak": mx.get_peak_memory() - before,
        }

    def _timed(
        self, reader: Reader, cache: list[Any], logits: mx.array, steps: int, tell: Tell
    ) -> float:
        """The median step, in seconds."""
        seconds = []
        for _ in range(steps):
            token = mx.argmax(logits, axis=-1)
            start = time.perf_counter()
            logits = step(reader.model, cache, token, tell)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def section(self, results: Results) -> Section:
        rows = [
            (
                method.name,
                f"{result['prefill']:.2f}",
                f"{result['before']:.0f}",
                f"{result['after']:.0f}",
                f"{result['nbytes']:,}",
                f"{result['peak'] / MEGA:.0f}",
            )
            for method, result in results
        ]
        columns = ("cache", f"prefill of {self.prompt}, s", "tokens/s before", "after")
        return Section(
            "Speed and memory",
            f"One conversation: {self.prompt} tokens in chunks, then {self.steps} tokens one by "
            "one with eviction active (after), and before anything is evicted (before). KV bytes "
            "are as a 16-bit model has them; the peak is of MLX's arrays beside the model.",
            [Rows("", (*columns, "KV bytes", "peak, MB"), rows)],
        )
