"""Perplexity token by token, with intervals of the loss by paired bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.evaluate.bootstrap import LEVEL, loss_interval
from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.measures.measure import Findings, Found, Measure, signed
from mlx_h2o.evaluate.perplexity import Perplexity, perplexity, samples_of
from mlx_h2o.evaluate.sections import Curves, Rows, Section
from mlx_h2o.evaluate.side_by_side import side_by_side
from mlx_h2o.evaluate.stage import Stage
from mlx_h2o.evaluate.workers import Tell


@dataclass(frozen=True)
class PerplexityMeasure(Measure):
    """Samples of the text, evenly spaced, each token after the prefill scored as it comes.

    Attributes:
        samples: The number of samples.
        length: Tokens of each sample.
        prefill: Tokens given at once at the beginning; they are not scored.
    """

    samples: int = 10
    length: int = 512
    prefill: int = 32

    name = "perplexity"
    briefly = "loss of perplexity"
    shares = True

    def tokens(self) -> int:
        return self.length

    def work(self) -> int:
        return self.samples * self.length

    def passes(self) -> int:
        return max(self.length - self.prefill, 1)

    def of(self, stage: Stage, contender: Contender, tell: Tell) -> Found:
        return self.of_all(stage, [contender], tell)[0]

    def of_all(self, stage: Stage, contenders: Sequence[Contender], tell: Tell) -> list[Found]:
        n = self.samples
        samples = samples_of(stage.tokens, n, self.length, stage.tokenizer.bos_token_id)
        caches = [contender.make(stage.model, self.length) for contender in contenders]
        come = 0

        def progress(position: int) -> None:
            nonlocal come
            tell(len(caches) * n * (position - come))
            come = position

        nll = perplexity(
            stage.model,
            side_by_side(caches),
            mx.tile(samples, (len(caches), 1)),
            prefill=self.prefill,
            progress=progress,
        ).nll
        return [
            {"nll": nll[i * n : (i + 1) * n], "nbytes": bytes_in_16_bits(cache) // n}
            for i, cache in enumerate(caches)
        ]

    def brief(self, found: Found, full: Found) -> str:
        return signed(Perplexity(found["nll"]).loss_against(Perplexity(full["nll"])))

    def section(self, findings: Findings) -> Section:
        full = findings[0][1]
        rows = []
        for contender, found in findings:
            of = Perplexity(found["nll"])
            low, high = loss_interval(found["nll"], full["nll"])
            loss = signed(of.loss_against(Perplexity(full["nll"])))
            interval = f"{signed(low)} to {signed(high)}"
            rows.append(
                (
                    contender.name,
                    f"{of.value:.2f}",
                    *(("", "") if found is full else (loss, interval)),
                    f"{found['nbytes']:,}",
                    f"{found['nbytes'] / full['nbytes']:.1%}",
                )
            )
        interval = f"{LEVEL:.0%} interval"
        return Section(
            "Perplexity",
            f"{self.samples} samples of {self.length} tokens, one token at a time after the first "
            f"{self.prefill}. The interval is of the loss: paired bootstrap over samples.",
            [Rows("", ("cache", "perplexity", "loss", interval, "KV bytes", "of full"), rows)],
            [self._curves(findings)],
        )

    def _curves(self, findings: Findings) -> Curves:
        """The loss by bytes, one line for each cache measured at several sizes."""
        full = findings[0][1]["nll"]
        shares = sorted({c.share for c, _ in findings if c.share is not None})
        lines: dict[str, list[float | None]] = {}
        bands: dict[str, list[tuple[float, float] | None]] = {}
        for contender, found in findings:
            if contender.share is None:
                continue
            arm, at = contender.arm.name, shares.index(contender.share)
            loss = Perplexity(found["nll"]).loss_against(Perplexity(full))
            low, high = loss_interval(found["nll"], full)
            lines.setdefault(arm, [None] * len(shares))[at] = 100 * loss
            bands.setdefault(arm, [None] * len(shares))[at] = (100 * low, 100 * high)
        return Curves(
            "Loss of perplexity by bytes",
            shares,
            {name: tuple(line) for name, line in lines.items()},
            "part of the full cache's bytes",
            "perplexity above the full cache's, %",
            {name: tuple(band) for name, band in bands.items()},
            logarithmic=True,
        )
