"""Which tokens of a text a bounded cache kept, when it dropped the others, and their scores.

`trace` feeds a text through a model and looks into the caches after every step; `Trace.html` shows
it as one page that needs nothing but a browser.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import CacheList
from numpy.typing import NDArray

from mlx_h2o.cache import H2OKVCache
from mlx_h2o.policies import Slots
from mlx_h2o.selection import evictable_slots
from mlx_h2o.store import Run

# Tokens decoded before one to learn its text: a character takes at most four byte tokens.
DECODE_CONTEXT = 4
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Head:
    """One KV head that was looked at.

    Attributes:
        layer: Its layer's place in the cache list ("3", or "3.1" within a CacheList).
        head: KV head within the layer.
        budget: Slots it may use.
        recent: How many of the last positions it protects.
    """

    layer: str
    head: int
    budget: int
    recent: int


@dataclass(frozen=True)
class Trace:
    """What the caches of a model held while it read a text of T tokens with R KV heads in all.

    Attributes:
        model: The model's name.
        policy: The policy's name.
        settings: The policy's fields.
        remainder: Whether evicted tokens went on answering.
        sink: First positions that every head protects.
        prefill: Tokens read as one chunk before those read one by one.
        nbytes: Bytes of all bounded layers at the end.
        texts: Each token's text, T of them.
        heads: R heads, by layer and then by number.
        dropped_at: `[R, T]` how many tokens had been read when a token was found gone; -1 if it
            was held to the end.
        last_score: `[R, T]` what the policy had accumulated for it when last held; NaN where the
            policy accumulates nothing, or where the prompt's chunk was reduced without it.
        last_priority: `[R, T]` likewise what it was worth keeping; the lowest goes first.
    """

    model: str
    policy: str
    settings: dict[str, Any]
    remainder: bool
    sink: int
    prefill: int
    nbytes: int
    texts: list[str]
    heads: list[Head]
    dropped_at: NDArray[np.int32]
    last_score: NDArray[np.float32]
    last_priority: NDArray[np.float32]

    def held(self, read: int | None = None) -> NDArray[np.bool_]:
        """Which tokens each head held after `read` of them (all by default), `[R, T]`."""
        T = len(self.texts)
        read = T if read is None else read
        known = np.arange(T) < read
        return known & ((self.dropped_at < 0) | (self.dropped_at > read))

    @property
    def share(self) -> float:
        """The share of the text that is held at the end, mean over heads."""
        return float(self.held().mean())

    def held_by_layer(self) -> dict[str, float]:
        """Tokens held at the end per layer, mean over its KV heads."""
        counts: dict[str, list[int]] = {}
        for head, held in zip(self.heads, self.held().sum(axis=1).tolist(), strict=True):
            counts.setdefault(head.layer, []).append(held)
        return {layer: sum(of) / len(of) for layer, of in counts.items()}

    def old_words(self, count: int) -> list[tuple[str, float]]:
        """The best-remembered words among those that a plain window of any head would have lost.

        Args:
            count: Words to name at most.

        Returns:
            Words with the share of heads that hold their best token, ties to the oldest.
        """
        T = len(self.texts)
        shares = self.held().mean(axis=0)
        old = range(min(self.sink, T), max(0, T - max(head.budget for head in self.heads)))
        owner = [i for i, text in enumerate(self.texts) for _ in text]  # of each character
        words: dict[str, float] = {}
        for word in re.finditer(r"\w[\w'’-]*", "".join(self.texts)):
            tokens = owner[word.start() : word.end()]
            if tokens[0] in old:
                best = float(shares[tokens].max())
                words[word[0]] = max(best, words.get(word[0], 0.0))
        return sorted(words.items(), key=lambda item: -item[1])[:count]

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON types; scores to three digits, NaN as None."""
        plain = {name: value for name, value in vars(self).items() if name not in ARRAYS}
        return plain | {
            "heads": [asdict(head) for head in self.heads],
            "dropped_at": self.dropped_at.tolist(),
            "last_score": three_digits(self.last_score),
            "last_priority": three_digits(self.last_priority),
        }

    def html(self) -> str:
        """The page: the text shaded by what is remembered, per head and at every step."""
        data = self.as_dict()
        del data["texts"]  # the page's own text has them
        budgets = [head.budget for head in self.heads]
        budget = f"{min(budgets):,}" + (f" to {max(budgets):,}" if len(set(budgets)) > 1 else "")
        parts = {
            "title": f"What {self.model} remembers",
            "policy": self.policy + (" with remainder" if self.remainder else ", no remainder"),
            "budget": f"{budget} slots per KV head",
            "heads": f"{len(self.heads)} KV heads in {len(self.held_by_layer())} layers",
            "length": f"{len(self.texts):,} tokens",
            "share": f"{self.share:.1%}",
            "nbytes": f"{self.nbytes:,} bytes",
        }
        parts = {name: html.escape(part) for name, part in parts.items()}
        parts["text"] = "".join(f"<span>{html.escape(text)}</span>" for text in self.texts)
        # A script element ends at "</script" whatever stands around it.
        parts["data"] = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], PAGE)


ARRAYS = ("dropped_at", "last_score", "last_priority")


def trace(
    model: nn.Module,
    tokenizer: Any,
    tokens: Sequence[int],
    cache: list[Any],
    *,
    prefill: int = 64,
    name: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Read a text and note after every step what each KV head still holds.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        tokens: The text, T tokens.
        cache: Fresh, from `make_prompt_cache`.
        prefill: Tokens read as the first chunk; the rest comes one by one.
        name: The model's name to show (default: its folder's or its architecture's).
        progress: Called with the tokens read and T after every step.

    Raises:
        ValueError: No tokens, a prefill below 1, or a cache that is used or has no bounded layer.
    """
    layers = bounded_layers(cache)
    if not layers or not all(entry.empty() for _, entry in layers):
        raise ValueError("Pass a fresh cache from make_prompt_cache, with a layer to look into.")
    if not tokens or prefill < 1:
        raise ValueError("Give at least one token of text, and a prefill of at least 1.")
    T = len(tokens)
    read = 0
    while read < T:
        chunk = tokens[read : read + (1 if read else prefill)]
        model(mx.array([chunk]), cache=cache)
        looks = [look(entry, run) for _, entry in layers for run in runs_of(entry)]
        mx.eval(looks, [entry.state for entry in cache])
        if read == 0:
            heads = [head for layer, entry in layers for head in heads_of(layer, entry)]
            dropped_at = np.full((len(heads), T), -1, np.int32)
            last_score = np.full((len(heads), T), np.nan, np.float32)
            last_priority = last_score.copy()
        read += len(chunk)
        held = np.zeros(dropped_at.shape, bool)
        first = 0
        for positions, scores, priority in looks:
            rows = slice(first, first + positions.shape[0])
            at = np.array(positions)
            np.put_along_axis(held[rows], at, True, axis=1)
            np.put_along_axis(last_score[rows], at, np.array(scores), axis=1)
            np.put_along_axis(last_priority[rows], at, np.array(priority), axis=1)
            first = rows.stop
        dropped_at[(dropped_at < 0) & ~held & (np.arange(T) < read)] = read
        if progress is not None:
            progress(read, T)
    entry = layers[0][1]
    return Trace(
        model=name or model_name(model),
        policy=entry.policy.name,
        settings=asdict(entry.policy),
        remainder=entry.answers,
        sink=entry.policy.sink,
        prefill=min(prefill, T),
        nbytes=sum(entry.nbytes for _, entry in layers),
        texts=token_texts(tokenizer, tokens),
        heads=heads,
        dropped_at=dropped_at,
        last_score=last_score,
        last_priority=last_priority,
    )


def bounded_layers(cache: Sequence[Any], prefix: str = "") -> list[tuple[str, H2OKVCache]]:
    """The bounded caches of a model, CacheList members too, by their place in the list."""
    found = []
    for i, entry in enumerate(cache):
        if isinstance(entry, CacheList):
            found += bounded_layers(entry.caches, f"{prefix}{i}.")
        elif isinstance(entry, H2OKVCache):
            found.append((f"{prefix}{i}", entry))
    return found


def runs_of(cache: H2OKVCache) -> list[Run]:
    """Runs of a cache that has seen tokens."""
    assert cache.store is not None
    return cache.store.runs


def heads_of(layer: str, cache: H2OKVCache) -> list[Head]:
    """The heads of a layer that has seen tokens."""
    return [
        Head(layer, head, run.budget, cache.policy.recent_slots(run.budget))
        for run in runs_of(cache)
        for head in range(run.first, run.last)
    ]


def look(cache: H2OKVCache, run: Run) -> tuple[mx.array, mx.array, mx.array]:
    """Positions, scores and priorities of what a run holds, `[heads, length]` each."""
    assert cache.store is not None
    assert cache.remainder is not None
    fields = cache.store.views(run)
    positions = fields["positions"]
    scores = fields.get("scores")
    slots = Slots(
        keys=fields["keys"],
        values=fields["values"],
        positions=positions,
        scores=mx.zeros(positions.shape) if scores is None else scores,
        key_sqnorms=fields.get("key_sqnorms"),
        offset=cache.offset,
        evictable=evictable_slots(
            positions, cache.offset, cache.policy.sink, cache.policy.recent_slots(run.budget)
        ),
        evicted=cache.offset - run.length,
        evicted_mean_key=cache.remainder.mean_key[:, run.first : run.last],
    )
    if scores is None:
        scores = mx.full(positions.shape, mx.nan)
    return positions[0], scores[0], cache.policy.priority(slots)[0].astype(mx.float32)


def model_name(model: nn.Module) -> str:
    """The model's folder, or its architecture."""
    folder = getattr(model, "mlx_h2o_folder", None)
    return Path(folder).name if folder else type(model).__module__.rsplit(".", 1)[-1]


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Each token's part of the text; a character of several tokens belongs to its last one."""
    texts = []
    for i in range(len(tokens)):
        start = max(0, i - DECODE_CONTEXT)
        before = tokenizer.decode(tokens[start:i]).rstrip(REPLACEMENT)
        after = tokenizer.decode(tokens[start : i + 1]).rstrip(REPLACEMENT)
        texts.append(after[len(before) :])
    return texts


def three_digits(values: NDArray[np.float32]) -> list[list[float | None]]:
    """Rows of numbers as short as JSON can have them."""
    return [[float(f"{v:.3g}") if np.isfinite(v) else None for v in row] for row in values.tolist()]


PAGE = r"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}}</title>
<style>
:root {
  color-scheme: light dark;
  --paper: #fcfbf8; --panel: #f3f1eb; --line: #dcd8cd; --ink: #23211c; --dim: #6d685c;
  --faded: #8d8778; --kept: 226 125 20; --sink: 60 110 200; --recent: 46 148 104;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16171a; --panel: #1f2126; --line: #34373e; --ink: #ecebe6; --dim: #a1a3a8;
    --faded: #878a91; --kept: 232 140 46; --sink: 98 146 232; --recent: 70 170 126;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 0 1.5rem 4rem; max-width: 76rem;
  background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif;
}
h1 { margin: 1.6rem 0 .5rem; font-size: 1.5rem; font-weight: 650; }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2rem; margin: 0 0 1rem; }
dt { color: var(--dim); font-size: .78rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
.bar {
  position: sticky; top: 0; z-index: 2; margin: 0 -1.5rem; padding: .7rem 1.5rem .6rem;
  background: var(--paper); border-bottom: 1px solid var(--line);
}
.controls { display: flex; flex-wrap: wrap; gap: .6rem 1rem; align-items: center; }
.controls input { flex: 1 1 14rem; min-width: 10rem; accent-color: rgb(var(--kept)); }
select, button {
  font: inherit; color: inherit; background: var(--panel);
  border: 1px solid var(--line); border-radius: 6px; padding: .25rem .6rem;
}
button { cursor: pointer; }
output { font-variant-numeric: tabular-nums; min-width: 21em; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin-top: .5rem; font-size: .82rem; }
.legend span { color: var(--dim); white-space: nowrap; }
.legend i { display: inline-block; width: 1.1em; height: .8em; margin-right: .4em;
  border-radius: 2px; vertical-align: -.05em; }
#about { margin: .35rem 0 0; min-height: 1.35em; font-size: .82rem; color: var(--dim);
  white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
h2 { margin: 1.3rem 0 .5rem; font-size: .95rem; font-weight: 650; }
h2 small { font-weight: 400; color: var(--dim); }
#strips { position: relative; max-height: 22rem; overflow-y: auto; }
.strip { display: grid; grid-template-columns: 7.5rem 1fr 6.5rem; gap: .7rem; align-items: center;
  padding: 1.5px 0; cursor: pointer; font-size: .8rem; }
.strip:hover, .strip.chosen { background: var(--panel); }
.strip.chosen b { color: rgb(var(--kept)); }
.strip b { font-weight: 500; text-align: right; }
.strip span { color: var(--dim); font-variant-numeric: tabular-nums; }
.strip div { position: relative; }
canvas { display: block; width: 100%; height: 15px; border-radius: 2px;
  background: var(--panel); outline: 1px solid var(--line); }
.strip div::after { content: ""; position: absolute; top: -2px; bottom: -2px; width: 1.5px;
  left: var(--mark, 0); background: var(--ink); opacity: var(--marked, 0); }
#text { margin-top: 1.2rem; font: 17px/1.75 Georgia, "DejaVu Serif", serif; white-space: pre-wrap;
  overflow-wrap: anywhere; }
#text span { border-radius: 3px; padding: 2px 0; }
#text span.ends::before { content: "\21b5"; font-size: .75em; opacity: .55; }
#text span:empty::before { content: "\00b7"; }
#text span.gone { color: var(--faded); }
#text span.unread { color: var(--faded); opacity: .45; }
#text span.marked { outline: 2px solid var(--ink); }
</style>
</head>
<body>
<h1>{{title}}</h1>
<dl>
<div><dt>text</dt><dd>{{length}}</dd></div>
<div><dt>remembered at the end</dt><dd>{{share}}</dd></div>
<div><dt>policy</dt><dd>{{policy}}</dd></div>
<div><dt>budget</dt><dd>{{budget}}</dd></div>
<div><dt>heads</dt><dd>{{heads}}</dd></div>
<div><dt>memory</dt><dd>{{nbytes}}</dd></div>
</dl>
<div class="bar">
<div class="controls">
<select id="head" aria-label="layer and head"></select>
<button id="play" type="button" aria-label="play">&#9654; play</button>
<input id="step" type="range" aria-label="tokens read">
<output id="state"></output>
</div>
<div class="legend" id="legend"></div>
<p id="about">Point at a word to see what became of it; click it to mark it in every head.</p>
</div>
<h2>Heads <small>one strip each, the text from left to right; click to choose</small></h2>
<div id="strips"></div>
<h2>Text</h2>
<div id="text">{{text}}</div>
<script type="application/json" id="data">{{data}}</script>
<script>
"use strict";
const trace = JSON.parse(document.getElementById("data").textContent);
const tokens = [...document.getElementById("text").children];
const T = tokens.length, H = trace.heads.length;
const $ = id => document.getElementById(id);
const UNREAD = 0, GONE = 1, SINK = 2, RECENT = 3, KEPT = 4;
const names = trace.heads.map(h => `layer ${h.layer} head ${h.head}`);
let chosen = -1, read = T, marked = -1;

// What a head thinks of token i after `read` tokens.
function fate(h, i) {
  if (i >= read) return UNREAD;
  const dropped = trace.dropped_at[h][i];
  if (dropped >= 0 && dropped <= read) return GONE;
  if (i < trace.sink) return SINK;
  return i >= read - trace.heads[h].recent ? RECENT : KEPT;
}

function holders(i) {
  let n = 0;
  for (let h = 0; h < H; h++) n += fate(h, i) >= SINK;
  return n;
}

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const hue = {[SINK]: "--sink", [RECENT]: "--recent", [KEPT]: "--kept"};

function shadeText() {
  const alpha = {[SINK]: .38, [RECENT]: .3, [KEPT]: .5};
  tokens.forEach((span, i) => {
    const kind = chosen < 0 ? null : fate(chosen, i);
    const share = chosen < 0 ? holders(i) / H : 0;
    const held = chosen < 0 ? share > 0 : kind >= SINK;
    span.classList.toggle("unread", i >= read);
    span.classList.toggle("gone", i < read && !held);
    span.style.background = !held ? "none" : chosen < 0
      ? `rgb(var(--kept) / ${(.08 + .62 * share).toFixed(3)})`
      : `rgb(var(${hue[kind]}) / ${alpha[kind]})`;
  });
}

function drawStrips() {
  const colour = {}, kept = css("--kept").split(" ").map(Number);
  for (const kind in hue) colour[kind] = css(hue[kind]).split(" ").map(Number);
  document.querySelectorAll(".strip").forEach(strip => {
    const h = +strip.dataset.head, canvas = strip.querySelector("canvas");
    // Where several tokens share a column, the one held by most heads is shown.
    const W = canvas.width = Math.min(T, Math.round(canvas.clientWidth * devicePixelRatio)) || T;
    const context = canvas.getContext("2d"), pixels = context.createImageData(W, 1);
    const most = new Float32Array(W);
    let held = 0;
    for (let i = 0; i < T; i++) {
      const kind = h < 0 ? KEPT : fate(h, i), x = Math.floor(i * W / T);
      const share = h < 0 ? holders(i) / H : +(kind >= SINK);
      held += share;
      if (share <= most[x]) continue;
      most[x] = share;
      pixels.data.set([...(h < 0 ? kept : colour[kind]), 255 * (.12 + .88 * share)], 4 * x);
    }
    context.putImageData(pixels, 0, 0);
    strip.querySelector("span").textContent =
      `${h < 0 ? held.toFixed(0) + " held" : held + " of " + trace.heads[h].budget}`;
    strip.classList.toggle("chosen", h === chosen);
  });
  const counts = chosen < 0 ? [...Array(H).keys()] : [chosen];
  let total = 0;
  for (const h of counts) for (let i = 0; i < read; i++) total += fate(h, i) >= SINK;
  const mean = total / counts.length;
  const [now, all] = [read, T].map(count => count.toLocaleString("en"));
  $("state").textContent = `after ${now} of ${all} tokens: ${mean.toFixed(0)} held`
    + ` (${(100 * mean / read).toFixed(1)} %)`;
}

function legend() {
  const box = (paint, label) => `<span><i style="background:${paint}"></i>${label}</span>`;
  const fixed = box("var(--faded)", "grey: forgotten") + box("var(--line)", "faint: not read yet");
  $("legend").innerHTML = chosen < 0
    ? box("linear-gradient(90deg, rgb(var(--kept) / .08), rgb(var(--kept) / .7))",
        "share of heads that hold the token, none to all") + fixed
    : box("rgb(var(--sink) / .6)", `sinks: the first ${trace.sink}`)
      + box("rgb(var(--recent) / .6)", `recent: the last ${trace.heads[chosen].recent}`)
      + box("rgb(var(--kept) / .8)", `chosen by the policy ${trace.policy}`) + fixed;
}

const number = x => x === null ? "unknown" : String(x).replace("-", "\u2212");

function about(i) {
  const word = JSON.stringify(tokens[i].textContent);
  const fates = (h) => {
    const at = trace.dropped_at[h][i];
    return at < 0 ? "held to the end" : `dropped after ${at} tokens (held for ${at - i})`;
  };
  if (chosen < 0) {
    const lines = names.map((name, h) => `${name}: ${fates(h)}`).slice(0, 32);
    return [`${word}, position ${i}, held by ${holders(i)} of ${H} heads`, ...lines];
  }
  const priority = number(trace.last_priority[chosen][i]);
  const score = trace.last_score[chosen][i];
  const lines = [`${word}, position ${i}`, fates(chosen),
    `last priority ${priority} (the lowest goes first)`];
  return score === null ? lines : [...lines, `accumulated score ${number(score)}`];
}

function mark(i) {
  if (marked >= 0) tokens[marked].classList.remove("marked");
  marked = i === marked ? -1 : i;
  if (marked >= 0) tokens[marked].classList.add("marked");
  $("strips").style.setProperty("--mark", `${100 * (marked + .5) / T}%`);
  $("strips").style.setProperty("--marked", +(marked >= 0));
}

function render() {
  shadeText();
  drawStrips();
  legend();
  if (marked >= 0) $("about").textContent = about(marked).join(" \u00b7 ");
}

function choose(h) {
  chosen = h;
  $("head").value = h;
  render();
}

const options = ["all heads", ...names];
$("head").append(...options.map((name, i) => new Option(name, i - 1)));
for (const [i, name] of options.entries()) {
  const strip = document.createElement("div");
  strip.className = "strip";
  strip.dataset.head = i - 1;
  strip.innerHTML = `<b></b><div><canvas height="1"></canvas></div><span></span>`;
  strip.querySelector("b").textContent = name;
  strip.addEventListener("click", () => choose(i - 1));
  $("strips").append(strip);
}
tokens.forEach((span, i) => {
  if (span.textContent.includes("\n")) span.classList.add("ends");
  span.addEventListener("mouseenter", () => {
    const lines = about(i);
    span.title = lines.join("\n");
    $("about").textContent = lines.join(" \u00b7 ");
  });
  span.addEventListener("click", () => { mark(i); render(); });
});
const slider = Object.assign($("step"), {min: trace.prefill, max: T, value: T});
slider.addEventListener("input", () => { read = +slider.value; render(); });
$("head").addEventListener("change", event => choose(+event.target.value));

let timer = null;
$("play").addEventListener("click", () => {
  const stop = () => { clearInterval(timer); timer = null; $("play").textContent = "\u25b6 play"; };
  if (timer) return stop();
  if (read >= T) read = trace.prefill;
  $("play").textContent = "\u23f8 pause";
  timer = setInterval(() => {
    read = Math.min(T, read + Math.max(1, Math.round(T / 200)));
    slider.value = read;
    render();
    if (read >= T) stop();
  }, 60);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
addEventListener("resize", render);
choose(-1);
</script>
</body>
</html>
"""
