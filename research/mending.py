"""What was tried to mend the losses at small sizes: each idea beside the default, at equal bytes.

    python -m research.mending IDEA TEXT [--model builtin:recall-4m] [--parts 16 32]

A prompt is read in chunks, then a continuation token by token. Measured are the divergence from the
full cache's predictions on continuations of the text (KL, nats), and planted facts that are asked
for after the prompt.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
from collections.abc import Callable, Sequence
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

#: Tokens of a continuation, of which the first is given.
CONTINUATION = 33
#: Depths of needles, in turn.
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
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
            again = copy.deepcopy(cache)
            logits.append(self._along(cache, self.further[part]))
            asked = self.questions[part]
            said = self._along(again, asked)
            for i, (first, last) in enumerate(self.spans[part]):
                right = is_known(
                    said[i, first - 1 : last - 1], asked[i, first:last], self.stage.form.least
                )
                known.append(bool(right.all().item()))
        return Answers(mx.concatenate(logits), known)

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
    """

    logits: mx.array
    known: list[bool]


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


def main() -> None:
    import time
    args = parser().parse_args()
    routing.install()
    use_openblas()
    stage = Stage(args.model, args.text.read_text(), args.facts, 128)
    model = stage.model
    model.set_dtype(mx.float32)
    trial = Trial.of(stage, args.tokens, args.samples)
    full = trial.answered(trial.chunked(lambda _: stock_caches(model)))
    print("full", sum(full.known), len(full.known), flush=True)
    from research.refitting import compressed_and_fitted
    if args.refit:
        for part in args.parts:
            for name, kw in {"compress": dict(ridge=None), "r 1e-1": dict(ridge=1e-1), "r 1e-2": dict(ridge=1e-2), "r 1e-3": {}, "r 1e-4": dict(ridge=1e-4), "no values": dict(ridge=1e-3, what="rc"), "no remainder": dict(ridge=1e-3, what="v")}.items():
                if args.only and name not in args.only: continue
                t = time.time()
                def after(prompts):
                    T = prompts.shape[1]
                    empty = caches_in_16_bits(model, ModelSettings.of(1, policy="salient"), T // part, T)
                    return compressed_and_fitted(empty, model, stage.tokenizer, prompts, room=CONTINUATION+40, chunk=128, **kw)
                got = trial.answered(after, 1)
                print(part, name, f"{statistics.fmean(divergence(full.logits, got.logits)):.4f}", sum(got.known), len(got.known), f"{time.time()-t:.0f}s", flush=True)
        return
    p = profile_of(model)
    arms = {
        "default": {},
        "4 bits": dict(bits=4), 
        "echo 2": dict(budgets=weighing(p, 2)),
        "echo 4": dict(budgets=weighing(p, 4)),
        "echo 4, 4 bits": dict(budgets=weighing(p, 4), bits=4),
        "echo 8": dict(budgets=weighing(p, 8)),
        "distance 1": dict(distance_weight=1.0),
        "distance 1, echo 4": dict(distance_weight=1.0,budgets=weighing(p, 4)),
        "distance 1, value 0": dict(distance_weight=1.0, value_weight=0.0),
        "keydiff": dict(policy="keydiff", budgets=p),
        "echo 16": dict(budgets=weighing(p, 16)),
        "echo 32": dict(budgets=weighing(p, 32)),
        "distance 0.6, echo 8": dict(distance_weight=0.6,budgets=weighing(p, 8)),
        "distance 1, echo 8": dict(distance_weight=1.0,budgets=weighing(p, 8)),
        "distance 1, echo 16": dict(distance_weight=1.0,budgets=weighing(p, 16)),
        "keydiff, echo 8": dict(policy="keydiff", budgets=weighing(p,8)),
    }
    for part in args.parts:
        for name, options in arms.items():
            if args.only and name not in args.only: continue
            t = time.time()
            options = {"policy": "salient", **options}
            def make(tokens):
                return caches_in_16_bits(model, ModelSettings.of(1, **options), args.tokens // part, tokens)
            try:
                got = trial.answered(trial.chunked(make))
                far, knows = divergence(full.logits, got.logits), got.known
            except ValueError as e:
                print(name, e); continue
            c = make(args.tokens)
            print(part, name, f"{statistics.fmean(far):.4f}", sum(knows), len(knows), f"{time.time()-t:.0f}s", [x for e in c for x in (e.settings.filling[-1].budgets if hasattr(e,'settings') and e.settings.filling else e.budgets)][:8], flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("text", type=Path)
    made.add_argument("--model", default="builtin:recall-4m")
    made.add_argument("--facts", default="questions")
    made.add_argument("--tokens", type=int, default=512)
    made.add_argument("--samples", type=int, default=8)
    made.add_argument("--parts", type=int, nargs="+", default=[16])
    made.add_argument("--refit", action="store_true")
    made.add_argument("--only", nargs="+")
    return made


if __name__ == "__main__":
    main()
