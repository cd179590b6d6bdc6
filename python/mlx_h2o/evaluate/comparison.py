"""Several caches on one text and one model, at equal bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.builtin import load
from mlx_h2o.evaluate.arms import FULL, Arm
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.perplexity import Perplexity, perplexity, samples_of
from mlx_h2o.evaluate.recall import FORMS, RecallTask, recall_task, recalled
from mlx_h2o.evaluate.side_by_side import can_share, side_by_side
from mlx_h2o.evaluate.workers import Tell, cores, finished
from mlx_h2o.linear_algebra import blas

# More caches side by side save nothing, and hold a full cache's memory for each.
MOST_TOGETHER = 8
# Timed steps per turn: short turns, taken by turns, so that a machine's moods hit all caches alike.
TIMED_STEPS = 20
TIMED_TURNS = 5


@dataclass(frozen=True)
class Protocol:
    """What is measured, the same for every arm.

    Attributes:
        model: As in `mlx_h2o.load`.
        text: The text itself.
        max_size: Tokens whose bytes, in a 16-bit model, each bounded cache may take.
        samples: Samples of the text.
        tokens: Length of a sample.
        prefill: Tokens given at once before the rest goes token by token.
        prompts: Prompts with planted facts; 0 leaves recall out.
        prompt_tokens: Length of each.
        compressed: Give the prompts' prose in one chunk instead of token by token.
        equal: What the bounded caches have the same of: "bytes" or "slots" (`Arm.make`).
        facts: How facts are told and asked for: a name of `recall.FORMS`.
        chunk: Tokens of a prompt's prose given at once after the prefill.
        timed: Whether speeds are measured too.
    """

    model: str
    text: str
    max_size: int
    samples: int
    tokens: int
    prefill: int
    prompts: int
    prompt_tokens: int
    compressed: bool = False
    equal: str = "bytes"
    facts: str = "questions"
    chunk: int = 1
    timed: bool = True


@dataclass
class Result:
    """What one arm came to.

    Attributes:
        arm: Its name.
        nll: Nats per token of each sample.
        perplexity: exp of their mean.
        loss: Share by which that exceeds the full cache's.
        recalled: Facts recalled, of those that the full cache recalls.
        asked: How many the full cache recalls.
        tokens_per_second: Decoding, eviction active, side by side with the other arms; None where
            that was not measured.
        nbytes: Bytes held at the end of a sample, per sample, as a 16-bit model has them.
        compression: How many times less that is than the full cache holds.
        loss_error: Standard error of the loss over the samples, paired with the full cache; None
            for one sample.
    """

    arm: str
    nll: list[float]
    perplexity: float
    loss: float
    recalled: int
    asked: int
    tokens_per_second: float | None
    nbytes: int
    compression: float
    loss_error: float | None = None


#: Called with the tokens done and the tokens in all.
Progress = Callable[[int, int], None]


@dataclass
class Measuring:
    """The work of a comparison, in jobs: each measures one group of arms, side by side.

    Attributes:
        protocol: What is measured.
        groups: Arms that read side by side; every group's facts are asked for in one job, and its
            perplexities measured in another.
    """

    protocol: Protocol
    groups: Sequence[tuple[Arm, ...]] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Other processes load the model themselves."""
        return {name: value for name, value in vars(self).items() if name != "_loaded"}

    @cached_property
    def _loaded(self) -> tuple[nn.Module, Any]:
        return load(self.protocol.model)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._loaded[0]

    def run(self, job: int, tell: Tell) -> list[Any]:
        """What each arm of a group recalls (a number of a group), or loses (those after them)."""
        if job < len(self.groups):
            return self.recalled_by(self.groups[job], tell)
        return self.perplexities_of(self.groups[job - len(self.groups)], tell)

    def samples(self) -> mx.array:
        """The text's, `[samples, tokens]`.

        Raises:
            ValueError: It is too short.
        """
        _, tokenizer = self._loaded
        of = self.protocol
        tokens = tokenizer.encode(of.text, add_special_tokens=False)
        return samples_of(tokens, of.samples, of.tokens, tokenizer.bos_token_id)

    def task(self) -> RecallTask:
        """Prompts with planted facts.

        Raises:
            ValueError: They are too short for them.
        """
        of = self.protocol
        return recall_task(
            self._loaded[1],
            of.text,
            prompts=of.prompts,
            tokens=of.prompt_tokens,
            form=FORMS[of.facts],
        )

    def perplexities_of(self, arms: Sequence[Arm], tell: Tell) -> list[tuple[list[float], int]]:
        """Each arm's nats per token of each sample, and bytes held for one."""
        of, n = self.protocol, self.protocol.samples
        caches = self._caches_of(arms, of.tokens)
        result = perplexity(
            self.model,
            side_by_side(caches),
            mx.tile(self.samples(), (len(arms), 1)),
            prefill=of.prefill,
            progress=_differences(tell, n * len(arms)),
        )
        return [
            (result.nll[i * n : (i + 1) * n], bytes_in_16_bits(cache) // n)
            for i, cache in enumerate(caches)
        ]

    def recalled_by(self, arms: Sequence[Arm], tell: Tell) -> list[list[bool]]:
        """Which prompts each arm answers."""
        of = self.protocol
        if not of.prompts:
            return [[] for _ in arms]
        return recalled(
            self.model,
            lambda: side_by_side(self._caches_of(arms, of.prompt_tokens)),
            self.task(),
            prefill=of.prompt_tokens if of.compressed else of.prefill,
            chunk=of.chunk,
            copies=len(arms),
            progress=_differences(tell, 1),
        )

    def _caches_of(self, arms: Sequence[Arm], tokens: int) -> list[list[Any]]:
        of = self.protocol
        return [arm.make(self.model, of.max_size, of.equal, tokens) for arm in arms]


def _differences(tell: Tell, rows: int) -> Callable[[int], None]:
    """Tells what is new at each position, of so many rows, to what counts tokens."""
    seen = 0

    def note(position: int) -> None:
        nonlocal seen
        tell((position - seen) * rows)
        seen = position

    return note


def groups_of(
    arms: Sequence[Arm], model: nn.Module, protocol: Protocol, jobs: int
) -> list[tuple[Arm, ...]]:
    """Arms in groups that read side by side, about as many groups as jobs at once."""
    shared = all(can_share(arm.make(model, protocol.max_size, protocol.equal)) for arm in arms)
    size = -(-len(arms) // max(jobs, -(-len(arms) // MOST_TOGETHER))) if shared else 1
    return [tuple(arms[i : i + size]) for i in range(0, len(arms), size)]


def compare(
    arms: Sequence[Arm], protocol: Protocol, progress: Progress | None = None
) -> list[Result]:
    """Measure all arms; on a CPU, one process per core works on them.

    Args:
        arms: The first must be the full cache.
        protocol: What to measure.
        progress: Told how far it is.

    Raises:
        ValueError: The text is too short, or a cache cannot be made.
    """
    if not arms or arms[0].name != FULL:
        raise ValueError("The first cache of a comparison must be the full one.")
    # What cannot work ends here, before any work is done.
    work = Measuring(protocol)
    work.samples()
    if protocol.prompts:
        work.task()
    workers = cores()
    work.groups = groups_of(arms, work.model, protocol, max(workers, 1))
    whole = len(arms) * (
        protocol.samples * protocol.tokens + protocol.prompts * protocol.prompt_tokens
    )

    def told(tokens: int) -> None:
        if progress:
            progress(min(tokens, whole), whole)

    count = len(work.groups)
    found = dict(finished(work, range(2 * count), told, workers))
    known = [of_arm for job in range(count) for of_arm in found[job]]
    measured = [of_arm for job in range(count, 2 * count) for of_arm in found[job]]
    speeds = speeds_of(work.model, arms, protocol) if protocol.timed else [None] * len(arms)
    return _results(arms, measured, known, speeds)


def _results(
    arms: Sequence[Arm],
    measured: Sequence[tuple[Any, int]],
    recalls: Sequence[Any],
    speeds: Sequence[float | None],
) -> list[Result]:
    """One result an arm, against the first; what that arm does not know does not count."""
    known, full = recalls[0], Perplexity(measured[0][0])
    return [
        Result(
            arm.name,
            nll,
            Perplexity(nll).value,
            Perplexity(nll).loss_against(full),
            sum(knows and does for knows, does in zip(known, recall, strict=True)),
            sum(known),
            speed,
            nbytes,
            measured[0][1] / nbytes,
            Perplexity(nll).error_against(full),
        )
        for arm, (nll, nbytes), recall, speed in zip(arms, measured, recalls, speeds, strict=True)
    ]


def speeds_of(model: nn.Module, arms: Sequence[Arm], protocol: Protocol) -> list[float]:
    """Tokens per second of decoding one sequence, by turns: the median turn of each arm."""
    largest = max(arm.size or protocol.max_size for arm in arms)
    tokens = mx.zeros((1, 2 * largest), dtype=mx.int32)
    caches = [arm.make(model, protocol.max_size, protocol.equal) for arm in arms]
    seconds: list[list[float]] = [[] for _ in arms]
    for cache in caches:
        mx.eval(model(tokens, cache=cache))  # twice the budget, so that eviction is active
    for turn in range(TIMED_TURNS + 1):
        for cache, times in zip(caches, seconds, strict=True):
            start = time.perf_counter()
            for _ in range(TIMED_STEPS):
                mx.eval(model(tokens[:, :1], cache=cache))
            if turn:  # the first warms up
                times.append((time.perf_counter() - start) / TIMED_STEPS)
    return [1 / statistics.median(times) for times in seconds]


def as_json(results: Sequence[Result], protocol: Protocol) -> dict[str, Any]:
    """Everything measured, and how."""
    how = asdict(protocol)
    how["text"] = f"{len(protocol.text)} characters"
    how["blas"] = blas()
    return {"protocol": how, "results": [asdict(result) for result in results]}
