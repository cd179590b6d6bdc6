"""What evicted rows that come back from a file are worth, at equal bytes of memory.

    python -m research.returning TEXT [--model MODEL] [--tokens 1024] [--parts 8 16 32] [--prose]

Facts: one is planted in each prompt, at a random place of the text. The prompt is read as a chat
would read it: the text in chunks, the question as a chunk of its own but for its last token. A fact
is known if each token of the answer is the likeliest. With --prose, perplexity: the text is read
token by token, and scored from a quarter on.

All caches of a part have the same bytes of memory, those that wait for the file and the last
queries included, and hold one conversation each.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache as stock_cache

import mlx_h2o
from mlx_h2o._utils.blas import use_openblas
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.evaluate.arms import OURS, WINDOW, Arm
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits, caches_in_16_bits
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.evaluate.recall import FORMS, RecallTask, is_known, recall_task
from mlx_h2o.integration import routing
from research.real_model import lost, stepwise

#: Tokens of a prompt that are read at once.
CHUNK = 64
#: Caches that are compared, but for the full one.
WITHOUT, WITH = OURS, f"{OURS}, rows come back"


@dataclass(frozen=True)
class Found:
    """The result of one cache.

    Attributes:
        scores: For each prompt whether the fact was known, or for each sample nats per token.
        nbytes: Bytes held at the end, on average, counted as in a 16-bit model.
        rows_read: Rows read from the file for each token.
    """

    scores: list[float]
    nbytes: float
    rows_read: float


def makers(
    model: nn.Module, given: int, tokens: int, folder: Path
) -> dict[str, Callable[[], list[Any]]]:
    """Makes each cache with the bytes of `given` plain tokens."""

    def ours(spill: mlx_h2o.Spill | None) -> list[Any]:
        settings = ModelSettings.of(given, spill=spill)
        return caches_in_16_bits(model, settings, given, tokens)

    return {
        WINDOW: lambda: Arm(WINDOW).make(model, given),
        WITHOUT: lambda: ours(None),
        WITH: lambda: ours(mlx_h2o.Spill(folder)),
    }


def facts_known(
    model: nn.Module, task: RecallTask, make: Callable[[], list[Any]], named: str
) -> Found:
    """Read every prompt through a cache of its own, and see whether its fact is known."""
    known, held, rows = list[float](), [], 0.0
    for i, row in enumerate(task.prompts.tolist()):
        cache, asked = make(), task.questions[i]

        def read(tokens: Sequence[int], cache: list[Any] = cache) -> mx.array:
            logits = model(mx.array([tokens]), cache=cache)[:, -1]
            mx.eval(logits)
            return logits

        for start in range(0, asked, CHUNK):
            read(row[start : min(start + CHUNK, asked)])
        read(row[asked:-1])
        logits, right = read(row[-1:]), True
        for token in task.answers[i]:
            right &= bool(is_known(logits, mx.array([token]), 0).item())
            logits = read([token])
        known.append(float(right))
        held.append(bytes_in_16_bits(cache))
        rows += rows_read(cache) / len(row)
        print(f"{named}: {i + 1} of {len(task.answers)} prompts", file=sys.stderr, flush=True)
    return Found(known, statistics.fmean(held), rows / len(known))


def rows_read(cache: Sequence[Any]) -> int:
    """Rows that a model's caches read from their file."""
    backs = [getattr(entry, "back", None) for entry in cache]
    return sum(back.rows_read for back in backs if back is not None)


def prose_read(
    model: nn.Module, samples: mx.array, make: Callable[[], list[Any]], named: str
) -> Found:
    """Nats per token of every sample, each read token by token through a cache of its own."""
    nats, held, rows, T = list[float](), [], 0.0, samples.shape[1]
    for i in range(samples.shape[0]):
        cache = make()
        nats += stepwise(model, samples[i : i + 1], cache, T // 4)
        held.append(bytes_in_16_bits(cache))
        rows += rows_read(cache) / T
        print(f"{named}: {i + 1} of {samples.shape[0]} samples", file=sys.stderr, flush=True)
    return Found(nats, statistics.fmean(held), rows / len(nats))


def line(part: str, name: str, found: Found, full: Found, prose: bool) -> None:
    """Print one cache's line."""
    if prose:
        perplexity = math.exp(statistics.fmean(found.scores))
        result = f"{perplexity:.3f} | {lost(found.scores, full.scores)}"
    else:
        result = f"{sum(found.scores):.0f} of {len(found.scores)}"
    print(
        f"| {part} | {name} | {found.nbytes:,.0f} | {result} | {found.rows_read:.1f} |", flush=True
    )


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("text", type=Path)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--parts", type=int, nargs="+", default=[8, 16, 32], help="of the bytes")
    made.add_argument("--prompts", type=int, default=12)
    made.add_argument("--samples", type=int, default=4, help="of prose")
    made.add_argument("--form", choices=sorted(FORMS), default="cloze", help="of the facts")
    made.add_argument("--seed", type=int, default=3)
    made.add_argument("--prose", action="store_true", help="perplexity instead of facts")
    made.add_argument("--only", nargs="+", help="caches, by name")
    return made


def main() -> None:
    """Parse and run; the table is Markdown."""
    args = parser().parse_args()
    routing.install()
    use_openblas()
    model, tokenizer = mlx_h2o.load(args.model)
    model.set_dtype(mx.float32)
    text = args.text.read_text()
    if args.prose:
        samples = samples_of(tokenizer.encode(text), args.samples, args.tokens, None)
    else:
        task = recall_task(
            tokenizer,
            text,
            prompts=args.prompts,
            tokens=args.tokens,
            facts=1,
            form=FORMS[args.form],
            seed=args.seed,
        )

    def measured(make: Callable[[], list[Any]], named: str) -> Found:
        if args.prose:
            return prose_read(model, samples, make, named)
        return facts_known(model, task, make, named)

    measure = "perplexity | loss" if args.prose else "facts"
    print(f"| memory | cache | KV bytes | {measure} | rows read a token |")
    print(f"|---|---|---:|{'---:|' * (2 + args.prose)}", flush=True)
    full = measured(lambda: stock_cache(model), "full cache")
    line("all", "full cache", full, full, args.prose)
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts:
            for name, make in makers(model, args.tokens // part, args.tokens, Path(folder)).items():
                if args.only and name not in args.only:
                    continue
                try:
                    make()
                except ValueError:
                    print(f"| 1/{part} | {name} | too few | | |", flush=True)
                    continue
                line(f"1/{part}", name, measured(make, f"{name} at 1/{part}"), full, args.prose)


if __name__ == "__main__":
    main()
