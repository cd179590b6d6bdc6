"""How many facts are found again when evicted rows come back from a file, at equal bytes of memory.

    python -m research.returning TEXT [--model MODEL] [--tokens 1024] [--parts 8 16 32]

One fact is planted in each prompt, at a random place of the text, or with --within among its first
tokens. The prompt is read as a chat would read it: the text in chunks, the question as a chunk of
its own but for its last token. A fact is known if each token of the answer is the likeliest.

All caches of a part have the same bytes of memory, those that wait for the file and the last
queries included, and hold one conversation each. mlx-lm's packed cache has its own bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache as stock_cache

import mlx_h2o
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits, caches_in_16_bits
from mlx_h2o.evaluate.facts import FORMS, RecallTask, is_known, recall_task
from mlx_h2o.evaluate.methods import OURS, PACKED, WINDOW, Method
from mlx_h2o.hosts import routing

#: Tokens of a prompt that are read at once.
CHUNK = 64
#: Caches that are compared, but for the full one.
WITHOUT, WITH = OURS, f"{OURS}, rows come back"
#: mlx-lm's cache of all tokens in few bits.
PACKED_CACHE = next(name for name, bits in PACKED.items() if bits == 4)


@dataclass(frozen=True)
class Result:
    """The result of one cache.

    Attributes:
        known: For each fact whether it was known.
        nbytes: Bytes held at the end, on average, counted as in a 16-bit model.
        rows_read: Rows read from the file for each token.
    """

    known: list[bool]
    nbytes: float
    rows_read: float


def makers(
    model: nn.Module, size: int, tokens: int, folder: Path
) -> dict[str, Callable[[], list[Any]]]:
    """Makes each cache with the bytes of `size` plain tokens."""

    def ours(spill: mlx_h2o.Spill | None) -> list[Any]:
        settings = ModelSettings.of(max_bytes="100%", spill=spill)
        return caches_in_16_bits(model, settings, size, tokens)

    return {
        WINDOW: lambda: Method(WINDOW, tokens=size).make(model, tokens),
        WITHOUT: lambda: ours(None),
        WITH: lambda: ours(mlx_h2o.Spill(folder)),
    }


def recall(model: nn.Module, task: RecallTask, make: Callable[[], list[Any]], named: str) -> Result:
    """Read every prompt through a cache of its own, and see which of the facts are known."""
    known, nbytes, rows = list[bool](), [], 0.0
    prompts = cast(list[list[int]], task.prompts.tolist())
    for i, (prompt, at, answer) in enumerate(
        zip(prompts, task.questions, task.answers, strict=True)
    ):
        cache = make()

        def read(tokens: Sequence[int], cache: list[Any]) -> mx.array:
            logits = model(mx.array([tokens]), cache=cache)[:, -1]
            mx.eval(logits)
            return logits

        for first in range(0, at, CHUNK):
            # The logits of the text are not read, and a small model's are a fifth of the work.
            chunk = prompt[first : min(first + CHUNK, at)]
            mx.eval(model.model(mx.array([chunk]), cache=cache))
        read(prompt[at:-1], cache)
        logits, right = read(prompt[-1:], cache), True
        for token in answer:
            right &= bool(is_known(logits, mx.array([token]), 0).item())
            logits = read([token], cache)
        known.append(right)
        nbytes.append(bytes_in_16_bits(cache))
        rows += rows_read(cache) / len(prompt)
        print(f"{named}: {i + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    return Result(known, statistics.fmean(nbytes), rows / len(prompts))


def rows_read(cache: Sequence[Any]) -> int:
    """Rows that a model's caches read from their file."""
    backs = [getattr(entry, "back", None) for entry in cache]
    return sum(back.rows_read for back in backs if back is not None)


def line(part: str, name: str, figures: Result) -> None:
    """Print one cache's line."""
    facts = f"{sum(figures.known)} of {len(figures.known)}"
    figure = f"{figures.nbytes:,.0f} | {facts} | {figures.rows_read:.1f}"
    print(f"| {part} | {name} | {figure} |", flush=True)


def load_in_float32(name: str) -> tuple[nn.Module, Any]:
    """A model that computes in 32 bits, through mlx_h2o's attention, and its tokenizer."""
    routing.install()
    model, tokenizer = mlx_h2o.load(name)
    model.set_dtype(mx.float32)
    return model, tokenizer


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("text", type=Path)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--parts", type=int, nargs="+", default=[8, 16, 32], help="of the bytes")
    made.add_argument("--prompts", type=int, default=12)
    made.add_argument("--form", choices=sorted(FORMS), default="cloze", help="of the facts")
    made.add_argument("--within", type=int, help="tokens among which the fact is planted")
    made.add_argument("--seed", type=int, default=3)
    made.add_argument("--only", nargs="+", help="caches, by name")
    return made


def main() -> None:
    """Parse and run; the table is Markdown."""
    args = parser().parse_args()
    model, tokenizer = load_in_float32(args.model)
    task = recall_task(
        tokenizer,
        args.text.read_text(),
        prompts=args.prompts,
        tokens=args.tokens,
        facts=1,
        form=FORMS[args.form],
        seed=args.seed,
        within=args.within,
    )
    print("| memory | cache | KV bytes | facts | rows read a token |")
    print("|---|---|---:|---:|---:|", flush=True)
    full = recall(model, task, lambda: stock_cache(model), "full cache")
    line("all", "full cache", full)
    if args.only is None or PACKED_CACHE in args.only:
        packed = Method(PACKED_CACHE)
        of_packed = recall(model, task, lambda: packed.make(model, args.tokens), PACKED_CACHE)
        line("its own", PACKED_CACHE, of_packed)
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
                line(f"1/{part}", name, recall(model, task, make, f"{name} at 1/{part}"))


if __name__ == "__main__":
    main()
