"""Does memory as a cache of all rows pay at equal bytes: pages that answer, and come back?

    python -m research.pages TEXT [--model MODEL] [--parts 8 16]

The evicted rows of a head lie in pages of 16 neighbouring positions. In memory a page has a digest
of its absent rows: their count, mean key and mean value, in 8 bits. Digests are columns of the
softmax, in the place of one remainder. A page whose digest had a large share of a head's mass comes
back one step later: its rows take the places of the rows that are worth least, and stay for some
steps. There are only so many digests: as a conversation grows, neighbouring pages share one, and
which of them comes back is decided by the digests of its children, which lie with the rows.

Everything in memory is counted, digests too, so a head with digests has fewer slots. Quality only:
all rows are held, and a mask tells which of them a cache would hold (`research.simulation`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_h2o
from mlx_h2o.budgets.profile_store import found_profile
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.integration.layer_probe import identity_by_kinds, layer_kinds
from mlx_h2o.storage.key_scaling import RowFormat
from research.real_model import formats_of, lost, report, side_by_side
from research.simulation import SINK, Setting, SimulatedCache, Trial

#: Tokens of a page on disk.
PAGE = 16
#: Bits of a digest's numbers, and bytes beside them: two scales and biases, the count.
DIGEST_BITS, DIGEST_EXTRA = 8, 10
#: Added to the worth of rows that came back a while ago; other worths are sums of standard scores.
PROTECTED = 1e6
#: Bytes of a slot beside its rows: score and position.
SLOT_EXTRA = 6


@dataclass(frozen=True)
class Paging:
    """How pages answer and come back.

    Attributes:
        digests: Most digests of a KV head; 0 for the one remainder.
        most: Pages that come back to a head in one step.
        share: The share of a KV head's mass above which a digest's page is wanted.
        stay: Steps for which rows that came back are not evicted.
    """

    digests: int = 0
    most: int = 0
    share: float = 0.003
    stay: int = 32


class PagedTrial(Trial):
    """A trial of one setting for each sequence, whose evicted rows lie in pages.

    Args:
        budgets: As in `Trial`, with R = 1.
        saturation: As in `Trial`; of the one remainder where there are no digests.
        rules: As in `Trial`.
        length: T, a multiple of `PAGE`.
        widths: D and Dv.
        paging: One for each sequence.
    """

    def __init__(
        self,
        budgets: mx.array,
        saturation: mx.array,
        rules: Sequence[Any],
        length: int,
        widths: tuple[int, int],
        paging: Sequence[Paging],
    ):
        super().__init__(budgets, saturation, rules, length, widths)
        B, H, _ = budgets.shape
        self.paging, self.length = list(paging), length
        self.has_digests = mx.array([p.digests > 0 for p in paging])[:, None, None]
        self.most = mx.array([p.most for p in paging])[:, None, None]
        self.threshold = mx.array([p.share for p in paging])[:, None, None]
        self.stay = mx.array([p.stay for p in paging])[:, None, None]
        self.wanted = mx.zeros((B, H, length // PAGE), mx.bool_)
        self.until = mx.zeros((B, H, length), mx.int32)
        self.returned = mx.zeros(())

    @property
    def state(self) -> list[mx.array]:
        return [*super().state, self.wanted, self.until, self.returned]

    def step(self, q: mx.array, keys: mx.array, values: mx.array, offset: int) -> mx.array:
        """As `Trial.step`, with digests; pages that the last step wanted come back first."""
        N = keys.shape[2]
        at = mx.arange(N)
        kept = self.kept[:, :, 0, :N] | (at == offset - 1)
        kept, until = self._with_wanted(kept, offset, N, keys, values)
        logits = mx.where(kept[:, :, None], q @ keys.swapaxes(-1, -2), -mx.inf)
        absent = (~kept & (at < offset)).astype(mx.float32)
        B, H, G, _ = q.shape
        columns, means, children = self._columns(q, keys, values, absent, offset)
        every = mx.concatenate([logits, columns], axis=-1)
        lse = mx.logsumexp(every, axis=-1, keepdims=True)
        p, of_digests = mx.exp(logits - lse), mx.exp(columns - lse)
        out = p @ values + of_digests @ means
        scores = self.scores[:, :, 0, :N] + p.sum(axis=2)
        self._want(of_digests, children, lse, N)
        kept = self._evicted(kept, until, scores, keys, values, offset)
        self.kept[:, :, 0, :N] = kept
        self.scores[:, :, 0, :N] = scores
        self.until[..., :N] = until
        return out[:, :, None]

    def _with_wanted(
        self, kept: mx.array, offset: int, N: int, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Rows held and their protection, after the wanted pages have taken the least worthy's."""
        come = mx.repeat(self.wanted[..., : N // PAGE], PAGE, axis=-1) & ~kept
        come = come & (mx.arange(N) < offset - 1)
        until = mx.where(come, offset + self.stay, self.until[..., :N])
        until = mx.where(
            mx.repeat(self.wanted[..., : N // PAGE], PAGE, axis=-1), offset + self.stay, until
        )
        self.returned = self.returned + come.sum()
        held = kept | come
        count = held.sum(axis=-1, keepdims=True) - self.budgets
        held = self._without_least(held, until, mx.maximum(count, 0), keys, values, offset)
        return held, until

    def _evicted(
        self,
        kept: mx.array,
        until: mx.array,
        scores: mx.array,
        keys: mx.array,
        values: mx.array,
        offset: int,
    ) -> mx.array:
        """Rows held when the next token has its slot."""
        self.scores[:, :, 0, : scores.shape[-1]] = scores
        count = kept.sum(axis=-1, keepdims=True) + 1 - self.budgets
        return self._without_least(kept, until, mx.maximum(count, 0), keys, values, offset)

    def _without_least(
        self,
        kept: mx.array,
        until: mx.array,
        count: mx.array,
        keys: mx.array,
        values: mx.array,
        offset: int,
    ) -> mx.array:
        """Rows held without the `count` that are worth least; each is folded into the remainder."""
        N = keys.shape[2]
        at = mx.arange(N)
        old = (at >= SINK) & (at < (offset - self.recent))
        evictable = kept & old
        worth = self._worth(
            self.scores[..., :N], kept[:, :, None], evictable[:, :, None], keys, values, offset
        )[:, :, 0]
        # Rows that came back go last, and go all the same where the budget asks for it.
        worth = worth + mx.where(until > offset, PROTECTED, 0)
        order = mx.argsort(mx.argsort(mx.where(evictable, worth, mx.inf), axis=-1), axis=-1)
        goes = (order < count) & evictable
        self._fold_all(keys, values, goes.astype(mx.float32))
        return kept & ~goes

    def _fold_all(self, keys: mx.array, values: mx.array, weight: mx.array) -> None:
        """Take all rows of weight 1 into the one remainder (Chan)."""
        n = weight.sum(axis=-1)[..., None]
        some = mx.maximum(n, 1)
        mean_key = (weight[..., None] * keys).sum(axis=2) / some
        mean_value = (weight[..., None] * values).sum(axis=2) / some
        spread = (weight[..., None] * mx.square(keys - mean_key[:, :, None])).sum(axis=2) / some
        self.count = self.count + n
        part = (n / mx.maximum(self.count, 1))[..., None]
        step = mean_key[:, :, None] - self.mean_key
        self.mean_key = self.mean_key + part * step
        self.var_key = (1 - part) * (self.var_key + part * mx.square(step)) + (
            part * spread[:, :, None]
        )
        self.mean_value = self.mean_value + part * (mean_value[:, :, None] - self.mean_value)

    def _columns(
        self, q: mx.array, keys: mx.array, values: mx.array, absent: mx.array, offset: int
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Logits of the digests `[B, H, G, C]`, their values, and logits of the children."""
        B, H, N, D = keys.shape
        pages = N // PAGE
        paged = absent.reshape(B, H, pages, PAGE)
        n = paged.sum(axis=-1)
        key_sums = (absent[..., None] * keys).reshape(B, H, pages, PAGE, D).sum(axis=3)
        value_sums = (absent[..., None] * values).reshape(B, H, pages, PAGE, -1).sum(axis=3)
        children = self._logits(q, n, key_sums)
        # Each sequence's pages to a digest, as a power of two.
        wide = [1]
        for paging in self.paging:
            width = 1
            while paging.digests and -(-offset // (PAGE * width)) > paging.digests:
                width *= 2
            wide.append(width)
        width = max(wide)  # sequences of one run have equally many digests, or none
        whole = -(-pages // width) * width
        pad = [(0, 0), (0, 0), (0, whole - pages)]
        n = mx.pad(n, pad).reshape(B, H, -1, width).sum(axis=-1)
        key_sums = mx.pad(key_sums, [*pad, (0, 0)]).reshape(B, H, -1, width, D).sum(axis=3)
        Dv = value_sums.shape[-1]
        value_sums = mx.pad(value_sums, [*pad, (0, 0)]).reshape(B, H, -1, width, Dv).sum(axis=3)
        some = mx.maximum(n, 1)[..., None]
        logits = self._logits(q, n, some * in_8_bits(key_sums / some))
        means = in_8_bits(value_sums / some)
        self._width = width
        # The one remainder where there are no digests: beside them it is silent.
        one = self._column(q)[:, :, 0][..., None]
        logits = mx.where(self.has_digests[..., None], logits, -mx.inf)
        one = mx.where(self.has_digests[..., None], -mx.inf, one)
        columns = mx.concatenate([logits, one], axis=-1)
        return columns, mx.concatenate([means, self.mean_value], axis=2), children

    @staticmethod
    def _logits(q: mx.array, n: mx.array, key_sums: mx.array) -> mx.array:
        """First-order logits `[B, H, G, pages]` of pages with n rows and these sums of keys."""
        mean = key_sums / mx.maximum(n, 1)[..., None]
        weight: mx.array = mx.log(n)[:, :, None] + q @ mean.swapaxes(-1, -2)
        return weight

    def _want(self, of_digests: mx.array, children: mx.array, lse: mx.array, N: int) -> None:
        """The pages that come back in the next step."""
        B, H, G, pages = children.shape
        masses = of_digests[..., :-1].max(axis=2)  # [B, H, C]
        above = mx.repeat(masses > self.threshold, self._width, axis=-1)[..., :pages]
        of_children = mx.exp(children - lse).max(axis=2)
        of_children = mx.where(above, of_children, 0)
        rank = mx.argsort(mx.argsort(-of_children, axis=-1), axis=-1)
        self.wanted[..., :pages] = (rank < self.most) & (of_children > 0)


def in_8_bits(rows: mx.array) -> mx.array:
    """Rows as 8 bits from their least to their greatest element store them."""
    low, high = rows.min(axis=-1, keepdims=True), rows.max(axis=-1, keepdims=True)
    step = mx.maximum((high - low) / 255, 1e-12)
    near: mx.array = mx.round((rows - low) / step) * step + low
    return near


class PagedCache(SimulatedCache):
    """One layer's cache for several settings of paging side by side.

    Args:
        settings: As in `SimulatedCache`.
        paging: One for each setting.
        layer: Its index.
        length: T, a multiple of `STRIDE`.
    """

    def __init__(
        self, settings: Sequence[Setting], paging: Sequence[Paging], layer: int, length: int
    ):
        super().__init__(settings, layer, length)
        self.paging = paging

    def _start(self, keys: mx.array, values: mx.array) -> None:
        super()._start(keys, values)
        trial = self.trial
        assert trial is not None
        n = keys.shape[0] // len(self.settings)
        rules = [setting.rule for setting in self.settings for _ in range(n)]
        paging = [of_one for of_one in self.paging for _ in range(n)]
        widths = keys.shape[-1], values.shape[-1]
        of_trial = trial.budgets, trial.saturation, rules, self.length, widths, paging
        self.trial = PagedTrial(*of_trial)


def slots_beside(slots: int, width: int, value_width: int, row: RowFormat, digests: int) -> int:
    """Slots that fit into the bytes of `slots` when there are digests, too."""
    slot = row.row_bytes(width, value_width) + SLOT_EXTRA
    digest = (width + value_width) * DIGEST_BITS // 8 + DIGEST_EXTRA
    remainder = 4 * (2 * width + value_width + 1)  # which digests replace
    return slots - max(-(-(digests * digest - remainder) // slot), 0) if digests else slots


def run(
    model: nn.Module,
    samples: mx.array,
    settings: Sequence[Setting],
    paging: Sequence[Paging],
    first: int,
    shown: int = 0,
) -> None:
    """Run all settings side by side, token by token, and print a line for each.

    Args:
        model: The model.
        samples: Token ids `[n, T]`.
        settings: The full cache, today's cache, and the settings to compare with it.
        paging: The paging of each setting.
        first: The first token that is scored.
        shown: How many of the settings were printed before.
    """
    layers = range(len(model.layers))
    caches = [PagedCache(settings, paging, i, samples.shape[1]) for i in layers]
    nll, far = side_by_side(model, samples, caches, len(settings), first)
    for setting, losses, d in list(zip(settings, nll, far, strict=True))[shown:]:
        report(setting.name, losses, nll[0], lost(losses, nll[1]), f"{statistics.fmean(d):.2f}")


def parser() -> argparse.ArgumentParser:
    """What understands the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("text", type=Path)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--samples", type=int, default=2)
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--parts", type=int, nargs="+", default=[8, 16])
    made.add_argument("--bits", type=int, default=6)
    made.add_argument("--digests", type=int, nargs="+", default=[8, 16])
    made.add_argument("--pages", type=int, nargs="+", default=[0, 2, 4])
    made.add_argument("--share", type=float, nargs="+", default=[0.003])
    made.add_argument("--stay", type=int, nargs="+", default=[32])
    return made


def main() -> None:
    """Parse and run; tables are Markdown."""
    args = parser().parse_args()
    mlx_h2o.install(max_size=1 << 20)
    model, tokenizer = mlx_h2o.load(args.model)
    text = tokenizer.encode(args.text.read_text())
    samples = samples_of(text, args.samples, args.tokens, None)
    kinds = layer_kinds(model)
    profile = found_profile(model, identity_by_kinds(model, kinds))
    if profile is None:
        sys.exit("The model has no profile: make one first (mlx_h2o calibrate).")
    width, value_width = kinds[0].widths.key, kinds[0].widths.value
    formats = formats_of(model, tokenizer, args.tokens, args.bits)
    plain = RowFormat().row_bytes(width, value_width)
    slot = formats[0].row_bytes(width, value_width) + SLOT_EXTRA
    print("| what | perplexity | loss | beside today's | divergence |\n|---|---:|---:|---:|---:|")
    for part in args.parts:
        slots = args.tokens // part * plain // slot
        today = profile.budgets(slots)
        settings = [
            Setting("full cache"),
            Setting(
                f"1/{part}, {slots} slots, one remainder",
                today,
                profile.saturation(today),
                formats=formats,
            ),
        ]
        paging = [Paging(), Paging()]
        # Settings of one run have equally many digests.
        for digests in args.digests:
            fewer = slots_beside(slots, width, value_width, formats[0], digests)
            budgets = profile.budgets(fewer)
            for most in args.pages:
                for share in args.share if most else args.share[:1]:
                    for stay in args.stay if most else args.stay[:1]:
                        name = f"1/{part}, {fewer} slots, {digests} digests"
                        name += f", {most} pages above {share:.1%} stay {stay}" if most else ""
                        settings.append(Setting(name, budgets, 0.0, formats=formats))
                        paging.append(Paging(digests, most, share, stay))
        for i in range(2, len(settings)):
            run(
                model,
                samples,
                [*settings[:2], settings[i]],
                [*paging[:2], paging[i]],
                args.tokens // 4,
                0 if i == 2 else 2,
            )


if __name__ == "__main__":
    main()
