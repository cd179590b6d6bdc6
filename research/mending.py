"""Weights of the retrieval loss and other rules for small memories, beside the default.

    python -m research.mending TEXT [--model builtin:recall-4m] [--parts 16 32]

A prompt with a planted fact is read in chunks; then, with copies of the same cache, the text goes
on, and the fact is asked for. Measured are the divergence from the full cache's predictions over
the text (KL, nats), and the facts that are known. All caches get the same bytes.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o._utils.blas import use_openblas
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_store import found_profile
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits, caches_in_16_bits
from mlx_h2o.evaluate.needles import facts_of
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.evaluate.recall import is_known
from mlx_h2o.evaluate.stage import Stage, in_batches, read, step, untold
from mlx_h2o.integration import routing
from mlx_h2o.integration.layer_probe import identity_by_kinds, layer_kinds
from mlx_h2o.integration.stock_caches import stock_caches
from mlx_h2o.loading.load import EMBEDDED_MODEL
from mlx_h2o.model_caches.make import plain_bytes

#: Tokens of a continuation, of which the first is given.
CONTINUATION = 33
#: Depths of needles, in turn.
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
#: Tokens of a prompt that are read at once.
CHUNK = 128
#: Factors on the weight of the retrieval loss (`budgets/profile.py`).
FACTORS = (2, 4, 8, 16)
#: Prompts that are read together.
BATCH = 8

#: Makes the caches that have read prompts `[B, T]`.
After = Callable[[mx.array], list[Any]]


@dataclass
class Trial:
    """A model, and prompts with a planted fact each, which continue as text and as a question.

    Attributes:
        stage: The model and a text.
        prompts: Prompts of prose with a fact in each, `[n, T]`.
        further: The text's continuations `[n, CONTINUATION]`.
        questions: The facts' questions with their answers, `[n, most]`, padded at the end.
        spans: Where in its row each answer begins and ends.
    """

    stage: Stage
    prompts: mx.array
    further: mx.array
    questions: mx.array
    spans: list[tuple[int, int]]

    @classmethod
    def of(cls, stage: Stage, tokens: int, samples: int) -> Trial:
        """The prompts of a trial, with `tokens` tokens each."""
        rng = random.Random(stage.seed)
        bos = stage.first[0] if stage.first else None
        rows = cast(
            list[list[int]], samples_of(stage.tokens, samples, tokens + CONTINUATION, bos).tolist()
        )
        prompts, further, questions, spans = [], [], [], []
        for i, row in enumerate(rows):
            fact, _ = facts_of(stage, "single", rng)
            told = stage.encode(f"\n\n{fact.statement}\n\n")
            # The text gives way at the place of the fact.
            at = int(DEPTHS[i % len(DEPTHS)] * (tokens - len(told)))
            prompts.append([*row[:at], *told, *row[at + len(told) : tokens]])
            further.append(row[tokens:])
            question = stage.encode(stage.form.asking.format(fact.question))
            answer = stage.encode(f" {fact.answer}{stage.form.ending}")
            spans.append((len(question), len(question) + len(answer)))
            questions.append([*question, *answer])
        longest = max(map(len, questions))
        padded = mx.array([row + [0] * (longest - len(row)) for row in questions])
        return cls(stage, mx.array(prompts), mx.array(further), padded, spans)

    def chunked(self, make: Callable[[int], list[Any]]) -> After:
        """Reads prompts in chunks through caches that `make` gives for so many tokens."""

        def after(prompts: mx.array) -> list[Any]:
            cache = make(prompts.shape[1] + CONTINUATION)
            read(self.stage.model, cache, prompts, self.stage.chunk, untold)
            return cache

        return after

    def answered(self, after: After, together: int = BATCH) -> Answers:
        """What a cache makes of both continuations.

        Args:
            after: Makes the caches.
            together: Prompts that are read together.
        """
        logits, known = [], list[bool]()
        for part in in_batches(len(self.prompts), together):
            cache = after(self.prompts[part])
            nbytes = bytes_in_16_bits(cache) / len(self.prompts[part])
            again = copy.deepcopy(cache)
            logits.append(self._along(cache, self.further[part]))
            asked = self.questions[part]
            said = self._along(again, asked)
            for i, (first, last) in enumerate(self.spans[part]):
                right = is_known(
                    said[i, first - 1 : last - 1], asked[i, first:last], self.stage.form.least
                )
                known.append(bool(right.all().item()))
        return Answers(mx.concatenate(logits), known, nbytes)

    def _along(self, cache: list[Any], tokens: mx.array) -> mx.array:
        found = [
            step(self.stage.model, cache, tokens[:, i], untold).astype(mx.float32)
            for i in range(tokens.shape[1] - 1)
        ]
        return mx.stack(found, axis=1)


@dataclass(frozen=True)
class Answers:
    """What a cache made of a trial.

    Attributes:
        logits: `[n, CONTINUATION - 1, vocabulary]`, over the text.
        known: Which facts are known.
        nbytes: Bytes of one prompt's caches after it, as in a 16-bit model.
    """

    logits: mx.array
    known: list[bool]
    nbytes: float


def divergence(full: mx.array, other: mx.array) -> list[float]:
    """Mean KL(full || other) of each sample, nats."""
    p, q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (full, other))
    return (mx.exp(p) * (p - q)).sum(axis=-1).mean(axis=-1).tolist()  # type: ignore[return-value]


def profile_of(model: nn.Module) -> Profile:
    """The model's own profile."""
    found = found_profile(model, identity_by_kinds(model, layer_kinds(model)))
    assert found is not None
    return found


def weighing(profile: Profile, factor: float) -> Profile:
    """A profile whose retrieval loss weighs `factor` times as much."""
    assert profile.measured is not None
    assert profile.measured.echoes is not None
    return replace(
        profile, measured=replace(profile.measured, echoes=factor * profile.measured.echoes)
    )


def arms(profile: Profile) -> dict[str, dict[str, Any]]:
    """The options of each cache, beside those of the default."""
    found: dict[str, dict[str, Any]] = {"the default": {}, "rows in 4 bits": {"bits": 4}}
    for factor in FACTORS:
        found[f"retrieval loss times {factor}"] = {"budgets": weighing(profile, factor)}
    found["distance weighs 1, not 0.3"] = {"distance_weight": 1.0}
    most = {"budgets": weighing(profile, 8)}
    found["retrieval loss times 8, distance weighs 1"] = {**most, "distance_weight": 1.0}
    found["KeyDiff with the profile's shares"] = {"policy": "keydiff"}
    found["KeyDiff, retrieval loss times 8"] = {"policy": "keydiff", **most}
    return found


def line(model: str, part: int, name: str, full: Answers, got: Answers, held: float) -> None:
    """Print one cache's line."""
    far = divergence(full.logits, got.logits)
    error = statistics.stdev(far) / len(far) ** 0.5
    # Only facts that the full cache knows count.
    known = (
        f"{sum(a and b for a, b in zip(got.known, full.known, strict=True))} of {sum(full.known)}"
    )
    apart = f"{statistics.fmean(far):.4f} ± {error:.4f}"
    print(f"| {model} | 1/{part} | {name} | {apart} | {known} | {held:.3f} |", flush=True)


def header() -> None:
    """Print the head of the table."""
    print("| model | bytes | cache | divergence, nats | facts | bytes held |")
    print("|---|---|---|---:|---:|---:|", flush=True)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("text", type=Path)
    made.add_argument("--model", default=EMBEDDED_MODEL)
    made.add_argument("--tokens", type=int, default=512)
    made.add_argument("--samples", type=int, default=16)
    made.add_argument("--parts", type=int, nargs="+", default=[16, 32], help="of the bytes")
    made.add_argument("--profile", type=Path, help="whose shares are tried, too")
    made.add_argument("--only", nargs="+", help="caches, by name")
    return made


def begun(args: argparse.Namespace) -> Trial:
    """The trial of a command line; the model computes in 32 bits."""
    routing.install()
    use_openblas()
    form = "questions" if args.model == EMBEDDED_MODEL else "cloze"
    stage = Stage(args.model, args.text.read_text(), form, CHUNK)
    stage.model.set_dtype(mx.float32)
    return Trial.of(stage, args.tokens, args.samples)


def main() -> None:
    """Parse and run; the table is Markdown."""
    args = parser().parse_args()
    trial = begun(args)
    model = trial.stage.model
    full = trial.answered(trial.chunked(lambda _: stock_caches(model)))
    plain = sum(map(plain_bytes, layer_kinds(model))) * args.tokens
    header()
    for part in args.parts:
        tried = arms(profile_of(model))
        if args.profile:
            tried[f"shares by {args.profile.name}"] = {"budgets": Profile.load(args.profile)}
        for name, options in tried.items():
            if args.only and name not in args.only:
                continue
            settings = ModelSettings.of(1, **{"policy": "salient", **options})

            def make(tokens: int, part: int = part, of: ModelSettings = settings) -> list[Any]:
                return caches_in_16_bits(model, of, args.tokens // part, tokens)

            got = trial.answered(trial.chunked(make))
            line(args.model, part, name, full, got, got.nbytes / plain)


if __name__ == "__main__":
    main()
