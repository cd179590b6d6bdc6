"""Do several remainders of a head lose less than one, in the same bytes?

    python -m research.digests TEXT [--model builtin:recall-4m] [--parts 8 16]

A head's evicted tokens answer through several digests (count, mean key, mean value, and with the
second order the keys' variances) instead of one. A victim joins the digest of its part of the
positions ("by age"), or that with the nearest mean key ("nearest"), which begins empty and is begun
by a victim that is farther from all others than evicted keys are from their mean. Every further
digest has its means in 8 bits, and its variances if it has any; slots are reduced by these bytes.

Sources: pages of neighbouring tokens with mean keys, as in ArkVale
(https://openreview.net/forum?id=4oAt5L4lYe) and InfLLM (https://arxiv.org/abs/2402.04617).
Simulated token by token (`research.simulation`), in 16-bit numbers, with the slots that 5-bit rows
would have.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.storage.key_scaling import RowFormat
from research.mending import profile_of
from research.merging import BESIDE, BITS
from research.real_model import PLAIN_BITS, loaded, lost, side_by_side, standard_error
from research.simulation import SALIENT_PACKED, SILENT, Setting, SimulatedCache, Trial

#: Bytes of a digest beside its means: a count, and a scale and an offset for each mean.
COUNTS = 4 + 2 * 4
AGE, NEAREST = "by age", "nearest"
OWN, SHARED, NONE = "own", "shared", "none"


@dataclass(frozen=True)
class Digests:
    """How a head's evicted tokens answer.

    Attributes:
        count: Digests of a head.
        joins: `AGE` or `NEAREST`.
        spread: Which variances the second order has: each digest's own, one mean of all digests'
            (shared), or none, which is the first order.
    """

    count: int = 1
    joins: str = NEAREST
    spread: str = OWN

    def __str__(self) -> str:
        if self.count == 1:
            return "one remainder"
        return f"{self.count} digests, {self.joins}, variances: {self.spread}"

    def extra_bytes(self, width: int) -> int:
        """Bytes of a head's further digests, if rows have so many channels."""
        return (self.count - 1) * ((3 if self.spread == OWN else 2) * width + COUNTS)


class DigestTrial(Trial):
    """A trial with several digests. Attributes as in `Trial`, whose remainder ranks victims."""

    def digesting(self, of: Sequence[Digests]) -> None:
        """Begin, with the digests of each sequence."""
        B, H, R, D = self.mean_key.shape
        M, Dv = max(one.count for one in of), self.mean_value.shape[-1]
        self.counts = mx.zeros((B, H, R, M))
        self.keys_of, self.spread = (mx.zeros((B, H, R, M, D)) for _ in range(2))
        self.values_of = mx.zeros((B, H, R, M, Dv))
        self.used = mx.array([one.count for one in of])[:, None, None, None]
        self.aged = mx.array([one.joins == AGE for one in of])[:, None, None]
        self.shared, self.second = (
            mx.array([one.spread in which for one in of])[:, None, None, None, None]
            for which in ((SHARED,), (OWN, SHARED))
        )

    @property
    def state(self) -> list[mx.array]:
        return [*super().state, self.counts, self.keys_of, self.spread, self.values_of]

    def step(self, q: mx.array, keys: mx.array, values: mx.array, offset: int) -> mx.array:
        N = keys.shape[2]
        at = mx.arange(N)
        kept = self.kept[..., :N] | (at == offset - 1)
        logits = (q @ keys.swapaxes(-1, -2))[:, :, None]
        logits = mx.where(kept[..., None, :], logits, -mx.inf)
        r = self._columns(q)  # [B, H, R, G, M]
        lse = mx.logsumexp(mx.concatenate([logits, r], axis=-1), axis=-1, keepdims=True)
        p = mx.exp(logits - lse)
        out = p @ values[:, :, None] + mx.exp(r - lse) @ self.values_of
        scores = self.scores[..., :N] + p.sum(axis=-2)
        victim, goes = self._victim(scores, kept, keys, values, offset)
        self._join(keys, values, victim, goes)
        self._fold(keys, values, victim, goes)
        self.kept[..., :N] = kept & ~((at == victim[..., None]) & goes[..., None])
        self.scores[..., :N] = scores
        return out

    def _columns(self, q: mx.array) -> mx.array:
        mean = q[:, :, None] @ self.keys_of.swapaxes(-1, -2)  # [B, H, R, G, M]
        parts = self.counts / mx.maximum(self.counts.sum(axis=-1, keepdims=True), 1)
        mean_of_all = (parts[..., None] * self.spread).sum(axis=-2, keepdims=True)
        spread = mx.where(self.shared, mean_of_all, self.spread)
        x = 0.5 * (mx.square(q)[:, :, None] @ spread.swapaxes(-1, -2))
        t = self.saturation[..., None, None]
        bends = (t > 0) & self.second
        term = mx.where(bends, x * mx.rsqrt(1 + x / mx.maximum(t, 1e-6)), 0)
        r = mx.log(self.counts)[..., None, :] + mean + term
        return mx.where(t == SILENT, -mx.inf, r)

    def _join(self, keys: mx.array, values: mx.array, victim: mx.array, goes: mx.array) -> None:
        M, T = self.counts.shape[-1], self.kept.shape[-1]
        key = mx.take_along_axis(keys, victim[..., None], axis=2)
        value = mx.take_along_axis(values, victim[..., None], axis=2)
        apart = mx.square(key[..., None, :] - self.keys_of).sum(axis=-1)  # [B, H, R, M]
        apart = mx.where(self.counts > 0, apart, mx.inf)
        opened = (self.counts > 0).sum(axis=-1)
        far = apart.min(axis=-1) > self.var_key.sum(axis=-1)
        begins = far & (opened < self.used[..., 0])
        nearest = mx.where(begins, opened, mx.argmin(apart, axis=-1))
        aged = victim * self.used[..., 0] // T
        joined = mx.where(self.aged, aged, nearest)
        own = ((mx.arange(M) == joined[..., None]) & goes[..., None]).astype(mx.float32)
        self.counts = self.counts + own
        part = (own / mx.maximum(self.counts, 1))[..., None]
        step = key[..., None, :] - self.keys_of
        self.keys_of = self.keys_of + part * step
        self.spread = self.spread + part * ((1 - part) * mx.square(step) - self.spread)
        self.values_of = self.values_of + part * (value[..., None, :] - self.values_of)


class DigestCache(SimulatedCache):
    """A simulated cache with digests for each setting."""

    kind = DigestTrial

    def __init__(self, settings: Sequence[Setting], digests: Sequence[Digests], layer: int, T: int):
        super().__init__(settings, layer, T)
        self.digests = digests

    def _start(self, keys: mx.array, values: mx.array) -> None:
        super()._start(keys, values)
        assert isinstance(self.trial, DigestTrial)
        n = keys.shape[0] // len(self.settings)
        self.trial.digesting([one for one in self.digests for _ in range(n)])


def main() -> None:
    """Parse and run; tables are Markdown."""
    args = parser().parse_args()
    model, tokenizer = loaded(args.model)
    T, profile = args.tokens, profile_of(model)
    width = model.args.head_dim
    samples = samples_of(tokenizer.encode(args.text.read_text()), args.samples, T, None)
    row = RowFormat(BITS, BITS).row_bytes(width, width) + BESIDE
    tried = [Digests()]
    tried += [
        Digests(m, how, spread) for how in args.joins for spread in args.spread for m in args.counts
    ]
    for part in args.parts:
        given = T // part * 2 * width * PLAIN_BITS // 8
        settings, digests = [Setting("full cache")], [Digests()]
        for one in tried:
            budgets = profile.budgets((given - one.extra_bytes(width)) // row)
            settings.append(Setting(str(one), budgets, profile.saturation(budgets), SALIENT_PACKED))
            digests.append(one)
        caches = [DigestCache(settings, digests, i, T) for i in range(len(model.layers))]
        nll, far = side_by_side(model, samples, caches, len(settings), T // 4)
        print(f"\n| {args.model}, 1/{part} | slots | loss | divergence, 0.001 nats |")
        print("|---|---:|---:|---:|")
        for of, one, losses, d in zip(settings, digests, nll, far, strict=True):
            apart = f"{statistics.fmean(d):.2f} ± {standard_error(d):.2f}"
            slots = (given - one.extra_bytes(width)) // row if of.budgets else T
            print(f"| {of.name} | {slots} | {lost(losses, nll[0])} | {apart} |", flush=True)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("text", type=Path)
    made.add_argument("--model", default="builtin:recall-4m")
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--samples", type=int, default=4)
    made.add_argument("--parts", type=int, nargs="+", default=[8, 16], help="of the bytes")
    made.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8], help="digests of a head")
    made.add_argument("--joins", nargs="+", default=[NEAREST], choices=[AGE, NEAREST])
    made.add_argument("--spread", nargs="+", default=[OWN], choices=[OWN, SHARED, NONE])
    return made


if __name__ == "__main__":
    main()
