"""Does a kept row that stands for an evicted neighbour lose less than the remainder alone?

    python -m research.merging TEXT [--model builtin:recall-4m] [--parts 8 16]

At an eviction the kept row with the nearest key takes over the victim: its logit gets the logarithm
of the number of tokens that it stands for (a bias of 2 bytes a slot), and its value becomes their
mean. A victim whose nearest kept key is farther than a factor times its distance from the
remainder's mean key is folded into the remainder instead. Slots are reduced by the bias's bytes.

Sources: D2O (https://arxiv.org/abs/2406.13035, nearest neighbours and a threshold), CaM
(https://openreview.net/forum?id=LCTmppB165, values), Attention Matching
(https://arxiv.org/abs/2602.16284, a bias for each kept row). Simulated token by token
(`research.simulation`), in 16-bit numbers, with the slots that 5-bit rows would have.
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
from research.real_model import PLAIN_BITS, loaded, lost, side_by_side, standard_error
from research.simulation import SALIENT_PACKED, Setting, SimulatedCache, Trial, shares

#: Bits of the rows for which slots are counted, bytes beside a row, and bytes of a bias.
BITS, BESIDE, BIAS = 5, 6, 2
#: A factor that never lets a victim merge, and one that always does.
NEVER, ALWAYS = 0.0, 1e30


@dataclass(frozen=True)
class Merge:
    """How victims merge.

    Attributes:
        within: The factor of the module's rule.
        values: Whether the kept row's value becomes the mean; else only its bias grows.
    """

    within: float = NEVER
    values: bool = True


class MergingTrial(Trial):
    """A trial whose kept rows stand for their evicted neighbours. Attributes as in `Trial`."""

    def merging(self, merges: Sequence[Merge]) -> None:
        """Begin, with the merging of each sequence."""
        self.counts = mx.ones_like(self.scores)
        self.within = mx.array([one.within for one in merges])[:, None, None]
        self.mixes = mx.array([one.values for one in merges])[:, None, None]
        B, H, R, N = self.scores.shape
        self.moved = mx.zeros((B, H, R, N, self.mean_value.shape[-1]))

    @property
    def state(self) -> list[mx.array]:
        return [*super().state, self.counts, self.moved]

    def step(self, q: mx.array, keys: mx.array, values: mx.array, offset: int) -> mx.array:
        N = keys.shape[2]
        at = mx.arange(N)
        kept = self.kept[..., :N] | (at == offset - 1)
        counts = self.counts[..., :N]
        logits = (q @ keys.swapaxes(-1, -2))[:, :, None]
        logits = mx.where(kept[..., None, :], logits + mx.log(counts)[..., None, :], -mx.inf)
        r = self._column(q)
        lse = mx.logaddexp(mx.logsumexp(logits, axis=-1), r)
        p = mx.exp(logits - lse[..., None])
        out = p @ (values[:, :, None] + self.moved[..., :N, :])
        out = out + mx.exp(r - lse)[..., None] * self.mean_value[..., None, :]
        scores = self.scores[..., :N] + p.sum(axis=-2)
        victim, goes = self._victim(scores, kept, keys, values, offset)
        self._part(keys, values, victim, goes, kept)
        self.kept[..., :N] = kept & ~((at == victim[..., None]) & goes[..., None])
        self.scores[..., :N] = scores
        return out

    def _part(
        self, keys: mx.array, values: mx.array, victim: mx.array, goes: mx.array, kept: mx.array
    ) -> None:
        """Let victims merge with their nearest kept row, or fold them."""
        N = keys.shape[2]
        at = mx.arange(N)
        key = mx.take_along_axis(keys, victim[..., None], axis=2)  # [B, H, R, D]
        square = mx.square(keys).sum(axis=-1)[:, :, None]
        apart = square - 2 * key @ keys.swapaxes(-1, -2) + mx.square(key).sum(-1, keepdims=True)
        apart = mx.where(kept & (at != victim[..., None]), mx.maximum(apart, 0), mx.inf)
        nearest = mx.argmin(apart, axis=-1)
        # While nothing was folded, the kept keys' mean stands for the remainder's.
        mean = mx.where((self.count > 0)[..., None], self.mean_key, shares(kept) @ keys)
        far = mx.square(key - mean).sum(axis=-1)
        merges = goes & (apart.min(axis=-1) <= self.within * far) & (self.within > 0)
        self._fold(keys, values, victim, goes & ~merges)
        gone = mx.take_along_axis(self.counts[..., :N], victim[..., None], axis=-1)
        mine = mx.take_along_axis(self.counts[..., :N], nearest[..., None], axis=-1)
        own = (at == nearest[..., None]) & merges[..., None]
        whole = values[:, :, None] + self.moved[..., :N, :]
        theirs, held = (
            mx.take_along_axis(whole, index[..., None, None], axis=3) for index in (victim, nearest)
        )
        shift = (gone / (gone + mine))[..., None] * (theirs - held)  # [B, H, R, 1, Dv]
        moving = (own & self.mixes[..., None])[..., None]
        self.moved[..., :N, :] = self.moved[..., :N, :] + mx.where(moving, shift, 0)
        self.counts[..., :N] = self.counts[..., :N] + mx.where(own, gone, 0)


class MergingCache(SimulatedCache):
    """A simulated cache with a merging for each setting."""

    kind = MergingTrial

    def __init__(self, settings: Sequence[Setting], merges: Sequence[Merge], layer: int, T: int):
        super().__init__(settings, layer, T)
        self.merges = merges

    def _start(self, keys: mx.array, values: mx.array) -> None:
        super()._start(keys, values)
        assert isinstance(self.trial, MergingTrial)
        n = keys.shape[0] // len(self.settings)
        self.trial.merging([merge for merge in self.merges for _ in range(n)])


#: What is tried, by name.
MERGES = {
    "the remainder alone": Merge(),
    "nearer than the remainder, bias and value": Merge(1.0),
    "a quarter as far, bias and value": Merge(0.25),
    "a tenth as far, bias and value": Merge(0.1),
    "a tenth as far, bias": Merge(0.1, values=False),
    "always, bias and value": Merge(ALWAYS),
}


def main() -> None:
    """Parse and run; tables are Markdown."""
    args = parser().parse_args()
    model, tokenizer = loaded(args.model)
    T, profile = args.tokens, profile_of(model)
    width = model.args.head_dim
    samples = samples_of(tokenizer.encode(args.text.read_text()), args.samples, T, None)
    row = RowFormat(BITS, BITS).row_bytes(width, width) + BESIDE
    for part in args.parts:
        given = T // part * 2 * width * PLAIN_BITS // 8
        settings, merges = [Setting("full cache")], [Merge()]
        for name, merge in MERGES.items():
            budgets = profile.budgets(given // (row + BIAS * (merge.within > 0)))
            orders = profile.saturation(budgets)
            settings.append(Setting(name, budgets, orders, SALIENT_PACKED))
            merges.append(merge)
        caches = [MergingCache(settings, merges, i, T) for i in range(len(model.layers))]
        nll, far = side_by_side(model, samples, caches, len(settings), T // 4)
        print(f"\n| {args.model}, 1/{part} | loss | divergence, 0.001 nats |\n|---|---:|---:|")
        for one, losses, d in zip(settings, nll, far, strict=True):
            apart = f"{statistics.fmean(d):.2f} ± {standard_error(d):.2f}"
            print(f"| {one.name} | {lost(losses, nll[0])} | {apart} |", flush=True)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("text", type=Path)
    made.add_argument("--model", default="builtin:recall-4m")
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--samples", type=int, default=4)
    made.add_argument("--parts", type=int, nargs="+", default=[8, 16], help="of the bytes")
    return made


if __name__ == "__main__":
    main()
