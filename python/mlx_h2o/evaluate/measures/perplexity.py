"""Perplexity token by token, with intervals of the loss by paired bootstrap."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_h2o.evaluate.bootstrap import LEVEL, loss_interval
from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.measures.measure import Findings, Found, Measure, signed
from mlx_h2o.evaluate.perplexity import Perplexity, perplexity, samples_of
from mlx_h2o.evaluate.sections import Curves, Rows, Section
from mlx_h2o.evaluate.stage import Stage
from mlx_h2o.evaluate.workers import Tell


@dataclass(frozen=True)
class PerplexityMeasure(Measure):
    """Samples of the text, evenly spaced, each token after the prefill scored as it comes.

    Attributes:
        samples: How many.
        length: Tokens of each.
        prefill: Tokens given at once at the beginning, and not scored.
    """

    samples: int = 10
    length: int = 512
    prefill: int = 32

    name = "perplexity"
    briefly = "loss of perplexity"

    def tokens(self) -> int:
        return self.length

    def work(self) -> int:
        return self.samples * self.length

    def of(self, stage: Stage, contender: Contender, tell: Tell) -> Found:
        samples = samples_of(stage.tokens, self.samples, self.length, stage.tokenizer.bos_token_id)
        cache = contender.make(stage.model, self.length)
        come = 0

        def progress(position: int) -> None:
            nonlocal come
            tell(self.samples * (position - come))
            come = position

        result = perplexity(stage.model, cache, samples, prefill=self.prefill, progress=progress)
        return {"nll": result.nll, "nbytes": bytes_in_16_bits(cache) // self.samples}

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
        """The loss over the bytes, one line for each cache that was given several sizes."""
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
