"""What evicted rows that come back from a file are worth, at equal bytes of memory.

    python -m research.returning TEXT [--model MODEL] [--tokens 1024] [--parts 8 16 32] [--prose]

Facts: one is planted in each prompt, at a random place of the text, or with --within among its
first tokens. The prompt is read as a chat would read it: the text in chunks, the question as a
chunk of its own but for its last token. A fact is known if each token of the answer is the
likeliest. With --resumed there is one more cache, whose file is kept: before the question it is
dropped, and the conversation resumed from the file. With --prose, perplexity: all samples, also of
further texts (--also), are read side by side, token by token, and scored from a quarter on.

All caches of a part have the same bytes of memory, those that wait for the file and the last
queries included, and hold one conversation each. mlx-lm's packed cache has its own bytes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache as stock_cache

import mlx_h2o
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.batch import BatchH2OKVCache
from mlx_h2o.evaluate.arms import OURS, PACKED, WINDOW, Arm
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits, caches_in_16_bits
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.evaluate.recall import FORMS, RecallTask, is_known, recall_task
from research.real_model import loaded, lost, stepwise

#: Tokens of a prompt that are read at once.
CHUNK = 64
#: Caches that are compared, but for the full one.
WITHOUT, WITH = OURS, f"{OURS}, rows come back"
RESUMED = f"{WITH}, resumed"
#: mlx-lm's cache of all tokens in few bits.
PACKED_CACHE = next(name for name, bits in PACKED.items() if bits == 4)


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
        RESUMED: lambda: in_32_bits(ours(mlx_h2o.Spill(folder, keep=True))),
    }


def in_32_bits(cache: list[Any]) -> list[Any]:
    """Caches that were sized as in a 16-bit model, and say that their rows have 32 bits.

    Resuming compares what they say with the rows in the file.
    """
    for entry in cache:
        widths = replace(entry.share.widths, key_size=4, value_size=4)
        entry.share = replace(entry.share, widths=widths)
    return cache


def resumed(cache: Sequence[Any]) -> list[Any]:
    """The caches of a conversation whose file is kept, from the last record in that file."""
    file = cache[0].spill.conversation.file
    path = file.path
    file.close()
    return mlx_h2o.resume(path)


def planted(
    tokenizer: Any, text: str, args: argparse.Namespace, tokens: int, within: int | None = None
) -> RecallTask:
    """Prompts with one planted fact each.

    Args:
        tokenizer: The model's.
        text: The prose around the facts.
        args: The arguments `prompts`, `form` and `seed`.
        tokens: T of each prompt.
        within: Tokens among which the fact is planted; None: anywhere.
    """
    return recall_task(
        tokenizer,
        text,
        prompts=args.prompts,
        tokens=tokens,
        facts=1,
        form=FORMS[args.form],
        seed=args.seed,
        within=within,
    )


def facts_known(
    model: nn.Module, task: RecallTask, make: Callable[[], list[Any]], named: str
) -> Found:
    """Read every prompt through a cache of its own, and see whether its fact is known."""
    known, held, rows = list[float](), [], 0.0
    for i, row in enumerate(task.prompts.tolist()):
        cache, asked = make(), task.questions[i]

        def read(tokens: Sequence[int], cache: list[Any]) -> mx.array:
            logits = model(mx.array([tokens]), cache=cache)[:, -1]
            mx.eval(logits)
            return logits

        def read_all(start: int, cache: list[Any], row: list[int] = row, end: int = asked) -> None:
            for first in range(start, end, CHUNK):
                # The logits of the text are not read, and a small model's are a fifth of the work.
                mx.eval(model.model(mx.array([row[first : min(first + CHUNK, end)]]), cache=cache))

        read_all(0, cache)
        if named.startswith(RESUMED):
            cache = resumed(cache)
            read_all(cache[0].offset, cache)
        read(row[asked:-1], cache)
        logits, right = read(row[-1:], cache), True
        for token in task.answers[i]:
            right &= bool(is_known(logits, mx.array([token]), 0).item())
            logits = read([token], cache)
        known.append(float(right))
        held.append(bytes_in_16_bits(cache))
        rows += rows_read(cache) / len(row)
        if named.startswith(RESUMED):
            remove_file(cache)
        print(f"{named}: {i + 1} of {len(task.answers)} prompts", file=sys.stderr, flush=True)
    return Found(known, statistics.fmean(held), rows / len(known))


def remove_file(cache: Sequence[Any]) -> None:
    """End a conversation whose file is kept, and remove the file."""
    file = cache[0].spill.conversation.file
    file.keep = False
    file.close()


def rows_read(cache: Sequence[Any]) -> int:
    """Rows that a model's caches read from their file."""
    backs = [getattr(entry, "back", None) for entry in cache]
    return sum(back.rows_read for back in backs if back is not None)


def prose_read(
    model: nn.Module, samples: mx.array, make: Callable[[], list[Any]], named: str
) -> Found:
    """Nats per token of all samples, read side by side, in bounded caches each in its own."""
    count, T = samples.shape
    merged = make()
    if isinstance(merged[0], BoundedKVCache):
        members = [merged, *(make() for _ in range(count - 1))]
        merged = [type(layer[0]).merge(list(layer)) for layer in zip(*members, strict=True)]
    nats = stepwise(model, samples, merged, T // 4)
    print(f"{named}: {count} samples", file=sys.stderr, flush=True)
    if not isinstance(merged[0], BatchH2OKVCache):
        return Found(nats, bytes_in_16_bits(merged) / count, 0.0)
    members = [[of_layer.caches[i] for of_layer in merged] for i in range(count)]
    held = statistics.fmean(bytes_in_16_bits(cache) for cache in members)
    return Found(nats, held, statistics.fmean(rows_read(cache) / T for cache in members))


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
    made.add_argument("--also", type=Path, nargs="+", default=[], help="further texts of prose")
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--parts", type=int, nargs="+", default=[8, 16, 32], help="of the bytes")
    made.add_argument("--prompts", type=int, default=12)
    made.add_argument("--samples", type=int, default=4, help="of prose, in each text")
    made.add_argument("--form", choices=sorted(FORMS), default="cloze", help="of the facts")
    made.add_argument("--within", type=int, help="tokens among which the fact is planted")
    made.add_argument("--resumed", action="store_true", help="ask after a restart, too")
    made.add_argument("--seed", type=int, default=3)
    made.add_argument("--prose", action="store_true", help="perplexity instead of facts")
    made.add_argument("--only", nargs="+", help="caches, by name")
    return made


def main() -> None:
    """Parse and run; the table is Markdown."""
    args = parser().parse_args()
    model, tokenizer = loaded(args.model)
    text = args.text.read_text()
    if args.prose:
        tokens = [tokenizer.encode(path.read_text()) for path in (args.text, *args.also)]
        samples = mx.concatenate([samples_of(t, args.samples, args.tokens, None) for t in tokens])
    else:
        task = planted(tokenizer, text, args, args.tokens, args.within)

    def measured(make: Callable[[], list[Any]], named: str) -> Found:
        if args.prose:
            return prose_read(model, samples, make, named)
        return facts_known(model, task, make, named)

    measure = "perplexity | loss" if args.prose else "facts"
    print(f"| memory | cache | KV bytes | {measure} | rows read a token |")
    print(f"|---|---|---:|{'---:|' * (2 + args.prose)}", flush=True)
    full = measured(lambda: stock_cache(model), "full cache")
    line("all", "full cache", full, full, args.prose)
    if args.only is None or PACKED_CACHE in args.only:
        packed = measured(lambda: Arm(PACKED_CACHE).make(model, args.tokens), PACKED_CACHE)
        line("its own", PACKED_CACHE, packed, full, args.prose)
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts:
            for name, make in makers(model, args.tokens // part, args.tokens, Path(folder)).items():
                if (args.only and name not in args.only) or (name == RESUMED and not args.resumed):
                    continue
                try:
                    make()
                except ValueError:
                    print(f"| 1/{part} | {name} | too few | | |", flush=True)
                    continue
                line(f"1/{part}", name, measured(make, f"{name} at 1/{part}"), full, args.prose)


if __name__ == "__main__":
    main()
