"""Several caches on one text and one model, at equal bytes."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.builtin import load
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits, caches_in_16_bits, slots_in_16_bits
from mlx_h2o.evaluate.perplexity import Perplexity, perplexity, samples_of
from mlx_h2o.evaluate.recall import FORMS, RecallTask, recall_task, recalled
from mlx_h2o.evaluate.side_by_side import can_share, side_by_side
from mlx_h2o.evaluate.workers import end_with_parent, postponing_interrupts
from mlx_h2o.linear_algebra import blas
from mlx_h2o.policies.settings import setting_of
from mlx_h2o.prompt_cache import bounded_caches
from mlx_h2o.settings import DEFAULT_POLICY, ModelSettings, budgets_of_model
from mlx_h2o.stock import stock_caches

FULL = "full cache"
WINDOW = "sliding window"
OURS = "mlx-h2o"
# mlx-lm's own packed caches, which keep every token.
PACKED = {"mlx-lm, 8 bits": 8, "mlx-lm, 4 bits": 4}
# What RotatingKVCache keeps of the beginning in mlx-lm's own make_prompt_cache.
WINDOW_KEEP = 4
# More caches side by side save nothing, and hold a full cache's memory for each.
MOST_TOGETHER = 8
# Timed steps per turn: short turns, taken by turns, so that a machine's moods hit all caches alike.
TIMED_STEPS = 20
TIMED_TURNS = 5


@dataclass(frozen=True)
class Arm:
    """One cache of a comparison.

    Attributes:
        name: For people.
        policy: A policy's name, or None for mlx-lm's own cache (full, or the window).
        remainder: Whether the evicted go on answering.
        budgets: As in `make_prompt_cache`.
        settings: Fields of the policy, as pairs.
        by_bytes: Whether the size is given in bytes, so that bits and slots are chosen together.
        size: Tokens whose bytes (or slots) it gets; None: those of the comparison.
    """

    name: str
    policy: str | None = None
    remainder: bool = True
    budgets: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    by_bytes: bool = False
    size: int | None = None

    def make(
        self, model: nn.Module, max_size: int, equal: str = "bytes", context: int | None = None
    ) -> list[Any]:
        """An empty cache.

        Args:
            model: Whose.
            max_size: Tokens that the window holds, unless the arm has a size of its own.
            equal: "bytes": no more bytes than those take in a 16-bit model; "slots": as many slots
                a KV head, on average, whatever they are stored in.
            context: Tokens that will come, where bits are chosen; None: as many as the model knows.

        Raises:
            ValueError: There is no such cache, or that is too small for it.
        """
        max_size = self.size or max_size
        if self.name == FULL:
            return stock_caches(model)
        if self.name in PACKED:
            return [
                mlx_lm_cache.QuantizedKVCache(group_size=64, bits=PACKED[self.name])
                if type(entry) is mlx_lm_cache.KVCache
                else entry
                for entry in stock_caches(model)
            ]
        if self.policy is None:
            return [
                mlx_lm_cache.RotatingKVCache(max_size=max_size, keep=WINDOW_KEEP)
                if type(entry) is mlx_lm_cache.KVCache
                else entry
                for entry in stock_caches(model)
            ]
        try:
            settings = self.model_settings(max_size)
            if self.by_bytes and equal == "bytes":
                return caches_in_16_bits(model, settings, max_size, context)
            if equal == "bytes":
                settings = replace(settings, max_size=slots_in_16_bits(model, settings, max_size))
            return bounded_caches(model, settings)
        except ValueError as error:
            of = "slots" if equal == "slots" else "tokens' bytes"
            given = f"a max_size of {max_size} {of}"
            raise ValueError(f"{self.name}, with {given}: {error}") from error

    def described(self) -> str:
        """What it is, every default written out."""
        if self.policy is None:
            return "mlx-lm's own"
        settings = self.model_settings(1)
        policy = settings.policy_for(attending=True)
        fields = ", ".join(f"{name}={value}" for name, value in asdict(policy).items())
        budgets = Path(self.budgets).name if self.budgets else "the model's own profile"
        remainder = "remainder" if self.remainder else "no remainder"
        undo = f"undo {settings.undo}" if settings.undo else ""
        chosen = self.by_bytes and not settings.packing.packs
        packing = "bits by bytes" if chosen else str(settings.packing).strip()
        parts = (remainder, budgets, packing, undo)
        return ", ".join([f"{policy.name}({fields})", *filter(None, parts)])

    def model_settings(self, max_size: int) -> ModelSettings:
        """What the caches of a policy are made with."""
        return ModelSettings.of(
            max_size,
            policy=self.policy,
            remainder=self.remainder,
            budgets=self.budgets,
            **dict(self.settings),
        )


def default_arms(
    policies: Sequence[str] = (), budgets: str | None = None, bits: Sequence[int] = ()
) -> list[Arm]:
    """Mlx-lm's own, ours with bits and slots chosen by bytes and in 16 bits, any policies named.

    Args:
        policies: Names, with settings if wanted: `h2o`, `distinct:recent=0.25:evict_every=8`,
            `h2o:bits=4:recent_bits=8`.
        budgets: A profile's path instead of the model's own.
        bits: Widths of rows for ours beside the one that is chosen.

    Raises:
        ValueError: A policy or a setting is unknown, or the profile cannot be read.
    """
    budgets_of_model(budgets)
    arms = [
        Arm(FULL),
        Arm(WINDOW),
        *map(Arm, PACKED),
        Arm(OURS, DEFAULT_POLICY, budgets=budgets, by_bytes=True),
        Arm(f"{DEFAULT_POLICY}, 16 bits", DEFAULT_POLICY, budgets=budgets),
    ]
    for width in bits:
        stored = (("bits", width),)
        name = f"{OURS}, {width} bits"
        arms.append(Arm(name, DEFAULT_POLICY, budgets=budgets, settings=stored, by_bytes=True))
    for spec in policies:
        policy, *fields = spec.split(":")
        settings = tuple(setting_of(field) for field in fields)
        ModelSettings.of(1, policy=policy, **dict(settings))  # raises for what there is not
        arms.append(Arm(f"{spec}, uniform", policy, True, "uniform", settings))
        arms.append(Arm(f"{spec}, uniform, no remainder", policy, False, "uniform", settings))
    return arms


def arms_of_sizes(arms: Sequence[Arm], sizes: Sequence[int]) -> list[Arm]:
    """The bounded caches once for each size, after those that keep every token.

    Args:
        arms: As `default_arms` gives them.
        sizes: Tokens whose bytes they get; of one size, names stay as they are.
    """
    if len(sizes) == 1:
        return [replace(arm, size=sizes[0]) for arm in arms]
    keeping = [arm for arm in arms if arm.name in (FULL, *PACKED)]
    bounded = [arm for arm in arms if arm not in keeping]
    return keeping + [
        replace(arm, name=f"{arm.name}, {size} tokens", size=size)
        for size in sizes
        for arm in bounded
    ]


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
        tokens_per_second: Decoding, eviction active, side by side with the other arms.
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
    tokens_per_second: float
    nbytes: int
    compression: float
    loss_error: float | None = None


#: Called with the tokens done and the tokens in all.
Progress = Callable[[int, int], None]

# A worker's: given once, when it starts. (A text in every job would fill the pipe between the
# processes, and a stop while the queue is not read would never end.)
_protocol: Protocol
_counter: Any = None  # of the tokens that all worker processes have done
_loaded: dict[str, tuple[nn.Module, Any]] = {}


def _start_worker(counter: Any, protocol: Protocol) -> None:
    global _counter, _protocol
    end_with_parent()
    _counter, _protocol = counter, protocol


def _model(name: str) -> tuple[nn.Module, Any]:
    if name not in _loaded:
        _loaded[name] = load(name)
    return _loaded[name]


def _counted(tokens_per_call: int) -> Callable[[int], None]:
    """A progress callback that adds what is new to the workers' common counter."""
    seen = 0

    def note(position: int) -> None:
        nonlocal seen
        with _counter.get_lock():
            _counter.value += (position - seen) * tokens_per_call
        seen = position

    return note


def _samples(protocol: Protocol) -> mx.array:
    _, tokenizer = _model(protocol.model)
    tokens = tokenizer.encode(protocol.text, add_special_tokens=False)
    return samples_of(tokens, protocol.samples, protocol.tokens, tokenizer.bos_token_id)


def _task(protocol: Protocol) -> RecallTask:
    _, tokenizer = _model(protocol.model)
    return recall_task(
        tokenizer,
        protocol.text,
        prompts=protocol.prompts,
        tokens=protocol.prompt_tokens,
        form=FORMS[protocol.facts],
    )


def _caches_of(arms: Sequence[Arm], tokens: int) -> list[list[Any]]:
    model, _ = _model(_protocol.model)
    return [arm.make(model, _protocol.max_size, _protocol.equal, tokens) for arm in arms]


def _perplexities_of(arms: Sequence[Arm]) -> list[tuple[list[float], int]]:
    """Each arm's nats per token of each sample, and bytes held for one."""
    protocol = _protocol
    model, _ = _model(protocol.model)
    caches = _caches_of(arms, protocol.tokens)
    note = _counted(protocol.samples * len(arms))
    samples = mx.tile(_samples(protocol), (len(arms), 1))
    result = perplexity(
        model, side_by_side(caches), samples, prefill=protocol.prefill, progress=note
    )
    n = protocol.samples
    return [
        (result.nll[i * n : (i + 1) * n], bytes_in_16_bits(cache) // n)
        for i, cache in enumerate(caches)
    ]


def _recalled_by(arms: Sequence[Arm]) -> list[list[bool]]:
    """Which prompts each arm answers."""
    protocol = _protocol
    if not protocol.prompts:
        return [[] for _ in arms]
    model, _ = _model(protocol.model)
    return recalled(
        model,
        lambda: side_by_side(_caches_of(arms, protocol.prompt_tokens)),
        _task(protocol),
        prefill=protocol.prompt_tokens if protocol.compressed else protocol.prefill,
        chunk=protocol.chunk,
        copies=len(arms),
        progress=_counted(1),
    )


def groups_of(arms: Sequence[Arm], model: nn.Module, protocol: Protocol, jobs: int) -> list[Any]:
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
    model, _ = _model(protocol.model)
    _samples(protocol)
    if protocol.prompts:
        _task(protocol)
    workers = cores() if mx.default_device() == mx.Device(mx.cpu) else 1
    groups = groups_of(arms, model, protocol, workers)
    whole = len(arms) * (
        protocol.samples * protocol.tokens + protocol.prompts * protocol.prompt_tokens
    )
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (counter, protocol))
    try:
        # The longest jobs first, so that no core idles at the end.
        with postponing_interrupts():
            recalls = [pool.submit(_recalled_by, group) for group in groups]
            losses = [pool.submit(_perplexities_of, group) for group in groups]
        pending: set[Future[Any]] = {*recalls, *losses}
        while pending:
            done, pending = wait(pending, timeout=0.2)
            for future in done:
                future.result()  # raises here what went wrong there
            if progress:
                progress(min(counter.value, whole), whole)
    except BaseException:  # Ctrl-C too: no worker goes on in the background
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    speeds = speeds_of(model, arms, protocol)
    measured = [of_arm for future in losses for of_arm in future.result()]
    known = [of_arm for future in recalls for of_arm in future.result()]
    return _results(arms, measured, known, speeds)


def cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _results(
    arms: Sequence[Arm],
    measured: Sequence[tuple[Any, int]],
    recalls: Sequence[Any],
    speeds: Sequence[float],
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
