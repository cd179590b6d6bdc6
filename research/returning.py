"""What evicted rows that come back from a file are worth, at equal bytes of memory.

    python -m research.returning TEXT [--model MODEL] [--tokens 1024] [--parts 8 16 32]
                                 [--ruler | --prose]

Facts: one is planted in each prompt, at a random place of the text, or with --within among its
first tokens. The prompt is read as a chat would read it: the text in chunks, the question as a
chunk of its own but for its last token. A fact is known if each token of the answer is the
likeliest. With --ruler the prompts are those of RULER's tasks that the full cache can do
(`benchmarks.board.ruler`), read in the same way; answers that the full cache does not give are left
out. With --prose, perplexity: all samples, also of further texts (--also), are read side by side,
token by token, and scored from a quarter on.

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
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache as stock_cache

import mlx_h2o
from benchmarks.board import ruler
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.batch import BatchH2OKVCache
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits, caches_in_16_bits
from mlx_h2o.evaluate.facts import FORMS, RecallTask, is_known, recall_task
from mlx_h2o.evaluate.measures.perplexity import samples_of
from mlx_h2o.evaluate.methods import OURS, PACKED, WINDOW, Method
from research.real_model import loaded, lost, stepwise

#: Tokens of a prompt that are read at once.
CHUNK = 64
#: Caches that are compared, but for the full one.
WITHOUT, WITH = OURS, f"{OURS}, rows come back"
#: mlx-lm's cache of all tokens in few bits.
PACKED_CACHE = next(name for name, bits in PACKED.items() if bits == 4)


@dataclass(frozen=True)
class Question:
    """A prompt, its question, and its answers.

    Attributes:
        text: Token ids, read in chunks.
        question: Token ids, read as a chunk of their own but for the last.
        pieces: What follows, piece by piece: token ids, and whether they are an answer.
    """

    text: list[int]
    question: list[int]
    pieces: list[tuple[list[int], bool]]


@dataclass(frozen=True)
class Result:
    """The result of one cache.

    Attributes:
        scores: For each answer whether it was known, or for each sample nats per token.
        nbytes: Bytes held at the end, on average, counted as in a 16-bit model.
        rows_read: Rows read from the file for each token.
    """

    scores: list[float]
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


def planted(
    tokenizer: Any, text: str, args: argparse.Namespace, tokens: int, within: int | None = None
) -> list[Question]:
    """Prompts with one planted fact each.

    Args:
        tokenizer: The model's.
        text: The prose around the facts.
        args: The arguments `prompts`, `form` and `seed`.
        tokens: T of each prompt.
        within: Tokens among which the fact is planted; None: anywhere.
    """
    task = recall_task(
        tokenizer,
        text,
        prompts=args.prompts,
        tokens=tokens,
        facts=1,
        form=FORMS[args.form],
        seed=args.seed,
        within=within,
    )
    return prompts_of(task)


def prompts_of(task: RecallTask) -> list[Question]:
    """The prompts of a task, each with one answer."""
    rows = cast(list[list[int]], task.prompts.tolist())
    return [
        Question(row[:at], row[at:], [(list(answer), True)])
        for row, at, answer in zip(rows, task.questions, task.answers, strict=True)
    ]


def ruler_prompts(tokenizer: Any, args: argparse.Namespace) -> list[Question]:
    """One prompt of each of RULER's tasks.

    Args:
        tokenizer: The model's.
        args: The arguments `tokens` and `seed`.
    """

    def encode(piece: str) -> list[int]:
        return list(tokenizer.encode(piece, add_special_tokens=False))

    bos = tokenizer.bos_token_id
    begins = [] if bos is None else [bos]
    made = [ruler.samples(kind, args.tokens, 1, args.seed, encode)[0] for kind in ruler.KINDS]
    return [
        Question(
            [*begins, *encode(one.text)],
            encode(one.question),
            [(encode(piece), right) for piece, right in one.pieces],
        )
        for one in made
    ]


def answers_known(
    model: nn.Module, prompts: Sequence[Question], make: Callable[[], list[Any]], named: str
) -> Result:
    """Read every prompt through a cache of its own, and see which of its answers are known."""
    answers, nbytes, rows = list[float](), [], 0.0
    for i, question in enumerate(prompts):
        cache = make()

        def read(tokens: Sequence[int], cache: list[Any]) -> mx.array:
            logits = model(mx.array([tokens]), cache=cache)[:, -1]
            mx.eval(logits)
            return logits

        for first in range(0, len(question.text), CHUNK):
            # The logits of the text are not read, and a small model's are a fifth of the work.
            mx.eval(model.model(mx.array([question.text[first : first + CHUNK]]), cache=cache))
        read(question.question[:-1], cache)
        logits = read(question.question[-1:], cache)
        for piece, is_answer in question.pieces:
            right = True
            for token in piece:
                right &= bool(is_known(logits, mx.array([token]), 0).item())
                logits = read([token], cache)
            answers += [float(right)] if is_answer else []
        nbytes.append(bytes_in_16_bits(cache))
        rows += rows_read(cache) / (len(question.text) + len(question.question))
        print(f"{named}: {i + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    return Result(answers, statistics.fmean(nbytes), rows / len(prompts))


def those_known(prompts: Sequence[Question], shares: Sequence[float]) -> list[Question]:
    """The prompts with some answer that is known, of which the others are asked for no more.

    Args:
        prompts: The prompts.
        shares: For each answer of all prompts whether it is known.
    """
    each, questions = iter(shares), []
    for question in prompts:
        pieces = [(piece, bool(is_answer and next(each))) for piece, is_answer in question.pieces]
        if any(right for _, right in pieces):
            questions.append(replace(question, pieces=pieces))
    return questions


def rows_read(cache: Sequence[Any]) -> int:
    """Rows that a model's caches read from their file."""
    backs = [getattr(entry, "back", None) for entry in cache]
    return sum(back.rows_read for back in backs if back is not None)


def prose_read(
    model: nn.Module, samples: mx.array, make: Callable[[], list[Any]], named: str
) -> Result:
    """Nats per token of all samples, read side by side, in bounded caches each in its own."""
    count, T = samples.shape
    merged = make()
    if isinstance(merged[0], BoundedKVCache):
        members = [merged, *(make() for _ in range(count - 1))]
        merged = [type(layer[0]).merge(list(layer)) for layer in zip(*members, strict=True)]
    nats = stepwise(model, samples, merged, T // 4)
    print(f"{named}: {count} samples", file=sys.stderr, flush=True)
    if not isinstance(merged[0], BatchH2OKVCache):
        return Result(nats, bytes_in_16_bits(merged) / count, 0.0)
    members = [[of_layer.caches[i] for of_layer in merged] for i in range(count)]
    nbytes = statistics.fmean(bytes_in_16_bits(cache) for cache in members)
    return Result(nats, nbytes, statistics.fmean(rows_read(cache) / T for cache in members))


def line(part: str, name: str, figures: Result, full: Result, prose: bool) -> None:
    """Print one cache's line."""
    if prose:
        perplexity = math.exp(statistics.fmean(figures.scores))
        result = f"{perplexity:.3f} | {lost(figures.scores, full.scores)}"
    else:
        result = f"{sum(figures.scores):.0f} of {len(figures.scores)}"
    print(
        f"| {part} | {name} | {figures.nbytes:,.0f} | {result} | {figures.rows_read:.1f} |",
        flush=True,
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
    made.add_argument("--seed", type=int, default=3)
    made.add_argument("--ruler", action="store_true", help="RULER's tasks instead of facts")
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
    elif args.ruler:
        prompts = ruler_prompts(tokenizer, args)
    else:
        prompts = planted(tokenizer, text, args, args.tokens, args.within)

    def measured(make: Callable[[], list[Any]], named: str) -> Result:
        if args.prose:
            return prose_read(model, samples, make, named)
        return answers_known(model, prompts, make, named)

    measure = "perplexity | loss" if args.prose else "answers" if args.ruler else "facts"
    print(f"| memory | cache | KV bytes | {measure} | rows read a token |")
    print(f"|---|---|---:|{'---:|' * (2 + args.prose)}", flush=True)
    full = measured(lambda: stock_cache(model), "full cache")
    line("all", "full cache", full, full, args.prose)
    if args.ruler:
        prompts = those_known(prompts, full.scores)
        if not prompts:
            sys.exit("The full cache gives none of RULER's answers.")
    if args.only is None or PACKED_CACHE in args.only:
        packed = measured(lambda: Method(PACKED_CACHE).make(model, args.tokens), PACKED_CACHE)
        line("its own", PACKED_CACHE, packed, full, args.prose)
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
