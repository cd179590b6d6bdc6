"""What doctor examines: the kernels, a conversation, and memory."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.attention.backends import choice, reference
from mlx_h2o.attention.backends.self_check import Verdict, mode
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.caches.peak import PeakMemory
from mlx_h2o.doctor.commit import commit
from mlx_h2o.doctor.variants import every_check
from mlx_h2o.evaluate.machine import machine
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT, load
from mlx_h2o.models.make import make_prompt_cache

#: With --quick one of so many kernel variants is checked.
QUICK = 7
#: Rows of caches, by name: bits, or None for dense.
ROWS: dict[str, int | None] = {"dense": None, "8 bits": 8, "4 bits": 4}
# A layer of a model of 4 or 8 billion weights.
QUERY_HEADS, KV_HEADS, WIDTH = 32, 8, 128
# Tokens of the conversation's prompt and behind it, and slots of each head.
CONVERSATION = 384, 48, 96
# Tokens of the prompt of the layer whose memory is measured, its slots, and decode steps.
MEMORY = 2048, 1024, 32
# Tokens of a layer's prompt that are read at once.
CHUNK = 512
# Words whose logits are nearer than this are as good as each other.
TIE = 0.05


@dataclass
class Section:
    """One part of the report.

    Attributes:
        title: For people.
        rows: Figures by column.
        failures: What is wrong, in words.
    """

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def machine_and_device() -> dict[str, Any]:
    """Versions, device and kernels, as JSON types."""
    device = mx.device_info()
    return {
        **machine(),
        "commit": commit(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": str(mx.default_device()),
        "device information": {
            name: value if isinstance(value, int | float | str) else str(value)
            for name, value in device.items()
        },
        "kernels": kernels(),
    }


def kernels() -> str:
    """Which kernels compute on the default device, in words."""
    if gpu := choice.gpu():
        prelude = "Metal" if mx.metal.is_available() else "CUDA"
        return f"{prelude}, on {gpu.architecture()}; checked {mode()}"
    if choice.backend() is reference:
        return "none: the reference backend computes everything"
    from mlx_h2o import _ext

    return f"CPU, {_ext.isa()}, {_ext.threads()} threads"


def examine(quick: bool, progress: Callable[[str], None]) -> Iterator[tuple[str, Section]]:
    """Every section by its name, as soon as it is done.

    Args:
        quick: Whether one of `QUICK` kernel variants is enough.
        progress: Called with the name of each part as it begins.
    """
    parts: dict[str, Callable[[], Section]] = {
        "kernels": lambda: kernels_section(QUICK if quick else 1),
        "conversation": conversation_section,
        "memory": memory_section,
    }
    for name, part in parts.items():
        progress(name)
        yield name, part()


def kernels_section(every: int = 1) -> Section:
    """Kernel variants beside the definition: one of `every`."""
    section = Section("kernel variants beside the definition")
    kinds: dict[str, list[Verdict]] = {}
    for check in itertools.islice(every_check(), 0, None, every):
        verdict = check.verdict()
        kinds.setdefault(verdict.variant.partition(" of ")[0], []).append(verdict)
        if not verdict.usable:
            section.failures.append(f"{verdict.variant}: {verdict.why}")
    for kind, verdicts in kinds.items():
        section.rows.append(
            {
                "kernels": kind,
                "variants": len(verdicts),
                "right": sum(verdict.usable for verdict in verdicts),
                "worst error / tolerated": max(verdict.error for verdict in verdicts),
                "seconds": sum(verdict.seconds for verdict in verdicts),
            }
        )
    return section


def conversation_section() -> Section:
    """The embedded model with bounded caches that evict at every token.

    The device's kernels and the definition get the same tokens, so that a choice between two words
    that are as good as each other does not send them different ways; what is compared is the word
    that each would say next. The model computes on the device both times: its own rounding there,
    TF32 on NVIDIA's, would differ from the CPU's by more than kernels may.
    """
    prompt, tokens, slots = CONVERSATION
    title = f"a conversation of {EMBEDDED_MODEL}, {prompt} + {tokens} tokens in {slots} slots"
    section = Section(title)
    model, tokenizer = load(EMBEDDED_MODEL)
    text = tokenizer.encode(SAMPLE_TEXT.read_text())[: prompt + tokens]
    for name, bits in ROWS.items():
        start = time.perf_counter()
        ours = _next_logits(model, text, prompt, slots, bits)
        seconds = time.perf_counter() - start
        with choice.only_reference(mx.default_device()):
            exact = _next_logits(model, text, prompt, slots, bits)
            word = ours.argmax(axis=-1, keepdims=True)
            loss = exact.max(axis=-1, keepdims=True) - mx.take_along_axis(exact, word, axis=-1)
            alike = int((loss <= TIE).sum().item())  # type: ignore[arg-type]
            error = mx.abs(ours - exact).max().item()
        section.rows.append(
            {
                "rows": name,
                "words alike": alike,
                "words": tokens,
                "largest logit error": error,
                "tokens/s": len(text) / seconds,
            }
        )
        if alike < tokens:
            section.failures.append(f"{tokens - alike} words of {tokens} differ, rows {name}")
    return section


def _next_logits(
    model: nn.Module, text: list[int], prompt: int, slots: int, bits: int | None
) -> mx.array:
    """The logits after each token behind the prompt, `[tokens, vocabulary]` float32."""
    cache = make_prompt_cache(model, slots, budgets="uniform", bits=bits)
    mx.eval(model(mx.array([text[:prompt]]), cache=cache))
    logits = []
    for token in text[prompt:]:
        logits.append(model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32))
        mx.eval(logits[-1])
    return mx.stack(logits)


def memory_section() -> Section:
    """What a layer's `nbytes` says, and what MLX and the reserved ranges hold for it."""
    prompt, slots, steps = MEMORY
    section = Section(f"memory of a layer: {prompt} tokens into {slots} slots")
    for name, bits in ROWS.items():
        nbytes, memory, peak = _layer_memory(bits, prompt, slots, steps)
        section.rows.append(
            {"rows": name, "nbytes": nbytes, "memory": memory, "peak of the prompt": peak}
        )
        # Half a megabyte is for what belongs to no cache.
        if memory > 1.05 * nbytes + (1 << 19):
            section.failures.append(f"rows {name}: {memory:,} bytes in memory, nbytes {nbytes:,}")
    return section


def _layer_memory(bits: int | None, prompt: int, slots: int, steps: int) -> tuple[int, int, int]:
    """`nbytes` of a layer, its bytes in memory, and at most during its prompt."""
    memory = PeakMemory()
    cache = _filled_layer(bits, prompt, slots)
    peak = memory.most
    for _ in range(steps):
        mx.eval(_layer_step(cache, *_layer_rows(1)))
    return cache.nbytes, memory.now, peak


def _filled_layer(bits: int | None, prompt: int, slots: int) -> H2OKVCache:
    """A layer that has read a prompt."""
    cache = H2OKVCache(slots, bits=bits)
    for start in range(0, prompt, CHUNK):
        mx.eval(_layer_step(cache, *_layer_rows(min(CHUNK, prompt - start))))
    return cache


def _layer_step(cache: H2OKVCache, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Attention of new tokens, and their rows in the cache."""
    mask = "causal" if q.shape[2] > 1 else None
    return cache.attend(q, *cache.update_and_fetch(k, v), scale=WIDTH**-0.5, mask=mask)


def _layer_rows(tokens: int) -> list[mx.array]:
    """q `[1, Hq, tokens, D]`, k and v `[1, H, tokens, D]`, random."""
    heads = (QUERY_HEADS, KV_HEADS, KV_HEADS)
    rows = [mx.random.normal((1, h, tokens, WIDTH)).astype(_usual_dtype()) for h in heads]
    mx.eval(rows)
    return rows


def _usual_dtype() -> mx.Dtype:
    """Half on a GPU; float32 on a CPU, where 16-bit arithmetic is slow."""
    return mx.float32 if choice.gpu() is None else mx.float16
