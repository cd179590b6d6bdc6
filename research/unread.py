"""Does the unread share tell wrong answers from right ones?

    python -m research.unread facts TEXT    planted facts: answers that differ from the full cache's
    python -m research.unread prose TEXT    tokens whose likeliest follower differs from its
    python -m research.unread bound TEXT    is a bound by key radii a certificate?

The unread share is the part of a query's attention that goes to evicted tokens, through the
remainder (`mlx_h2o.storage.unread`). Figures of it are compared by the area under the ROC curve:
the chance that a wrong answer has a larger figure than a right one, 0.5 for a figure that knows
nothing. The plain alternative is the entropy of the next token's distribution.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import mlx_h2o
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.profile_store import found_profile
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.evaluate.recall import FORMS, recall_task
from mlx_h2o.integration import routing
from mlx_h2o.integration.layer_probe import identity_by_kinds, layer_kinds
from mlx_h2o.integration.recorder import LookingCache, Watcher, full_attention, looked_through
from mlx_h2o.model_caches.make import plain_bytes

#: The part of a model's KV heads, those with the greatest retrieval loss, that count as retrieving.
RETRIEVING = 10
#: Tokens of an answer, at most.
ANSWER_TOKENS = 8
#: Tokens of a prompt that are read at once.
CHUNK = 32
#: The last queries of each sample whose heads are bounded.
QUERIES = 8


@dataclass
class Evidence:
    """Answers, or tokens, with all that might tell the wrong ones.

    Attributes:
        wrong: Whether each differs from the full cache's, `[n]`.
        shares: The unread shares of all KV heads, `[n, heads]`.
        entropy: The entropy of the next token's distribution, in nats, `[n]`.
    """

    wrong: np.ndarray
    shares: np.ndarray
    entropy: np.ndarray

    def figures(self, retrieving: np.ndarray | None) -> dict[str, np.ndarray]:
        """The figures to compare, `[n]` each; `retrieving` are the indices of such heads."""
        mean = self.shares.mean(axis=1)
        figures = {
            "share, mean of heads": mean,
            "share, greatest of heads": self.shares.max(axis=1),
        }
        figures["entropy"] = self.entropy
        figures["entropy and mean share, by rank"] = ranks(self.entropy) + ranks(mean)
        if retrieving is not None:
            of_these = self.shares[:, retrieving].mean(axis=1)
            figures["share, retrieval heads"] = of_these
            both = ranks(self.entropy) + ranks(of_these)
            figures["entropy and retrieval heads, by rank"] = both
        return figures


def ranks(figure: np.ndarray) -> np.ndarray:
    """Ranks from 1 on, equal ones with their mean rank."""
    _, place, count = np.unique(figure, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    mean: np.ndarray = (last - (count - 1) / 2)[place]
    return mean


def area(figure: np.ndarray, wrong: np.ndarray) -> float:
    """The area under the ROC curve; NaN where all are wrong or all are right."""
    many, few = int(wrong.sum()), int((~wrong).sum())
    if not many or not few:
        return math.nan
    return float((ranks(figure)[wrong].sum() - many * (many + 1) / 2) / (many * few))


def area_error(of_area: float, wrong: np.ndarray) -> float:
    """The standard error of an area (Hanley and McNeil 1982)."""
    many, few = int(wrong.sum()), int((~wrong).sum())
    if not many or not few:
        return math.nan
    a, above, below = of_area, of_area / (2 - of_area), 2 * of_area**2 / (1 + of_area)
    spread = a * (1 - a) + (many - 1) * (above - a**2) + (few - 1) * (below - a**2)
    return math.sqrt(max(spread, 0) / (many * few))


def retrieving_heads(model: nn.Module) -> np.ndarray | None:
    """The KV heads with the greatest retrieval loss in the model's profile, or None without it."""
    profile = found_profile(model, identity_by_kinds(model, layer_kinds(model)))
    if profile is None or profile.measured is None or profile.measured.echoes is None:
        return None
    echoes = np.array(profile.measured.echoes)
    return np.argsort(-echoes)[: max(len(echoes) // RETRIEVING, 1)]


def bounded(model: nn.Module, part: int, tokens: int) -> list[Any]:
    """Caches with a part of the bytes that a full cache of so many tokens takes."""
    dense = sum(map(plain_bytes, layer_kinds(model))) * tokens
    return mlx_h2o.make_prompt_cache(model, max_bytes=dense // part, context=tokens)


def seen_by(model: nn.Module, cache: list[Any], tokens: mx.array) -> tuple[mx.array, ...]:
    """Read tokens `[B, L]`; logits `[B, V]`, entropies `[B]` and shares `[B, heads]` after them."""
    logits = model(tokens, cache=cache)[:, -1].astype(mx.float32)
    logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    entropy = -(mx.exp(logs) * logs).sum(axis=-1)
    told = [x for entry in cache if (x := getattr(entry, "unread", None)) is not None]
    shares = mx.concatenate(told, axis=1) if told else mx.zeros((tokens.shape[0], 1))
    mx.eval(logits, entropy, shares, [entry.state for entry in cache if not told])
    return logits, entropy, shares


@dataclass
class Answer:
    """One answer: its text, and what was seen at its tokens."""

    text: str
    entropy: float
    shares: np.ndarray


def answers(
    model: nn.Module, tokenizer: Any, prompts: mx.array, make: Callable[[], list[Any]], batch: int
) -> list[Answer]:
    """Each prompt's answer, up to the end of its sentence or line."""
    found = []
    for first in range(0, prompts.shape[0], batch):
        rows = prompts[first : first + batch]
        cache = make()
        for start in range(0, rows.shape[1], CHUNK):
            logits, entropy, shares = seen_by(model, cache, rows[:, start : start + CHUNK])
        steps = []
        for _ in range(ANSWER_TOKENS):
            token = mx.argmax(logits, axis=-1)
            steps.append((token.tolist(), np.array(entropy), np.array(shares)))
            logits, entropy, shares = seen_by(model, cache, token[:, None])
        for i in range(rows.shape[0]):
            tokens = [of_all[i] for of_all, _, _ in steps]
            count = length_of(tokenizer, tokens)
            found.append(
                Answer(
                    tokenizer.decode(tokens[:count]).strip(),
                    float(np.mean([entropies[i] for _, entropies, _ in steps[:count]])),
                    np.mean([of_all[i] for _, _, of_all in steps[:count]], axis=0),
                )
            )
    return found


def length_of(tokenizer: Any, tokens: Sequence[int]) -> int:
    """How many tokens an answer has, its end included."""
    for count in range(1, len(tokens)):
        text = tokenizer.decode(list(tokens[:count])).strip(" ")
        if "." in text or "\n" in text.strip("\n") or (count > 1 and text.endswith("\n")):
            return count
    return len(tokens)


def facts(model: nn.Module, tokenizer: Any, text: str, args: argparse.Namespace) -> None:
    """Print how well figures tell answers that differ from the full cache's."""
    form = FORMS["questions" if args.model == "builtin:recall-4m" else "cloze"]
    task = recall_task(
        tokenizer, text, prompts=args.prompts, tokens=args.tokens, form=form, seed=args.seed
    )
    of = model, tokenizer, task.prompts
    full = answers(*of, lambda: make_prompt_cache(model), args.batch)
    heading("answers")
    for part in args.parts:
        ours = answers(*of, lambda part=part: bounded(model, part, args.tokens), args.batch)
        wrong = np.array([a.text != b.text for a, b in zip(ours, full, strict=True)])
        evidence = Evidence(
            wrong, np.stack([a.shares for a in ours]), np.array([a.entropy for a in ours])
        )
        report(part, evidence, retrieving_heads(model))


def prose(model: nn.Module, tokenizer: Any, text: str, args: argparse.Namespace) -> None:
    """Print how well figures tell tokens whose likeliest follower differs from the full cache's."""
    samples = samples_of(tokenizer.encode(text), args.samples, args.tokens, None)
    first = args.tokens // 4
    heading("tokens")
    logits = [model(samples[i : i + 1])[0].astype(mx.float32) for i in range(args.samples)]
    expected = np.array(mx.stack([mx.argmax(of_one, axis=-1) for of_one in logits]))
    del logits
    for part in args.parts:
        cache = bounded(model, part, args.tokens)
        rows = []
        for i in range(args.tokens):
            seen, entropy, shares = seen_by(model, cache, samples[:, i : i + 1])
            if i >= first:
                wrong = np.array(mx.argmax(seen, axis=-1)) != expected[:, i]
                rows.append(Evidence(wrong, np.array(shares), np.array(entropy)))
        evidence = Evidence(
            np.concatenate([row.wrong for row in rows]),
            np.concatenate([row.shares for row in rows]),
            np.concatenate([row.entropy for row in rows]),
        )
        report(part, evidence, retrieving_heads(model))


def heading(what: str) -> None:
    """Print a table's first lines."""
    print(f"| bytes | {what} that differ | figure | of these | of the others | area |")
    print("|---|---:|---|---:|---:|---:|", flush=True)


def report(part: int, evidence: Evidence, retrieving: np.ndarray | None) -> None:
    """Print a line for each figure."""
    wrong = evidence.wrong
    for name, figure in evidence.figures(retrieving).items():
        told = area(figure, wrong)
        means = [f"{figure[of].mean():.3f}" if of.any() else "-" for of in (wrong, ~wrong)]
        if "rank" in name:
            means = ["-", "-"]
        error = area_error(told, wrong)
        print(
            f"| 1/{part} | {wrong.sum()} of {len(wrong)} | {name} | {means[0]} | {means[1]} | "
            f"{told:.3f} ± {error:.3f} |",
            flush=True,
        )


# -- the bound ------------------------------------------------------------------------------------


class Queries(LookingCache):
    """A full cache that keeps a layer's last queries and all of its keys."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.q = self.keys = mx.zeros(())

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        self.scale = call.scale
        self.q = call.q[:, :, -QUERIES:].astype(mx.float32)
        self.keys = keys.astype(mx.float32)
        mx.eval(self.q, self.keys)
        return full_attention(call.q, keys, values, call.scale, call.sinks)


@dataclass
class Bounds:
    """Of one query head's evicted rows: the share of attention, and what is known of it."""

    true: float
    column: float
    ball: float
    box: float


def bounds(
    q: np.ndarray, keys: np.ndarray, kept: np.ndarray, scale: float, saturation: float
) -> Bounds:
    """Shares of one query `[D]` over keys `[N, D]`, of which `kept` `[N]` (booleans) are held.

    Evicted keys lie in a ball around their mean, and in a box of each channel's least and greatest
    number: a query's logits are at most those of the ball's and of the box's farthest point.
    """
    logits, gone = scale * keys @ q, keys[~kept]
    rest = logsumexp(logits[kept])
    mean, count = gone.mean(axis=0), math.log(len(gone))
    radius = np.linalg.norm(gone - mean, axis=1).max()
    x = 0.5 * scale**2 * (q**2 * gone.var(axis=0)).sum()
    term = x / math.sqrt(1 + x / saturation) if saturation else 0.0
    tops = {
        "true": logsumexp(logits[~kept]),
        "column": count + scale * mean @ q + term,
        "ball": count + scale * (mean @ q + np.linalg.norm(q) * radius),
        "box": count + scale * np.maximum(q * gone.min(axis=0), q * gone.max(axis=0)).sum(),
    }
    return Bounds(**{name: 1 / (1 + math.exp(min(rest - top, 700))) for name, top in tops.items()})


def logsumexp(x: np.ndarray) -> float:
    """The log-sum-exp of numbers `[N]`."""
    top = x.max()
    return float(top + np.log(np.exp(x - top).sum()))


def bound(model: nn.Module, tokenizer: Any, text: str, args: argparse.Namespace) -> None:
    """Print what is known of evicted rows' shares, over all query heads of the last queries."""
    samples = samples_of(tokenizer.encode(text), args.samples, args.tokens, None)
    print("| bytes | share of evicted rows | median | 90 % of heads | above 1/2 | below 1/20 |")
    print("|---|---|---:|---:|---:|---:|", flush=True)
    for part in args.parts:
        found: list[Bounds] = []
        for i in range(args.samples):
            found += sample_bounds(model, samples[i : i + 1], part)
        for name, label in (
            ("true", "true"),
            ("column", "by the remainder"),
            ("ball", "at most, by the keys' radius"),
            ("box", "at most, by channels' least and greatest"),
        ):
            numbers = np.array([getattr(one, name) for one in found])
            print(
                f"| 1/{part} | {label} | {np.median(numbers):.3f} | "
                f"{np.quantile(numbers, 0.9):.3f} | {(numbers > 0.5).mean():.1%} | "
                f"{(numbers < 0.05).mean():.1%} |",
                flush=True,
            )


def sample_bounds(model: nn.Module, tokens: mx.array, part: int) -> list[Bounds]:
    """What is known at one sample's last queries, for every query head that has evicted rows."""
    caches: list[Queries] = []

    def make(_: int) -> Queries:
        caches.append(Queries())
        return caches[-1]

    mx.eval(looked_through(model, tokens, Watcher(), make)[:, -1])
    held = bounded(model, part, tokens.shape[1])
    for start in range(0, tokens.shape[1], CHUNK):
        seen_by(model, held, tokens[:, start : start + CHUNK])
    found = []
    for full, ours in zip(caches, held, strict=True):
        q, keys = np.array(full.q)[0], np.array(full.keys)[0]
        group, N = q.shape[0] // keys.shape[0], keys.shape[1]
        saturation = ours.settings.saturations(keys.shape[0])
        for run in ours.store.runs:
            positions = np.array(ours.slots(run).positions)[0]
            for head, at in zip(range(run.first, run.last), positions, strict=True):
                kept = np.zeros(N, bool)
                kept[at] = True
                kept[-QUERIES:] = True  # so that every query sees the rows up to its own
                if kept.all():
                    continue
                for row in range(head * group, (head + 1) * group):
                    for query in q[row]:
                        found.append(bounds(query, keys[head], kept, full.scale, saturation[head]))
    return found


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("what", choices=("facts", "prose", "bound"))
    made.add_argument("text", type=Path)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--parts", type=int, nargs="+", default=[8, 16])
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--samples", type=int, default=2)
    made.add_argument("--prompts", type=int, default=48)
    made.add_argument("--batch", type=int, default=24)
    made.add_argument("--seed", type=int, default=0)
    return made


def main() -> None:
    """Parse and run; tables are Markdown."""
    args = parser().parse_args()
    routing.install()
    model, tokenizer = mlx_h2o.load(args.model)
    {"facts": facts, "prose": prose, "bound": bound}[args.what](
        model, tokenizer, args.text.read_text(), args
    )


if __name__ == "__main__":
    main()
