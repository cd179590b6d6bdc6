"""Do several remainders of a head lose less than one, in the same bytes?

    python -m research.digests TEXT [--model builtin:recall-4m] [--parts 8 16] [--chosen]

A head's evicted tokens answer through several digests (count, mean key, mean value, and with the
second order the keys' variances) instead of one. A victim joins the digest of its part of the
positions ("by age"), or that with the nearest mean key ("nearest"), which begins empty and is begun
by a victim that is farther from all others than evicted keys are from their mean. Every further
digest has its means in 8 bits, and its variances if it has any; slots are reduced by these bytes.

"Packed" digests share one variance, and the means of all but the first are stored as rows are: with
the key scaling of the model's profile, in `--means` bits, rounded at every join, so that steps
below half a level are lost. The first takes the place of the remainder's own means. The mean key of
all evicted tokens, which the policy needs, would follow from all digests; here it is exact. The
others ("own", "shared", "none") are not rounded.

With `--chosen` every head has the number of digests that has the least error of the head's output
over the bundled calibration text, each in the bytes of the head's slots by its profile. All
candidates read the full cache's queries, keys and values side by side, as a calibration's trials.
With `--priced` all heads' digests take their bytes from all heads' slots: a head has as many as
save more loss than their slots would.

Sources: pages of neighbouring tokens with mean keys, as in ArkVale
(https://openreview.net/forum?id=4oAt5L4lYe) and InfLLM (https://arxiv.org/abs/2402.04617).
Simulated token by token (`research.simulation`); rows are in 16-bit numbers, with the slots that
5-bit rows would have.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.allocation import Curve, loss_at
from mlx_h2o.budgets.profile import SMALLEST_BUDGET, Profile
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.integration.recorder import (
    HeadWeights,
    LookingCache,
    Watcher,
    full_attention,
    looked_through,
)
from mlx_h2o.storage.key_scaling import RowFormat
from research.mending import profile_of
from research.merging import BESIDE, BITS
from research.real_model import (
    PLAIN_BITS,
    calibration_passes,
    loaded,
    lost,
    shipped_frames,
    side_by_side,
    standard_error,
)
from research.simulation import SALIENT_PACKED, SILENT, STRIDE, Setting, SimulatedCache, Trial

#: Bytes of a digest's count, and of a scale and an offset for each mean in 8 bits.
COUNT, SCALES = 4, 2 * 4
AGE, NEAREST = "by age", "nearest"
OWN, SHARED, NONE, PACKED = "own", "shared", "none", "packed"
#: Numbers of digests of which each head's is chosen.
CANDIDATES = (1, 2, 4, 8, 16, 32)

#: Digests of each layer's KV heads, `[layers][H]`.
Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Digests:
    """How a head's evicted tokens answer.

    Attributes:
        count: Digests of a head, unless numbers are chosen.
        joins: `AGE` or `NEAREST`.
        spread: Which variances the second order has: each digest's own, one mean of all digests'
            (shared; packed: with means stored as rows are), or none, which is the first order.
        bits: Bits of packed means.
        chosen: Each head's number, `[layers][H]`, or None for `count` in all.
        rule: How numbers are chosen, in words.
    """

    count: int = 1
    joins: str = NEAREST
    spread: str = OWN
    bits: int = 8
    chosen: Counts | None = None
    rule: str = ""

    def __str__(self) -> str:
        if self.chosen is not None:
            return f"chosen {self.rule}, {self.joins}, variances: {self.spread}"
        if self.count == 1:
            return "one remainder"
        return f"{self.count} digests, {self.joins}, variances: {self.spread}"

    def counts(self, layer: int, heads: int) -> list[int]:
        """Digests of a layer's KV heads."""
        return [self.count] * heads if self.chosen is None else list(self.chosen[layer])

    def extra_bytes(self, width: int) -> int:
        """Bytes of a head's further digests, if rows have so many channels."""
        if self.spread == PACKED:
            return (self.count - 1) * (
                RowFormat(self.bits, self.bits).row_bytes(width, width) + COUNT
            )
        return (self.count - 1) * ((3 if self.spread == OWN else 2) * width + COUNT + SCALES)


class DigestTrial(Trial):
    """A trial with several digests. Attributes as in `Trial`, whose remainder ranks victims."""

    def digesting(self, of: Sequence[Digests], counts: mx.array, form: RowFormat) -> None:
        """Begin.

        Args:
            of: How tokens join and variances are shared, of each sequence, or one for all.
            counts: Digests of each head, `[B, H, R]`.
            form: How packed means are stored.
        """
        B, H, R, D = self.mean_key.shape
        M, Dv = cast(int, counts.max().item()), self.mean_value.shape[-1]
        self.counts = mx.zeros((B, H, R, M))
        self.keys_of, self.spread = (mx.zeros((B, H, R, M, D)) for _ in range(2))
        self.values_of = mx.zeros((B, H, R, M, Dv))
        self.used, self.form = counts, form
        self.aged = mx.array([one.joins == AGE for one in of])[:, None, None]
        self.packed = mx.array([one.spread == PACKED for one in of])[:, None, None]
        self.shared, self.second = (
            mx.array([one.spread in which for one in of])[:, None, None, None, None]
            for which in ((SHARED, PACKED), (OWN, SHARED, PACKED))
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
        B, H, R, G, _ = p.shape
        out = (p.reshape(B, H, R * G, N) @ values).reshape(B, H, R, G, -1)
        out = out + mx.exp(r - lse) @ self.values_of
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
        T = self.kept.shape[-1]
        key = mx.take_along_axis(keys, victim[..., None], axis=2)
        value = mx.take_along_axis(values, victim[..., None], axis=2)
        apart = mx.square(key[..., None, :] - self.keys_of).sum(axis=-1)  # [B, H, R, M]
        apart = mx.where(self.counts > 0, apart, mx.inf)
        opened = (self.counts > 0).sum(axis=-1)
        far = apart.min(axis=-1) > self.var_key.sum(axis=-1)
        begins = far & (opened < self.used)
        nearest = mx.where(begins, opened, mx.argmin(apart, axis=-1))
        joined = mx.where(self.aged, victim * self.used // T, nearest)
        joined = joined.astype(mx.int32)[..., None]  # [B, H, R, 1]
        count = mx.take_along_axis(self.counts, joined, axis=-1) + goes[..., None]
        part = goes[..., None] / mx.maximum(count, 1)
        old_key, old_spread, old_value = (
            mx.take_along_axis(of, joined[..., None], axis=3).squeeze(3)
            for of in (self.keys_of, self.spread, self.values_of)
        )
        step = key - old_key
        new_key, new_value = old_key + part * step, old_value + part * (value - old_value)
        rounds = goes[..., None] & self.packed[..., None] & (joined > 0)
        new_key = mx.where(rounds, self.form.keys(new_key), new_key)
        new_value = mx.where(rounds, self.form.values(new_value), new_value)
        spread = old_spread + part * ((1 - part) * mx.square(step) - old_spread)
        self.counts = mx.put_along_axis(self.counts, joined, count, axis=-1)
        self.keys_of, self.spread, self.values_of = (
            mx.put_along_axis(of, joined[..., None], new[..., None, :], axis=3)
            for of, new in (
                (self.keys_of, new_key),
                (self.spread, spread),
                (self.values_of, new_value),
            )
        )


class DigestCache(SimulatedCache):
    """A simulated cache with digests for each setting, and the format of packed means."""

    kind = DigestTrial

    def __init__(
        self,
        settings: Sequence[Setting],
        digests: Sequence[Digests],
        form: RowFormat,
        layer: int,
        T: int,
    ):
        super().__init__(settings, layer, T)
        self.digests, self.form = digests, form

    def _start(self, keys: mx.array, values: mx.array) -> None:
        super()._start(keys, values)
        assert isinstance(self.trial, DigestTrial)
        H, n = keys.shape[1], keys.shape[0] // len(self.settings)
        each = [one for one in self.digests for _ in range(n)]
        counts = mx.array([one.counts(self.layer, H) for one in each])[..., None]
        self.trial.digesting(each, counts, self.form)


class Choosing(LookingCache):
    """A looking cache that tries numbers of digests for its layer's heads as the text passes.

    Args:
        budgets: Slots of each head and candidate, `[H, R]`.
        saturation: t of each head and candidate, `[H, R]`.
        of: The digests; `CANDIDATES`, R, are their numbers.
        form: How packed means are stored.
        watcher: Sees the blocks.
        found: Gets the layer's errors, `[H, R]`.
    """

    def __init__(
        self,
        budgets: np.ndarray,
        saturation: np.ndarray,
        of: Digests,
        form: RowFormat,
        watcher: Watcher,
        found: list[np.ndarray],
    ):
        self.budgets = mx.array(budgets, mx.int32)
        self.saturation = mx.array(saturation, mx.float32)
        self.of, self.form, self.watcher, self.found = of, form, watcher, found

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        out = full_attention(call.q, keys, values, call.scale, call.sinks)
        B, H, T, D = keys.shape
        weights = HeadWeights.of(self.watcher, out, H)
        R = len(CANDIDATES)
        budgets, saturation, counts = (
            mx.broadcast_to(of, (B, H, R))
            for of in (self.budgets, self.saturation, mx.array(CANDIDATES))
        )
        trial = DigestTrial(budgets, saturation, [SALIENT_PACKED], T, (D, values.shape[-1]))
        trial.digesting([self.of], counts, self.form)
        q = (call.q * call.scale).reshape(B, H, -1, T, D)
        total = mx.zeros((H, R))
        for t in range(T):
            N = min(-(-(t + 1) // STRIDE) * STRIDE, T)
            got = trial.step(q[:, :, :, t], keys[:, :, :N], values[:, :, :N], t + 1)
            got = got.swapaxes(1, 2).reshape(B, R, -1, 1, values.shape[-1])
            # As many tokens are left out as `side_by_side` leaves out.
            if t >= T // 4:
                total = total + weights.errors(got - out[:, None, :, t : t + 1], t)[..., 0]
            mx.eval(total, trial.state)
        self.found.append(np.array(total) / (T - T // 4))
        print(f"chosen in {len(self.found)} layers", file=sys.stderr)
        return out


@dataclass(frozen=True)
class Choice:
    """Chooses each head's number of digests by the errors of its output over a text.

    Attributes:
        model: A model.
        profile: The model's profile, by which slots are shared out.
        passes: Token ids of the text, `[n, T]`.
        forms: How each layer's packed means are stored.
    """

    model: nn.Module
    profile: Profile
    passes: mx.array
    forms: Sequence[RowFormat]

    def in_own_bytes(self, of: Digests, mean: int) -> tuple[Digests, Setting]:
        """The number with the least error in the head's own bytes.

        Args:
            of: The digests; their number is chosen.
            mean: Slots of a head, on average, of which digests take theirs.
        """
        budgets = self.profile.budgets(mean)
        left = [np.array(layer)[:, None] - self._taken(of) for layer in budgets]
        errors = self._errors(of, [np.maximum(slots, SMALLEST_BUDGET) for slots in left], budgets)
        best = [
            np.where(slots >= SMALLEST_BUDGET, error, np.inf).argmin(axis=1)
            for error, slots in zip(errors, left, strict=True)
        ]
        slots = [
            np.take_along_axis(s, b[:, None], 1)[:, 0] for s, b in zip(left, best, strict=True)
        ]
        return self._setting(replace(of, rule="in each head's bytes"), best, slots, budgets)

    def by_price(self, of: Digests, mean: int) -> tuple[Digests, Setting]:
        """The number that saves more than its slots would in the heads that lack slots most.

        A head's errors, all with the same slots, are in proportion to its loss by the profile. A
        slot's price is the loss that the last eighth of all slots saves.

        Args:
            of: The digests; their number is chosen.
            mean: Slots of a head, on average, of which all heads' digests take theirs.
        """
        budgets, taken = self.profile.budgets(mean), self._taken(of)
        errors = self._errors(
            of, [np.outer(layer, np.ones_like(taken)) for layer in budgets], budgets
        )
        T, heads = self.passes.shape[1], sum(map(len, budgets))
        fewer = self.profile.budgets(mean - mean // 8)
        bought = self.profile.wanted_upto(T)
        price = (_loss(bought, fewer).sum() - _loss(bought, budgets).sum()) / (mean // 8 * heads)
        losses = iter(_loss(self.profile.curves_upto(T), budgets))
        best = []
        for error in errors:
            parts = error / np.maximum(error[:, :1], np.finfo(np.float32).tiny)
            loss = np.array([next(losses) for _ in error])[:, None]
            best.append((loss * parts + price * taken).argmin(axis=1))
        spent = sum(int(taken[numbers].sum()) for numbers in best)
        left = self.profile.budgets(mean - -(-spent // heads))
        return self._setting(replace(of, rule="by a slot's price"), best, left, left)

    def _taken(self, of: Digests) -> np.ndarray:
        """Slots that each candidate takes."""
        width = self.model.args.head_dim
        tried = [replace(of, count=count) for count in CANDIDATES]
        return np.array([-(-one.extra_bytes(width) // row_bytes(width)) for one in tried])

    def _errors(
        self, of: Digests, slots: Sequence[np.ndarray], budgets: Counts
    ) -> list[np.ndarray]:
        """Each layer's errors `[H, R]` with so many slots, by the order that budgets have."""
        watcher, found = Watcher(), list[np.ndarray]()
        orders = self.profile.saturation(budgets)

        def looking(i: int) -> Choosing:
            t = np.outer(orders[i], np.ones(len(CANDIDATES)))
            return Choosing(slots[i], t, of, self.forms[i], watcher, found)

        mx.eval(looked_through(self.model, self.passes, watcher, looking))
        return found

    def _setting(
        self, of: Digests, best: Sequence[np.ndarray], slots: Sequence[Any], budgets: Counts
    ) -> tuple[Digests, Setting]:
        """The digests with their chosen numbers, and a setting with them."""
        made = replace(of, chosen=[[CANDIDATES[i] for i in layer] for layer in best])
        orders = self.profile.saturation(budgets)
        return made, Setting(str(made), [list(map(int, s)) for s in slots], orders, SALIENT_PACKED)


def _loss(curves: tuple[Sequence[int], Sequence[Curve]], slots: Counts) -> np.ndarray:
    """Each head's loss with its slots `[layers][H]`, one head after the other."""
    grid, heads = curves
    flat = [b for layer in slots for b in layer]
    return np.array([loss_at(grid, curve, b) for curve, b in zip(heads, flat, strict=True)])


def row_bytes(width: int) -> int:
    """Bytes of a slot whose row has so many channels."""
    return RowFormat(BITS, BITS).row_bytes(width, width) + BESIDE


def main() -> None:
    """Parse and run; tables are Markdown."""
    args = parser().parse_args()
    model, tokenizer = loaded(args.model)
    T, profile, width = args.tokens, profile_of(model), model.args.head_dim
    samples = samples_of(tokenizer.encode(args.text.read_text()), args.samples, T, None)
    passes = calibration_passes(tokenizer, args.passes, T)
    forms = [RowFormat(args.means, args.means, frame=frame) for frame in shipped_frames(model, T)]
    choice = Choice(model, profile, passes, forms)
    rules = [choice.in_own_bytes] * args.chosen + [choice.by_price] * args.priced
    kinds = [Digests(1, how, spread, args.means) for how in args.joins for spread in args.spread]
    fixed = [replace(kind, count=count) for kind in kinds for count in args.counts]
    for part in args.parts:
        given = T // part * 2 * width * PLAIN_BITS // 8
        tried = [(Digests(), Setting("full cache"))]
        for one in [Digests(), *fixed]:
            budgets = profile.budgets((given - one.extra_bytes(width)) // row_bytes(width))
            orders = profile.saturation(budgets)
            tried.append((one, Setting(str(one), budgets, orders, SALIENT_PACKED)))
        tried += [rule(kind, given // row_bytes(width)) for rule in rules for kind in kinds]
        digests, settings = zip(*tried, strict=True)
        caches = [DigestCache(settings, digests, form, i, T) for i, form in enumerate(forms)]
        nll, far = side_by_side(model, samples, caches, len(settings), T // 4)
        print(f"\n| {args.model}, 1/{part} | slots | loss | divergence, 0.001 nats |")
        print("|---|---:|---:|---:|")
        for of, losses, d in zip(settings, nll, far, strict=True):
            apart = f"{statistics.fmean(d):.2f} ± {standard_error(d):.2f}"
            mean = round(float(np.mean(of.budgets))) if of.budgets else T
            print(f"| {of.name} | {mean} | {lost(losses, nll[0])} | {apart} |", flush=True)
        for one in digests:
            numbers_of(one)


def numbers_of(digests: Digests) -> None:
    """Print how many heads have which number of digests, if they were chosen."""
    if digests.chosen is None:
        return
    heads = Counter(count for layer in digests.chosen for count in layer)
    print(f"\n| {digests} | {' | '.join(map(str, sorted(heads)))} |")
    print(f"|---|{'---:|' * len(heads)}")
    print(f"| heads | {' | '.join(str(heads[count]) for count in sorted(heads))} |", flush=True)
    for i, layer in enumerate(digests.chosen):
        print(f"layer {i}: {layer}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("text", type=Path)
    made.add_argument("--model", default="builtin:recall-4m")
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--samples", type=int, default=4)
    made.add_argument("--parts", type=int, nargs="+", default=[8, 16], help="of the bytes")
    made.add_argument("--counts", type=int, nargs="*", default=[2, 4, 8], help="digests of a head")
    made.add_argument("--joins", nargs="+", default=[NEAREST], choices=[AGE, NEAREST])
    made.add_argument("--spread", nargs="+", default=[OWN], choices=[OWN, SHARED, NONE, PACKED])
    made.add_argument("--chosen", action="store_true", help="numbers of digests for each head, too")
    made.add_argument("--priced", action="store_true", help="numbers by the price of a slot, too")
    made.add_argument("--passes", type=int, default=2, help="of the text by which they are chosen")
    made.add_argument(
        "--means", type=int, default=8, choices=[5, 6, 8], help="bits of packed means"
    )
    return made


if __name__ == "__main__":
    main()
