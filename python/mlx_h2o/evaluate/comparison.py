"""Several caches on one text and one model, at equal bytes."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o._utils.blas import blas
from mlx_h2o.evaluate.arms import FULL, Arm, profile_digests
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.measurements import Measurements
from mlx_h2o.evaluate.perplexity import Perplexity, perplexity, samples_of
from mlx_h2o.evaluate.recall import FORMS, RecallTask, recall_task, recalled
from mlx_h2o.evaluate.side_by_side import can_share, side_by_side
from mlx_h2o.evaluate.workers import Tell, cores, finished
from mlx_h2o.loading.load import load

# More caches side by side save nothing, and each holds a full cache's memory.
MOST_TOGETHER = 8
# Timed steps per turn: short turns, interleaved, so that a machine's moods hit all caches alike.
TIMED_STEPS = 20
TIMED_TURNS = 5
# The measurements of each arm, as they are kept.
FACTS, PERPLEXITY, SPEED = "facts", "perplexity", "speed"


@dataclass(frozen=True)
class Protocol:
    """The protocol of a comparison: the same for every arm.

    Attributes:
        model: As in `mlx_h2o.load`.
        text: The text itself.
        max_size: Tokens whose bytes, in a 16-bit model, each bounded cache may take.
        samples: Samples of the text.
        tokens: Length of a sample.
        prefill: Tokens given at once before the others go token by token.
        prompts: The number of prompts with planted facts; 0 leaves recall out.
        prompt_tokens: Tokens of each prompt.
        compressed: Whether the prompts' prose is given in one chunk instead of token by token.
        equal: The size that bounded caches have in common: "bytes" or "slots" (`Arm.make`).
        facts: The form in which facts are told and asked for: a name of `recall.FORMS`.
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
    """The result of one arm.

    Attributes:
        arm: The arm's name.
        nll: Nats per token of each sample.
        perplexity: exp of the mean of `nll`.
        loss: The share by which perplexity exceeds the full cache's.
        recalled: Facts recalled, among those that the full cache recalls.
        asked: Facts that the full cache recalls.
        tokens_per_second: Decoding with active eviction, side by side with the other arms; None if
            not measured.
        nbytes: Bytes of one sample's cache at its end, counted as in a 16-bit model.
        compression: The full cache's bytes divided by `nbytes`.
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
        protocol: The protocol of the measurement.
        groups: Arms that read side by side; each group's facts are asked for in one job, and its
            perplexities are measured in another.
    """

    protocol: Protocol
    groups: Sequence[tuple[Arm, ...]] = ()

    def __getstate__(self) -> dict[str, Any]:
        """The state without the model, which other processes load themselves."""
        return {name: value for name, value in vars(self).items() if name != "_loaded"}

    @cached_property
    def _loaded(self) -> tuple[nn.Module, Any]:
        return load(self.protocol.model)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._loaded[0]

    def run(self, job: int, tell: Tell) -> dict[str, Any]:
        """Each arm's recall, or each arm's perplexity, of a group, by name and as JSON types."""
        measure, group = self.group(job)
        of = self.recalled_by if measure == FACTS else self.perplexities_of
        return dict(zip([arm.name for arm in group], of(group, tell), strict=True))

    def group(self, job: int) -> tuple[str, tuple[Arm, ...]]:
        """The kind and the arms of a job: the groups' facts come first, then their perplexities."""
        measure, at = divmod(job, len(self.groups))
        return (FACTS, PERPLEXITY)[measure], self.groups[at]

    def work_of(self, job: int) -> int:
        """The number of tokens that a job reads."""
        measure, group = self.group(job)
        of = self.protocol
        recall = of.prompts * of.prompt_tokens
        return len(group) * (recall if measure == FACTS else of.samples * of.tokens)

    def samples(self) -> mx.array:
        """Samples of the text, `[samples, tokens]`.

        Raises:
            ValueError: The text is too short.
        """
        _, tokenizer = self._loaded
        of = self.protocol
        tokens = tokenizer.encode(of.text, add_special_tokens=False)
        return samples_of(tokens, of.samples, of.tokens, tokenizer.bos_token_id)

    def task(self) -> RecallTask:
        """Prompts with planted facts.

        Raises:
            ValueError: The prompts are too short for the facts.
        """
        of = self.protocol
        return recall_task(
            self._loaded[1],
            of.text,
            prompts=of.prompts,
            tokens=of.prompt_tokens,
            form=FORMS[of.facts],
        )

    def perplexities_of(self, arms: Sequence[Arm], tell: Tell) -> list[dict[str, Any]]:
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
            {"nll": result.nll[i * n : (i + 1) * n], "nbytes": bytes_in_16_bits(cache) // n}
            for i, cache in enumerate(caches)
        ]

    def recalled_by(self, arms: Sequence[Arm], tell: Tell) -> list[list[bool]]:
        """Whether each arm answers each prompt."""
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
    """A function that takes positions of `rows` sequences, and tells `tell` the new tokens."""
    seen = 0

    def note(position: int) -> None:
        nonlocal seen
        tell((position - seen) * rows)
        seen = position

    return note


def groups_of(
    arms: Sequence[Arm], model: nn.Module, protocol: Protocol, jobs: int
) -> list[tuple[Arm, ...]]:
    """Arms in groups that read side by side, about as many groups as jobs at once.

    Args:
        arms: The caches to compare.
        model: The model that reads.
        protocol: How the arms are measured.
        jobs: Processes that run at once.
    """
    shared = all(can_share(arm.make(model, protocol.max_size, protocol.equal)) for arm in arms)
    size = -(-len(arms) // max(jobs, -(-len(arms) // MOST_TOGETHER))) if shared else 1
    return [tuple(arms[i : i + size]) for i in range(0, len(arms), size)]


def measurements_of(arms: Sequence[Arm], protocol: Protocol) -> Measurements:
    """An empty record of a comparison's measurements."""
    how = asdict(protocol)
    how["text"] = hashlib.sha256(protocol.text.encode()).hexdigest()
    named = {arm.name: [arm.described(), arm.size] for arm in arms}
    return Measurements({**how, "arms": named}, (3 if protocol.timed else 2) * len(named))


def compare(
    arms: Sequence[Arm],
    protocol: Protocol,
    progress: Progress | None = None,
    so_far: Measurements | None = None,
    keep: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Measure all arms; on a CPU, one process per core works on them.

    Args:
        arms: The first must be the full cache.
        protocol: The protocol of the measurement.
        progress: Called with the tokens done and the tokens in all.
        so_far: Earlier measurements of these arms and this protocol; new ones are added to it.
        keep: Called after each new measurement.

    Raises:
        ValueError: The text is too short, or a cache cannot be made.
    """
    if not arms or arms[0].name != FULL:
        raise ValueError("The first cache of a comparison must be the full one.")
    # Errors in the text or the prompts are raised here, before any work is done.
    work = Measuring(protocol)
    work.samples()
    if protocol.prompts:
        work.task()
    workers = cores()
    work.groups = groups_of(arms, work.model, protocol, max(workers, 1))
    so_far = so_far or measurements_of(arms, protocol)
    so_far.measured_with(profile_digests(work.model, arms))
    jobs = []
    for job in range(2 * len(work.groups)):
        measure, group = work.group(job)
        if so_far.lacks(measure, [arm.name for arm in group]):
            jobs.append(job)
    whole = sum(map(work.work_of, jobs))

    def told(tokens: int) -> None:
        if progress:
            progress(min(tokens, whole), whole)

    for job, found in finished(work, jobs, told, workers):
        so_far.add(work.group(job)[0], found)
        keep()
    if protocol.timed:  # of all arms by turns, so it is measured whole or not at all
        so_far.add(SPEED, speeds_of(work.model, arms, protocol))
    return _results(arms, so_far.found)


def _results(arms: Sequence[Arm], found: dict[str, dict[str, Any]]) -> list[Result]:
    """One result for each arm, against the first; facts that it does not know do not count."""
    known, held = found[FACTS][FULL], found[PERPLEXITY][FULL]["nbytes"]
    full = Perplexity(found[PERPLEXITY][FULL]["nll"])
    results = []
    for arm in arms:
        own, nbytes = (found[PERPLEXITY][arm.name][of] for of in ("nll", "nbytes"))
        both = [a and b for a, b in zip(known, found[FACTS][arm.name], strict=True)]
        results.append(
            Result(
                arm.name,
                own,
                Perplexity(own).value,
                Perplexity(own).loss_against(full),
                sum(both),
                sum(known),
                found[SPEED][arm.name] if SPEED in found else None,
                nbytes,
                held / nbytes,
                Perplexity(own).error_against(full),
            )
        )
    return results


def speeds_of(model: nn.Module, arms: Sequence[Arm], protocol: Protocol) -> dict[str, float]:
    """Tokens per second of decoding one sequence, arms in turn: the median turn of each arm.

    Args:
        model: The model that decodes.
        arms: The caches to compare.
        protocol: How the arms are measured.
    """
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
    return {
        arm.name: 1 / statistics.median(times) for arm, times in zip(arms, seconds, strict=True)
    }


def as_json(results: Sequence[Result], protocol: Protocol) -> dict[str, Any]:
    """All measurements, and their settings."""
    how = asdict(protocol)
    how["text"] = f"{len(protocol.text)} characters"
    how["blas"] = blas()
    return {"protocol": how, "results": [asdict(result) for result in results]}
