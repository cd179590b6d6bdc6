"""KV rows coded by what their errors cost (`research.row_coding`), beside packed rows.

    python -m research.coding fit TEXT... --fits FITS     fits of all variants, one file each
    python -m research.coding rows TEXT --fits FITS       coding alone: every token is kept
    python -m research.coding evict TEXT --fits FITS      equal bytes, with eviction
    python -m research.coding facts TEXT --fits FITS      facts planted, at equal bytes

Rows are coded as they enter a cache and held as numbers: quality only, nothing is saved. With
eviction they lie in the product's own cache (its policy, shares, growth and remainder), whose slots
are as many as the coded bytes buy. New rows enter a wide tier; its least worthy are coded again
narrowly. Everything beside a row counts as the product counts it; the tables, which are the
model's, are printed beside. Divergence is KL from the full cache, in thousandths of a nat.
"""

from __future__ import annotations

import argparse
import math
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as stock_cache

from mlx_h2o.budgets.cost import PLAIN_ELEMENT
from mlx_h2o.budgets.plan import LayerKind, plain_bytes
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.calibration.row_format import RowFormat
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits, caches_in_16_bits
from mlx_h2o.evaluate.facts import FORMS, recall_task
from mlx_h2o.evaluate.measures.perplexity import samples_of
from mlx_h2o.evaluate.side_by_side import side_by_side
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.hosts.rope_probe import ropes_in_keys
from mlx_h2o.layer.policy_view import slots_of
from mlx_h2o.models.make import bounded_caches
from mlx_h2o.slots.packed import Packing
from research.real_model import RowsAsStored, lost, shipped_frames, standard_error
from research.returning import CHUNK, load_in_float32, recall
from research.row_coding import SINK, VARIANTS, LayerCoding, LayerFit, codings, rows_with_slopes

#: Bits of the first tokens' rows, packed as the product packs them.
SINK_BITS = 8
#: The part of a head's slots that holds wide rows.
WIDE_PART = 0.3
#: Wide rows that are coded again at once; the wide tier has room for them.
AT_ONCE = 4


class Entrance:
    """What a layer's new rows become: the first tokens packed, all others coded."""

    def __init__(self, coding: LayerCoding, sinks: RowFormat):
        self.coding, self.sinks = coding, sinks

    def enter(self, keys: mx.array, values: mx.array, first: int) -> tuple[mx.array, mx.array]:
        """Rows `[B, H, L, D]` of positions from `first` on, as attention gets them."""
        at = mx.broadcast_to(mx.arange(first, first + keys.shape[2]), keys.shape[:3])
        rows = self.coding.round_trip(keys, values, at)
        if first >= SINK:
            return rows
        packed = self.sinks.keys(keys), self.sinks.values(values)
        is_sink = (at < SINK)[..., None]
        return tuple(mx.where(is_sink, p, r) for p, r in zip(packed, rows, strict=True))


class CodedRows(KVCache):
    """A cache of all rows, coded in the first tier."""

    def __init__(self, entrance: Entrance):
        super().__init__()
        self.entrance = entrance

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(*self.entrance.enter(keys, values, self.offset))


class TieredCache(H2OKVCache):
    """The product's cache of one layer, whose rows are coded, wide at first and narrow later.

    The policy's victim is the least worthy of all rows, as ever. Where more rows than the wide tier
    has room for are wide, the least worthy of them, beyond its newest quarter, are coded again from
    their decoded numbers.
    """

    entrance: Entrance
    wide_part: float
    narrow: mx.array  # by position, [B, H, T]
    room: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return super().update_and_fetch(*self.entrance.enter(keys, values, self.offset))

    def attend(self, q: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        out = super().attend(q, keys, values, **options)
        L = q.shape[2]
        if not self.offset - L:
            self.narrow = mx.zeros((*keys.shape[:2], self.room), mx.bool_)
        if len(self.entrance.coding.tiers) > 1 and (L > 1 or self.offset % AT_ONCE == 0):
            self.recode(L)
        return mx.depends(out, [self.narrow, *self.layer.side_state()])

    def wide_slots(self, budget: int) -> int:
        """Slots for wide rows in a head of so many slots."""
        return max(round(self.wide_part * (budget - SINK)), AT_ONCE + 1)

    def recode(self, L: int) -> None:
        """Code the least worthy wide rows again, after L new tokens."""
        layer, policy = self.layer, self.policy
        store = layer.store
        flat, places, chosen = [], [], []
        most = min(L + AT_ONCE, max(run.length for run in layer.runs))
        for run in layer.runs:
            slots = slots_of(layer, run, store.views(run), layer.lost(run))
            at, room = slots.positions, self.wide_slots(run.budget)
            wide = ~mx.take_along_axis(self.narrow[:, run.first : run.last], at, axis=2)
            wide = wide & (at >= SINK)
            excess = wide.sum(axis=-1, keepdims=True) - (room - AT_ONCE + 1)
            may_go = wide & (at < self.offset - policy.recent_slots(room))
            worth = mx.where(may_go, policy.priority(slots), mx.inf)
            # A shorter run's last row stands for those that it lacks, and gets the same row again.
            rank = mx.minimum(mx.arange(most), at.shape[2] - 1)
            order = mx.argsort(worth, axis=-1)[..., rank]
            goes = (rank < excess) & mx.take_along_axis(may_go, order, axis=-1)
            flat.append(store.flat_index(run, order.astype(mx.int32)))
            places.append(mx.take_along_axis(at, order, axis=-1))
            chosen.append(goes)
        index, at, goes = (mx.concatenate(of, axis=1) for of in (flat, places, chosen))
        shape = (*index.shape, -1)
        rows = [store.take(index.flatten(1), n).reshape(shape) for n in ("keys", "values")]
        again = self.entrance.coding.round_trip(rows[0], rows[1], at, 1)
        new = [mx.where(goes[..., None], b, a) for a, b in zip(rows, again, strict=True)]
        pairs = zip(("keys", "values"), new, strict=True)
        store.put(index.flatten(1), {name: row.flatten(1, 2) for name, row in pairs})
        marks = goes | mx.take_along_axis(self.narrow, at, axis=2)
        self.narrow = mx.put_along_axis(self.narrow, at, marks, axis=2)


# -- bytes -----------------------------------------------------------------------------------------


class Bytes:
    """Bytes of a model's coded rows, counted as the product counts.

    Args:
        kinds: The model's layers.
        made: Each layer's coding.
        beside: Bytes beside a row in its slot; None: the product's (position, score, length).
    """

    def __init__(
        self, kinds: Sequence[LayerKind], made: Sequence[LayerCoding], beside: int | None = None
    ):
        self.kinds, self.made, self.beside = kinds, made, beside

    def of(self, caches: Sequence[H2OKVCache], wide_part: float) -> int:
        """Bytes of all layers at the largest of their stages."""
        totals: list[int] = []
        for cache, kind, coding in zip(caches, self.kinds, self.made, strict=True):
            settings, widths = cache.settings, replace(kind.widths, framed=True).narrow
            cost = widths.cost(settings.policy, settings.remembers)
            beside = cost.slot - widths.row_bytes if self.beside is None else self.beside
            sink = replace(widths, packing=Packing(SINK_BITS, SINK_BITS)).row_bytes
            stages = [settings.budgets, *(stage.budgets for stage in settings.filling)]
            for i, budgets in enumerate(stages):
                slots = np.array(budgets) - SINK
                wide = np.maximum(np.round(wide_part * slots), AT_ONCE + 1)
                tiers = coding.tiers
                rows = wide * tiers[0].row_bytes + (slots - wide) * tiers[-1].row_bytes
                fixed = cost.fixed + SINK * sink
                size = int((rows + (slots + SINK) * beside + fixed).sum())
                totals[i : i + 1] = [size + (totals[i] if i < len(totals) else 0)]
        return max(totals)


def tiered_caches(
    model: nn.Module,
    kinds: Sequence[LayerKind],
    made: Sequence[LayerCoding],
    sinks: Sequence[RowFormat],
    args: argparse.Namespace,
    size: int,
) -> list[TieredCache]:
    """Caches of coded rows with as many slots as `size` bytes buy, in the profile's shares."""
    count, T = Bytes(kinds, made, args.beside), args.tokens

    def of_slots(mean: int) -> list[Any]:
        settings = ModelSettings.of(mean, context=T, policy="salient")
        return bounded_caches(model, settings, kinds)

    few, many = 16, T + 16
    while many - few > 1:
        middle = (few + many) // 2
        try:
            fits = count.of(of_slots(middle), args.wide) <= size
        except ValueError:  # too few slots for the policy
            fits = True
        few, many = (middle, many) if fits else (few, middle)
    caches = []
    for cache, coding, sink in zip(of_slots(few), made, sinks, strict=True):
        one = TieredCache.of(cache.settings, cache.share)
        one.entrance, one.wide_part, one.room = Entrance(coding, sink), args.wide, T + 64
        caches.append(one)
    caches[0].label = f"{count.of(caches, args.wide):,}"
    return caches


# -- measures --------------------------------------------------------------------------------------


def log_probabilities(model: nn.Module, tokens: mx.array, cache: list[Any]) -> mx.array:
    """Of all next tokens of one sample `[1, T]`: `[T - 1, V]`."""
    logits = model(tokens[:, :-1], cache=cache)[0].astype(mx.float32)
    logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logs)
    return logs


def divergence(full: mx.array, logs: mx.array) -> mx.array:
    """KL of next-token distributions from the full cache's, `[...]` in thousandths of a nat."""
    return 1000 * (mx.exp(full) * (full - logs)).sum(axis=-1)


def whole(model: nn.Module, samples: mx.array, make: dict[str, Callable[[], list[Any]]]) -> None:
    """Read each sample at once through each cache of all tokens, and print a table."""
    nll: dict[str, list[float]] = {name: [] for name in ("full cache", *make)}
    far: dict[str, list[float]] = {name: [] for name in nll}
    for i in range(samples.shape[0]):
        tokens = samples[i : i + 1]
        full = log_probabilities(model, tokens, stock_cache(model))
        for name in nll:
            logs = full if name == "full cache" else log_probabilities(model, tokens, make[name]())
            right = mx.take_along_axis(logs, tokens[0, 1:, None], axis=-1)
            nll[name].append(-right.mean().item())
            far[name].append(divergence(full, logs).mean().item())
            print(f"{i}: {name}: {far[name][-1]:.2f}", file=sys.stderr, flush=True)
    print("| rows | perplexity | loss | divergence |\n|---|---:|---:|---:|")
    for name in nll:
        line(name, nll[name], nll["full cache"], far[name])


def line(name: str, nll: list[float], full: list[float], far: list[float], *more: str) -> None:
    """Print a row of a table."""
    cells = [name, f"{math.exp(statistics.fmean(nll)):.3f}", lost(nll, full)]
    cells += [f"{statistics.fmean(far):.2f} ± {standard_error(far):.2f}", *more]
    print(f"| {' | '.join(cells)} |", flush=True)


def stepwise(
    model: nn.Module,
    samples: mx.array,
    caches: list[list[Any]],
    full: list[mx.array],
    first: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Nats per token and divergence `[A, n]` of A lists of caches, read token by token."""
    n, T = samples.shape
    joined, tokens = side_by_side(caches), mx.tile(samples, (len(caches), 1))
    model(tokens[:, :CHUNK], cache=joined)
    mx.eval([entry.state for entry in joined])
    total, apart = mx.zeros(n * len(caches)), mx.zeros(n * len(caches))
    began = time.time()
    for i in range(CHUNK, T - 1):
        logits = model(tokens[:, i : i + 1], cache=joined)[:, -1].astype(mx.float32)
        if i >= first:
            logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            right = mx.take_along_axis(logs, tokens[:, i + 1, None], axis=-1)[:, 0]
            exact = mx.stack([of[i] for of in full])
            total = total - right
            apart = apart + divergence(mx.tile(exact, (len(caches), 1)), logs)
        mx.eval(logits, total, apart)
        if i % 64 == 0:
            print(f"token {i} of {T}, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    shape = (len(caches), n)
    return tuple(np.array(x / (T - 1 - first)).reshape(shape) for x in (total, apart))


# -- the command line ------------------------------------------------------------------------------


def fit(model: nn.Module, tokenizer: Any, args: argparse.Namespace) -> None:
    """Fit all variants and write them."""
    kinds, each = layer_kinds(model), max(args.samples // len(args.texts), 1)
    texts = [tokenizer.encode(path.read_text()) for path in args.texts]
    passes = [samples_of(t, each, min(args.tokens, len(t)), None) for t in texts]
    windows = [one[i : i + 1] for one in passes for i in range(each)]
    heads, width = [kind.heads for kind in kinds], kinds[0].widths.key
    rows = rows_with_slopes(model, windows, heads, width)
    ropes = ropes_in_keys(args.model, model, len(kinds))
    args.fits.mkdir(parents=True, exist_ok=True)
    for variant in args.variants:
        fits = [LayerFit.of(r, rope, variant) for r, rope in zip(rows, ropes, strict=True)]
        (args.fits / f"{variant}.pickle").write_bytes(pickle.dumps(fits))
        print(f"{variant}: {args.fits / variant}.pickle", flush=True)


def codings_of(args: argparse.Namespace, variant: str, rates: Sequence[float]) -> list[LayerCoding]:
    """Each layer's coding by the fits that `fit` wrote; tables are kept beside them."""
    kept = args.fits / f"{variant}.pickle"
    fits: list[LayerFit] = pickle.loads(kept.read_bytes())
    tiers = []
    for rate in rates:
        path = args.fits / f"{variant}-{rate:g}-{args.block}{'-even' * args.even}.tables"
        if not path.exists():
            made = codings(fits, [rate], args.block, args.even)
            path.write_bytes(pickle.dumps([one.tiers[0] for one in made]))
            kept.write_bytes(pickle.dumps(fits))  # with their costs
        tiers.append(pickle.loads(path.read_bytes()))
    return [LayerCoding(fit, of) for fit, of in zip(fits, zip(*tiers, strict=True), strict=True)]


def read_samples(tokenizer: Any, args: argparse.Namespace) -> mx.array:
    """Samples `[n, T]`, evenly spaced over all texts."""
    each = max(args.samples // len(args.texts), 1)
    texts = [tokenizer.encode(path.read_text()) for path in args.texts]
    return mx.concatenate([samples_of(t, each, min(args.tokens, len(t)), None) for t in texts])


def sink_formats(model: nn.Module, tokens: int) -> list[RowFormat]:
    """How each layer's first tokens are packed."""
    frames = shipped_frames(model, tokens)
    return [RowFormat(SINK_BITS, SINK_BITS, frame=frame) for frame in frames]


def rows(model: nn.Module, tokenizer: Any, args: argparse.Namespace) -> None:
    """Coding alone."""
    samples = read_samples(tokenizer, args)
    sinks = sink_formats(model, args.tokens)
    make: dict[str, Callable[[], list[Any]]] = {}
    for bits in args.bits:
        of = [RowFormat(bits, bits, frame=sink.frame) for sink in sinks]
        make[f"affine, {bits} bits"] = lambda of=of: [RowsAsStored(f) for f in of]
    for variant in args.variants:
        for rate in args.rates:
            made = codings_of(args, variant, [rate])
            size = np.mean([tier.row_bytes.mean() for c in made for tier in c.tiers])
            name = f"{variant}, {size * 8 / made[0].fit.mean.shape[2] / 2:.2f} bits a number"
            pairs = [Entrance(c, sink) for c, sink in zip(made, sinks, strict=True)]
            make[name] = lambda pairs=pairs: [CodedRows(one) for one in pairs]
    whole(model, samples, make)


def arms(
    model: nn.Module, args: argparse.Namespace, part: int
) -> dict[str, Callable[[], list[Any]]]:
    """The product's cache, and coded ones of the same bytes."""
    kinds = [
        replace(kind, widths=replace(kind.widths, key_size=PLAIN_ELEMENT, value_size=PLAIN_ELEMENT))
        for kind in layer_kinds(model)
    ]
    size = args.tokens // part * sum(map(plain_bytes, kinds))
    sinks, out = sink_formats(model, args.tokens), {}
    if not args.only_coded:
        settings = ModelSettings.of(max_bytes="100%")
        out["mlx-h2o"] = partial(
            caches_in_16_bits, model, settings, args.tokens // part, args.tokens
        )
    for variant in args.variants:
        made = codings_of(args, variant, args.tiers)
        name = f"{variant} ({', '.join(f'{t:g}' for t in args.tiers)})"
        out[name] = partial(tiered_caches, model, kinds, made, sinks, args, size)
    return out


def mean_slots(cache: Sequence[Any]) -> float:
    """Slots of a head in a long conversation, on average."""
    ends = [entry.settings for entry in cache]
    return statistics.fmean(
        n for of in ends for n in (of.filling[-1].budgets if of.filling else of.budgets)
    )


def evict(model: nn.Module, tokenizer: Any, args: argparse.Namespace) -> None:
    """Eviction at equal bytes."""
    samples = read_samples(tokenizer, args)
    first = args.tokens // 4
    full = [log_probabilities(model, s[None], stock_cache(model)) for s in samples]
    right = [
        mx.take_along_axis(f, s[1:, None], -1)[first:] for f, s in zip(full, samples, strict=True)
    ]
    exact = [-r.mean().item() for r in right]
    print("| memory | rows | slots | bytes | perplexity | loss | divergence |")
    print("|---|---|---:|---:|---:|---:|---:|", flush=True)
    for part in args.parts:
        each = arms(model, args, part)
        caches = [make() for make in each.values()]
        slots = [mean_slots(cache) for cache in caches]
        nll, far = stepwise(model, samples, caches, full, first)
        for name, cache, count, a, b in zip(each, caches, slots, nll, far, strict=True):
            size = cache[0].label or f"{bytes_in_16_bits(cache, len(samples)):,}"
            line(f"1/{part} | {name} | {count:.0f} | {size}", a.tolist(), exact, b.tolist())


def facts(model: nn.Module, tokenizer: Any, args: argparse.Namespace) -> None:
    """Facts planted, read as a chat would read them."""
    task = recall_task(
        tokenizer,
        args.texts[0].read_text(),
        prompts=args.prompts,
        tokens=args.tokens - CHUNK,
        facts=1,
        form=FORMS[args.form],
        seed=args.seed,
    )
    each: dict[str, Callable[[], list[Any]]] = {"all | full cache": lambda: stock_cache(model)}
    for part in args.parts:
        each |= {f"1/{part} | {name}": make for name, make in arms(model, args, part).items()}
    print("| memory | rows | facts |\n|---|---|---:|", flush=True)
    for name, make in each.items():
        known = recall(model, task, make, name).known
        print(f"| {name} | {sum(known):.0f} of {len(known)} |", flush=True)


WHAT = {"fit": fit, "rows": rows, "evict": evict, "facts": facts}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("what", choices=WHAT)
    made.add_argument("texts", nargs="+", type=Path)
    made.add_argument("--fits", type=Path, required=True, help="a folder")
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--samples", type=int, default=4, help="of the text, or windows to fit to")
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    made.add_argument("--bits", type=int, nargs="*", default=[3, 4, 5, 6], help="of affine rows")
    made.add_argument("--rates", type=float, nargs="+", default=[3, 4], help="bits of a number")
    made.add_argument("--tiers", type=float, nargs="+", default=[5, 3], help="bits of a number")
    made.add_argument(
        "--wide", type=float, default=WIDE_PART, help="part of the slots that is wide"
    )
    made.add_argument("--block", type=int, default=1, help="channels of one width")
    made.add_argument("--even", action="store_true", help="as many bits for the rows of all heads")
    made.add_argument("--beside", type=int, help="bytes beside a row in its slot")
    made.add_argument("--parts", type=int, nargs="+", default=[16, 8], help="of the bytes")
    made.add_argument("--prompts", type=int, default=12)
    made.add_argument("--form", choices=sorted(FORMS), default="cloze", help="of the facts")
    made.add_argument("--seed", type=int, default=3, help="of the facts")
    made.add_argument("--only-coded", action="store_true", help="not the product's own cache")
    return made


def main() -> None:
    """Parse and run; tables are Markdown."""
    args = parser().parse_args()
    model, tokenizer = load_in_float32(args.model)
    WHAT[args.what](model, tokenizer, args)


if __name__ == "__main__":
    main()
