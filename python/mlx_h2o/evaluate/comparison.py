"""Several caches on one text and one model, at equal bytes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
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
    """

    name: str
    policy: str | None = None
    remainder: bool = True
    budgets: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    by_bytes: bool = False

    def make(
        self, model: nn.Module, max_size: int, equal: str = "bytes", context: int | None = None
    ) -> list[Any]:
        """An empty cache.

        Args:
            model: Whose.
            max_size: Tokens that the window holds.
            equal: "bytes": no more bytes than those take in a 16-bit model; "slots": as many slots
                a KV head, on average, whatever they are stored in.
            context: Tokens that will come, where bits are chosen; None: as many as the model knows.

        Raises:
            ValueError: There is no such cache, or that is too small for it.
        """
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
        packing = "bits by bytes" if self.by_bytes else str(settings.packing).strip()
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


def default_arms(policies: Sequence[str] = (), budgets: str | None = None) -> list[Arm]:
    """Mlx-lm's own, ours with bits and slots chosen by bytes and in 16 bits, any policies named.

    Args:
        policies: Names, with settings if wanted: `h2o`, `distinct:recent=0.25:evict_every=8`,
            `h2o:bits=4:recent_bits=8`.
        budgets: A profile's path instead of the model's own.

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
    for spec in policies:
        policy, *fields = spec.split(":")
        settings = tuple(setting_of(field) for field in fields)
        ModelSettings.of(1, policy=policy, **dict(settings))  # raises for what there is not
        arms.append(Arm(f"{spec}, uniform", policy, True, "uniform", settings))
        arms.append(Arm(f"{spec}, uniform, no remainder", policy, False, "uniform", settings))
    return arms


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


#: Called with the tokens done and the tokens in all.
Progress = Callable[[int, int], None]

# A worker's: given once, when it starts. (A text in every job would fill the pipe between the
# processes, and a stop while the queue is not read would never end.)
_protocol: Protocol
_counter: Any = None  # of the tokens that all worker processes have done
_loaded: dict[str, tuple[nn.Module, Any]] = {}


def _start_worker(counter: Any, protocol: Protocol) -> None:
    global _counter, _protocol
    _counter, _protocol = counter, protocol


@contextmanager
def _postponing_interrupts() -> Iterator[None]:
    """Ctrl-C takes effect afterwards, and never in processes that are started meanwhile."""
    if threading.current_thread() is not threading.main_thread():  # it gets no Ctrl-C
        yield
        return
    interrupted = False

    def note(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True

    # New processes inherit the mask; other threads of this one may let the signal through.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if interrupted:
        raise KeyboardInterrupt


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


def _perplexity_of(arm: Arm) -> tuple[list[float], int]:
    protocol = _protocol
    model, _ = _model(protocol.model)
    cache = arm.make(model, protocol.max_size, protocol.equal, protocol.tokens)
    note = _counted(protocol.samples)
    result = perplexity(model, cache, _samples(protocol), prefill=protocol.prefill, progress=note)
    return result.nll, bytes_in_16_bits(cache) // protocol.samples


def _recalled_by(arm: Arm) -> list[bool]:
    protocol = _protocol
    if not protocol.prompts:
        return []
    model, _ = _model(protocol.model)
    return recalled(
        model,
        lambda: arm.make(model, protocol.max_size, protocol.equal, protocol.prompt_tokens),
        _task(protocol),
        prefill=protocol.prompt_tokens if protocol.compressed else protocol.prefill,
        progress=_counted(1),
    )


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
    for arm in arms:
        arm.make(model, protocol.max_size, protocol.equal)
    whole = len(arms) * (
        protocol.samples * protocol.tokens + protocol.prompts * protocol.prompt_tokens
    )
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    workers = (os.cpu_count() or 1) if on_cpu else 1
    pool = ProcessPoolExecutor(workers, context, _start_worker, (counter, protocol))
    try:
        # The longest jobs first, so that no core idles at the end.
        with _postponing_interrupts():
            recalls = [pool.submit(_recalled_by, arm) for arm in arms]
            losses = [pool.submit(_perplexity_of, arm) for arm in arms]
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
    measured = [future.result() for future in losses]
    return _results(arms, measured, [future.result() for future in recalls], speeds)


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
        )
        for arm, (nll, nbytes), recall, speed in zip(arms, measured, recalls, speeds, strict=True)
    ]


def speeds_of(model: nn.Module, arms: Sequence[Arm], protocol: Protocol) -> list[float]:
    """Tokens per second of decoding one sequence, by turns: the median turn of each arm."""
    tokens = mx.zeros((1, 2 * protocol.max_size), dtype=mx.int32)
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
