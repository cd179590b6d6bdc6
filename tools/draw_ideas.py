"""Draw the pictures of docs/how-it-works/: the five ideas, with data of the embedded model.

    python tools/draw_ideas.py [OUT]       docs/how-it-works by default

The model reads a planted fact and a part of the bundled story. All data is real: bars, dots and
lines show the contents of a cache, a remainder or the model's profile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_h2o
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.growth import stages_of_profile
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.evaluate.plotting import drawing
from mlx_h2o.hosts.recorder import LookingCache, Watcher, full_attention, looked_through
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.loading.load import SAMPLE_TEXT
from mlx_h2o.policies import Slots, terms
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import PackedRows
from mlx_h2o.slots.remainder import Remainder

OUT = Path(__file__).parents[1] / "docs" / "how-it-works"
MODEL = "builtin:recall-4m"
FACT = "The secret number of Otto Shaw is 4876. "
TOKENS, MEAN = 640, 96
GREEN, GREY, RED, BLUE, YELLOW = "#2a7f62", "#8c8c8c", "#c44e52", "#4c72b0", "#ccb974"


def tokens_of(tokenizer: Any, count: int) -> list[int]:
    """The fact and the beginning of the story, as token ids."""
    return list(tokenizer.encode(FACT + SAMPLE_TEXT.read_text()))[:count]


def finished(pyplot: Any, figure: Any, path: Path) -> None:
    """Write the picture: SVG, the same bytes for the same data."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


# -- salient ---------------------------------------------------------------------------------------


def terms_of(slots: Slots) -> dict[str, np.ndarray]:
    """The four weighted terms of `salient`, `[H, N]` each."""
    named = {
        "attention per step": terms.mass(slots.scores / slots.ages, slots),
        "distance from the evicted": 0.3 * terms.distance(slots, terms.forgotten_mean(slots)),
        "length of the value": 0.3 * terms.value_length(slots),
        "youth": -0.3 * terms.age(slots),
    }
    return {name: np.array(term[0]) for name, term in named.items()}


def draw_salient(pyplot: Any, model: Any, tokenizer: Any, path: Path, layer: int = 2) -> None:
    """The highest and the lowest priorities of one head, as sums of their terms."""
    ids = tokens_of(tokenizer, TOKENS)
    cache = mlx_h2o.make_prompt_cache(model, MEAN, budgets="uniform", policy="salient")
    mx.eval(model(mx.array([ids[:64]]), cache=cache))
    for token in ids[64:]:
        mx.eval(model(mx.array([[token]]), cache=cache))
    entry = cache[layer]
    slots = entry.slots(entry.store.runs[0])
    head, parts = 0, terms_of(slots)
    may_go = np.array(slots.evictable[0, head])
    total = np.where(may_go, sum(parts.values())[head], np.inf)
    order = [int(i) for i in np.argsort(total) if may_go[i]]
    shown = [*order[:7], *order[-7:]]
    positions = np.array(slots.positions[0, head])
    figure, axes = pyplot.subplots(figsize=(8, 4.4), layout="constrained")
    for at, slot in enumerate(shown):
        left, right = 0.0, 0.0
        colours = (BLUE, GREEN, YELLOW, GREY)
        for (name, values), colour in zip(parts.items(), colours, strict=True):
            value = float(values[head, slot])
            start = right if value >= 0 else left
            axes.barh(at, value, left=start, color=colour, label=name if at == 0 else None)
            left, right = left + min(value, 0), right + max(value, 0)
        axes.plot(total[slot], at, "k|", markersize=11)
    words = [tokenizer.decode([ids[positions[slot]]]).strip() or "⏎" for slot in shown]
    names = [f"“{word}” at {positions[slot]}" for word, slot in zip(words, shown, strict=True)]
    axes.set_yticks(range(len(shown)), names, fontsize=9)
    axes.get_yticklabels()[0].set_color(RED)
    axes.axhline(6.5, color="black", linewidth=0.6, linestyle=":")
    axes.set_xlabel("priority (standardised terms; | is their sum)")
    axes.set_title(
        f"After {TOKENS} tokens, layer {layer}, KV head {head}: the 7 highest and 7 lowest of "
        f"{len(order)} slots.\nRed is the next victim.",
        loc="left",
        fontsize=10,
    )
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    finished(pyplot, figure, path)


# -- remainder -------------------------------------------------------------------------------------


class Keeping(LookingCache):
    """A looking cache that keeps the arguments of a layer's attention."""

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        self.q, self.scale, self.keys, self.values = call.q, call.scale, keys, values
        return full_attention(call.q, keys, values, call.scale, call.sinks)


def looked_at(model: Any, ids: list[int]) -> list[Keeping]:
    """Each layer's queries, keys and values over a text."""
    events: list[Keeping] = []

    def make(_: int) -> Keeping:
        events.append(Keeping())
        return events[-1]

    mx.eval(looked_through(model, mx.array([ids]), Watcher(), make))
    return events


def lost_and_told(layer: Keeping, queries: int = 48) -> tuple[np.ndarray, ...]:
    """The loss of the last queries if all but the most attended keys are evicted.

    Returns:
        The evicted tokens' true log-sum-exp and the remainder's logit `[H, G * queries]`, and the
        relative error of the output without and with the remainder, by KV head.
    """
    H = layer.keys.shape[1]
    q = layer.q[0, :, -queries:].reshape(H, -1, layer.q.shape[-1]).astype(mx.float32)
    k, v = layer.keys[0].astype(mx.float32), layer.values[0].astype(mx.float32)
    T = k.shape[1]
    past = T - queries  # only keys that all of these queries see
    logits = layer.scale * (q @ k[:, :past].swapaxes(1, 2))
    mass = mx.softmax(logits, axis=-1).sum(axis=1)
    keep = mx.argsort(mx.argsort(-mass, axis=-1), axis=-1) < MEAN
    evicted = mx.where(keep[:, None], -mx.inf, logits)
    visible = mx.where(keep[:, None], logits, -mx.inf)
    of_kept = mx.logsumexp(visible, axis=-1)
    empty = Remainder.empty(1, H, k.shape[-1], v.shape[-1])
    rest = empty.fold(k[None, :, :past], v[None, :, :past], 1 - keep[None].astype(mx.float32))
    estimate = rest.column(q[None], layer.scale)
    out = mx.softmax(visible, axis=-1) @ v[:, :past]
    joined, _ = rest.join(out[None], of_kept[None], estimate)
    full = mx.softmax(logits, axis=-1) @ v[:, :past]

    def error(x: mx.array) -> np.ndarray:
        part = mx.square(x - full).sum(axis=(1, 2)) / mx.square(full).sum(axis=(1, 2))
        return np.array(mx.sqrt(part))

    true = mx.logsumexp(evicted, axis=-1)
    return np.array(true), np.array(estimate[0]), error(out), error(joined[0])


def draw_remainder(pyplot: Any, model: Any, tokenizer: Any, path: Path) -> None:
    """The remainder's column beside the truth, and its effect on the output."""
    layers = [lost_and_told(layer) for layer in looked_at(model, tokens_of(tokenizer, TOKENS))]
    figure, (dots, bars) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    true, estimate, _, _ = (np.concatenate(part) for part in zip(*layers, strict=True))
    dots.plot(true.ravel(), estimate.ravel(), ".", color=GREEN, markersize=2, alpha=0.4)
    ends = [true.min(), true.max()]
    dots.plot(ends, ends, color="black", linewidth=0.8)
    dots.set_xlabel("log-sum-exp over all evicted tokens")
    dots.set_ylabel("logit of the remainder's column")
    dots.set_title("Each dot: one query of one head", loc="left", fontsize=10)
    without, with_it = (np.concatenate([layer[i] for layer in layers]) for i in (2, 3))
    at = np.arange(len(without))
    bars.bar(at - 0.2, without, width=0.4, color=GREY, label="without the remainder")
    bars.bar(at + 0.2, with_it, width=0.4, color=GREEN, label="with it")
    heads = layers[0][2].shape[0]
    bars.set_xticks(at, [f"{i // heads}.{i % heads}" for i in at])
    bars.set_xlabel("layer.KV head")
    bars.set_ylabel("error of the output, relative")
    bars.set_title(f"{MEAN} of {TOKENS - 48} tokens kept", loc="left", fontsize=10)
    bars.legend(frameon=False, fontsize=9)
    finished(pyplot, figure, path)


# -- key scaling -----------------------------------------------------------------------------------


def lost_in(rows: mx.array, bits: int) -> np.ndarray:
    """Root mean square of the error of packing, by channel `[D]`, of rows `[T, D]`."""
    restored = PackedRows.of(rows[None, None], bits, rows.shape[1]).dequantized()[0, 0]
    return np.array(mx.sqrt(mx.square(rows - restored).mean(axis=0)))


def most_unlike(keys: list[mx.array]) -> tuple[int, int]:
    """Layer and head in which one channel's mean is farthest above the others' spread."""
    contrast = {
        (i, head): float(mx.abs(k[head].mean(axis=0)).max()) / float(mx.std(k[head], axis=0).min())
        for i, k in enumerate(keys)
        for head in range(k.shape[0])
    }
    return max(contrast, key=lambda at: contrast[at])


def draw_key_scaling(pyplot: Any, model: Any, tokenizer: Any, path: Path, bits: int = 4) -> None:
    """One head's key channels before and after, and the error of packing in each."""
    ids = mx.array([tokens_of(tokenizer, TOKENS)])
    full = stock_caches(model)
    mx.eval(model(ids, cache=full))
    packed = mlx_h2o.make_prompt_cache(model, max_bytes="50%", context=TOKENS, bits=bits)
    keys = [entry.keys[0, :, :TOKENS].astype(mx.float32) for entry in full]
    layer, head = most_unlike(keys)
    rows = keys[layer][head]
    one = Frame(*(part[head : head + 1] for part in packed[layer].frame.arrays))
    scaled = one.enter(rows[None, None])[0, 0]
    figure, (ranges, errors) = pyplot.subplots(
        2, 1, figsize=(9, 4.6), sharex=True, layout="constrained"
    )
    at = np.arange(rows.shape[1])
    for data, colour, shift, name in (
        (rows, GREY, -0.2, "as the model makes them"),
        (scaled, GREEN, 0.2, "(key - centre) / scale"),
    ):
        low, high = np.array(data.min(axis=0)), np.array(data.max(axis=0))
        largest = max(abs(low).max(), abs(high).max())
        ranges.bar(at + shift, (high - low) / largest, 0.4, low / largest, color=colour, label=name)
    ranges.set_ylabel("range / the widest")
    ranges.legend(frameon=False, fontsize=9, loc="lower right", ncols=2, bbox_to_anchor=(1, 1))
    spread = np.array(mx.std(rows, axis=0))
    back = lost_in(scaled, bits) * np.array(one.scale)[0]
    errors.bar(at - 0.2, lost_in(rows, bits) / spread, width=0.4, color=GREY)
    errors.bar(at + 0.2, back / spread, width=0.4, color=GREEN)
    errors.set_ylabel(f"lost by {bits} bits\n/ deviation")
    errors.set_xlabel("key channel")
    title = f"Keys of layer {layer}, KV head {head}, over {TOKENS} tokens"
    ranges.set_title(title, loc="left", fontsize=10)
    finished(pyplot, figure, path)


# -- shares and growth -----------------------------------------------------------------------------


def profile_of(model: Any) -> Profile:
    """The embedded model's profile."""
    folder = Path(mlx_h2o.__file__).parent / "data" / "recall-4m"
    return Profile.load(folder / "mlx_h2o_profile.json")


def head_names(slots: list[list[int]]) -> list[str]:
    """The name `layer.head` of each head."""
    return [f"{i}.{j}" for i, layer in enumerate(slots) for j in range(len(layer))]


def draw_shares(pyplot: Any, profile: Profile, path: Path, mean: int = 128) -> None:
    """Each head's loss at each number of slots, and the shares of slots that follow."""
    slots = profile.budgets(mean)
    figure, (curves, bars) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    grid, losses = profile.wanted_upto(profile.grid[-1])
    names, flat = head_names(slots), [n for layer in slots for n in layer]
    colours = pyplot.colormaps["viridis"](np.linspace(0, 0.9, len(names)))
    for name, curve, colour in zip(names, losses, colours, strict=True):
        curves.plot(grid, np.maximum(curve, 1e-7), color=colour, label=name, linewidth=1.2)
    curves.set_xscale("log", base=2)
    curves.set_yscale("log")
    curves.set_xlabel("slots")
    curves.set_ylabel("loss, relative to the residual")
    curves.set_title("Measured once: each head's loss", loc="left", fontsize=10)
    curves.legend(frameon=False, fontsize=8, title="layer.KV head", title_fontsize=8)
    bars.bar(names, flat, color=colours)
    bars.axhline(mean, color="black", linewidth=0.8, linestyle=":")
    bars.set_xlabel("layer.KV head")
    bars.set_ylabel("slots")
    bars.set_title(f"Slots at a mean of {mean}", loc="left", fontsize=10)
    finished(pyplot, figure, path)


def draw_growth(pyplot: Any, profile: Profile, path: Path, mean: int = 128) -> None:
    """The slots of each head as a conversation grows."""
    stages = stages_of_profile(profile, mean, 16)
    names = head_names(stages[0][1])
    end = 4 * stages[-1][0]
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    colours = pyplot.colormaps["viridis"](np.linspace(0, 0.9, len(names)))
    for i, (name, colour) in enumerate(zip(names, colours, strict=True)):
        at, sizes = [1], [1]
        for (begins, slots), following in zip(stages, [*stages[1:], (end, [])], strict=True):
            most = [n for layer in slots for n in layer][i]
            tokens = np.arange(begins + 1, following[0] + 1)
            at, sizes = [*at, *tokens], [*sizes, *np.minimum(tokens, most)]
        axes.plot(at, sizes, color=colour, label=name, linewidth=1.3)
    for begins, _ in stages[1:]:
        axes.axvline(begins, color=GREY, linewidth=0.6, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xlim(32, end)
    axes.set_xticks([32, 64, *(begins for begins, _ in stages[1:]), end])
    axes.get_xaxis().set_major_formatter(lambda x, _: f"{x:.0f}")
    axes.set_xlabel("tokens of the conversation")
    axes.set_ylabel("slots of each head")
    axes.set_title(
        f"{mean} slots a head on average. Dotted: slots are shared out anew",
        loc="left",
        fontsize=10,
    )
    axes.legend(frameon=False, fontsize=8, title="layer.KV head", title_fontsize=8, ncols=2)
    finished(pyplot, figure, path)


def main() -> None:
    """Parse and draw."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("out", nargs="?", type=Path, default=OUT)
    out = options.parse_args().out
    pyplot = drawing()
    pyplot.rcParams |= {"svg.hashsalt": "mlx-h2o", "savefig.facecolor": "white"}
    model, tokenizer = mlx_h2o.load(MODEL)
    profile = profile_of(model)
    draw_salient(pyplot, model, tokenizer, out / "salient.svg")
    draw_remainder(pyplot, model, tokenizer, out / "remainder.png")
    draw_key_scaling(pyplot, model, tokenizer, out / "key-scaling.svg")
    draw_shares(pyplot, profile, out / "shares.svg")
    draw_growth(pyplot, profile, out / "growth.svg")


if __name__ == "__main__":
    main()
