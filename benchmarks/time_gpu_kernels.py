"""Times on a GPU: attention beside MLX's own, a layer's decode step, and whole-model decoding.

For a Mac, or a machine with an NVIDIA GPU and mlx[cuda]. Prints JSON, and progress on stderr. With
--dry-run everything runs at tiny sizes on the CPU, which only shows that it runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import qwen3

from benchmarks.measuring import Arm, Samples, in_turns, timed
from benchmarks.model import decoding, steps, window_cache
from mlx_h2o import H2OKVCache, make_prompt_cache
from mlx_h2o.attention.backends import choice
from mlx_h2o.attention.backends.attention_launches import EXPORT_LOGITS, EXPORT_NOTHING
from mlx_h2o.attention.ops import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_scores,
)
from mlx_h2o.doctor.commit import commit
from mlx_h2o.slots.packed import PackedRows

MLX, OURS, EXPORTING = "MLX", "ours", "ours, exporting logits and lse"
#: Packed rows by the name of their arm, in bits; their attention exports as well.
PACKED = {f"ours, {bits} bits, exporting": bits for bits in (8, 6, 4)}
GROUP_SIZE = 32
FULL, WINDOW, H2O = "KVCache", "RotatingKVCache", "h2o"
#: Bounded layers whose decode steps are measured, by name, and their settings.
STEPS: dict[str, dict[str, Any]] = {
    "h2o": {"policy": "h2o"},
    "salient": {},
    "salient, 8 bits": {"bits": 8},
    "salient, 4 bits": {"bits": 4},
}
# The keys and values read in a row take more bytes than any cache of a GPU.
CYCLED_BYTES = 1 << 30
MOST_COPIES = 64
# Layers that follow each other in a measurement of decode steps.
LAYERS = 8
# Tokens of a prompt that a layer reads at once.
CHUNK = 4096
# Seconds of one measurement, so that a launch's latency hardly counts.
SHORTEST = 0.05

QWEN3_4B = qwen3.ModelArgs(
    model_type="qwen3",
    hidden_size=2560,
    num_hidden_layers=36,
    intermediate_size=9728,
    num_attention_heads=32,
    rms_norm_eps=1e-6,
    vocab_size=151936,
    num_key_value_heads=8,
    max_position_embeddings=40960,
    rope_theta=1e6,
    head_dim=128,
    tie_word_embeddings=True,
)

#: Takes queries, keys and values, dense or packed, and returns the output, of the queries' shape.
Attention = Callable[[mx.array, Any, Any], mx.array]


@dataclass(frozen=True)
class Plan:
    """The sizes of a measurement.

    Attributes:
        query_heads: Query heads of the attention.
        kv_heads: KV heads of the attention; they divide the query heads.
        width: D of queries, keys and values.
        slots: The values of N, each with a measurement of its own.
        rounds: Visits of each arm.
        model: The shape of the model that decodes.
        budget: Slots per KV head of the bounded caches.
        prompt: Tokens read before decoding begins; more than the budget, so that the cache evicts.
        tokens: Tokens that an arm decodes in each turn.
    """

    query_heads: int = 32
    kv_heads: int = 8
    width: int = 128
    slots: tuple[int, ...] = tuple(1024 << i for i in range(7))
    rounds: int = 15
    model: qwen3.ModelArgs = field(default_factory=lambda: QWEN3_4B)
    budget: int = 1024
    prompt: int = 4096
    tokens: int = 64

    def tiny(self) -> Plan:
        """The same plan at tiny sizes."""
        model = replace(
            self.model,
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            vocab_size=256,
            num_key_value_heads=2,
            head_dim=32,
        )
        return replace(
            self,
            query_heads=4,
            kv_heads=2,
            width=64,
            slots=(64, 128),
            rounds=2,
            model=model,
            budget=32,
            prompt=96,
            tokens=4,
        )


def attention_arms(plan: Plan, slots: int) -> dict[str, Arm]:
    """MLX's attention and ours; an arm's seconds are those of all its copies."""
    pairs = copies(plan, slots)
    q = random_rows(plan.query_heads, 1, plan.width)

    def over(attention: Attention, pairs: list[tuple[Any, Any]]) -> Arm:
        def work() -> None:
            # Each output is the next call's queries, like layers that follow each other.
            out = q
            for k, v in pairs:
                out = attention(out, k, v)
            mx.eval(out)

        return timed(work, SHORTEST)

    scale = plan.width**-0.5
    arms = {
        MLX: over(partial(mx.fast.scaled_dot_product_attention, scale=scale), pairs),
        OURS: over(ours(scale, EXPORT_NOTHING), pairs),
        EXPORTING: over(ours(scale, EXPORT_LOGITS), pairs),
    }
    for name, bits in PACKED.items():
        packed = [tuple(PackedRows.of(rows, bits, GROUP_SIZE) for rows in pair) for pair in pairs]
        mx.eval([rows.arrays for pair in packed for rows in pair])
        arms[name] = over(ours(scale, EXPORT_LOGITS), packed)
    return arms


def ours(scale: float, export: int) -> Attention:
    """The GPU's kernels, or the CPU's if there is no GPU."""
    gpu = choice.gpu()
    if gpu is not None:
        return lambda q, k, v: gpu.attend(q, k, v, scale=scale, export=export).out
    if export == EXPORT_NOTHING:
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=scale)
    return lambda q, k, v: scaled_dot_product_attention_with_scores(q, k, v, scale=scale)[0]


def random_rows(heads: int, tokens: int, width: int) -> mx.array:
    """`[1, heads, tokens, width]` float16."""
    rows = mx.random.normal((1, heads, tokens, width)).astype(mx.float16)
    mx.eval(rows)
    return rows


def copies(plan: Plan, slots: int) -> list[tuple[mx.array, mx.array]]:
    """Keys and values, a pair for each call."""
    shape = plan.kv_heads, slots, plan.width
    return [(random_rows(*shape), random_rows(*shape)) for _ in range(calls(plan, slots))]


def calls(plan: Plan, slots: int) -> int:
    """The number of calls in a row in a measurement."""
    return min(MOST_COPIES, -(-CYCLED_BYTES // kv_bytes(plan, slots)))


def kv_bytes(plan: Plan, slots: int) -> int:
    """Bytes of the dense keys and values of one call."""
    return 2 * plan.kv_heads * slots * plan.width * 2


def packed_bytes(plan: Plan, slots: int, bits: int) -> int:
    """Bytes of the packed keys and values of one call, with a scale and a bias for each group."""
    return kv_bytes(plan, slots) * (bits * GROUP_SIZE + 32) // (16 * GROUP_SIZE)


def attention_times(plan: Plan, slots: int) -> dict[str, Any]:
    """One size: seconds of a call, and the rates that follow."""
    samples = in_turns(attention_arms(plan, slots), plan.rounds)
    arms = of_one(samples, calls(plan, slots))
    for name, arm in arms.items():
        bits = PACKED.get(name)
        nbytes = packed_bytes(plan, slots, bits) if bits else kv_bytes(plan, slots)
        arm["bytes_per_second"] = nbytes / arm["seconds"]
    return {
        "query_heads": plan.query_heads,
        "kv_heads": plan.kv_heads,
        "width": plan.width,
        "slots": slots,
        "arms": arms,
        "time_over_mlx": {name: samples.ratio(name, MLX) for name in arms},
        "time_of_export": samples.ratio(EXPORTING, OURS),
    }


def step_arms(plan: Plan, slots: int) -> dict[str, Arm]:
    """A token in each of `LAYERS` layers: a plain cache's, and fused steps that evict."""
    q = random_rows(plan.query_heads, 1, plan.width)
    k, v = (random_rows(plan.kv_heads, 1, plan.width) for _ in range(2))
    scale = plan.width**-0.5

    def plain(cache: Any, q: mx.array) -> mx.array:
        rows = cache.update_and_fetch(k, v)
        cache.trim(1)  # as many rows at every step
        return mx.fast.scaled_dot_product_attention(q, *rows, scale=scale)

    def fused(cache: H2OKVCache, q: mx.array) -> mx.array:
        return cache.attend(q, *cache.update_and_fetch(k, v), scale=scale)

    def over(step: Callable[[Any, mx.array], mx.array], cache: Any) -> Arm:
        layers = [copy.deepcopy(cache) for _ in range(LAYERS)]

        def work() -> None:
            out = q
            for layer in layers:
                out = step(layer, out)
            mx.eval(out)

        return timed(work, SHORTEST)

    arms = {FULL: over(plain, filled(plan, mlx_lm_cache.KVCache(), slots))}
    for name, settings in STEPS.items():
        cache = H2OKVCache(slots, **settings)
        arms[name] = over(fused, filled(plan, cache, slots + CHUNK // 64))
    return arms


def filled(plan: Plan, cache: Any, tokens: int) -> Any:
    """A layer's cache that has read so many random tokens."""
    for start in range(0, tokens, CHUNK):
        rows = min(CHUNK, tokens - start)
        q = random_rows(plan.query_heads, rows, plan.width)
        k, v = (random_rows(plan.kv_heads, rows, plan.width) for _ in range(2))
        new = cache.update_and_fetch(k, v)
        if isinstance(cache, H2OKVCache):
            mx.eval(cache.attend(q, *new, scale=plan.width**-0.5, mask="causal"))
    return cache


def step_times(plan: Plan, slots: int) -> dict[str, Any]:
    """One size: seconds of a layer's decode step."""
    samples = in_turns(step_arms(plan, slots), plan.rounds)
    return {
        "slots": slots,
        "arms": of_one(samples, LAYERS),
        "time_over_plain": {name: samples.ratio(name, FULL) for name in samples.arms},
    }


def of_one(samples: Samples, count: int) -> dict[str, dict[str, float]]:
    """Median and quartiles of one call, or token, of `count`."""
    return {
        arm: {name: seconds / count for name, seconds in per_visit.items()}
        for arm, per_visit in samples.as_json().items()
    }


def random_model(plan: Plan) -> nn.Module:
    """Random weights of 4 bits, made layer by layer, so that wide ones never all exist."""
    model = qwen3.Model(plan.model)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    for part in chain([model.model.embed_tokens], model.layers, [model]):
        mx.eval(part.parameters())
    return model


def model_times(plan: Plan) -> dict[str, Any]:
    """Decoding token by token, with every bounded cache evicting."""
    model = random_model(plan)
    prompt = mx.random.randint(0, plan.model.vocab_size, (plan.prompt,))
    caches = {
        FULL: mlx_lm_cache.make_prompt_cache(model),
        WINDOW: window_cache(model, plan.budget),
        H2O: make_prompt_cache(model, plan.budget, policy=H2O),
    }
    arms = {
        name: decoding(steps(model, prompt, cache, plan.prompt), plan.tokens)
        for name, cache in caches.items()
    }
    samples = in_turns(arms, plan.rounds)
    return {
        "layers": plan.model.num_hidden_layers,
        "hidden_size": plan.model.hidden_size,
        "budget": plan.budget,
        "prompt": plan.prompt,
        "decoded": plan.rounds * plan.tokens,
        "arms": of_one(samples, 1),
        "tokens_per_second": {name: 1 / samples.median(name) for name in samples.arms},
        "speed_over_window": samples.speed(H2O, WINDOW),
        "speed_over_full": samples.speed(H2O, FULL),
        "cache_bytes": {
            name: sum(entry.nbytes for entry in cache) for name, cache in caches.items()
        },
    }


def machine() -> dict[str, Any]:
    """The measuring machine."""
    return {
        "device": str(mx.default_device()),
        **{name: str(value) for name, value in mx.device_info().items()},
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument(
        "--only", choices=("attention", "step", "model"), help="measure one of them"
    )
    parser.add_argument("--slots", type=int, nargs="+", help="N of attention and steps")
    parser.add_argument("--rounds", type=int, help="visits of each arm")
    options = parser.parse_args()
    plan = Plan()
    if options.dry_run:
        mx.set_default_device(mx.cpu)
        plan = plan.tiny()
    elif choice.gpu() is None:
        sys.exit("There is no GPU here that MLX can use; --dry-run runs tiny sizes on the CPU.")
    if options.slots:
        plan = replace(plan, slots=tuple(options.slots))
    if options.rounds:
        plan = replace(plan, rounds=options.rounds)

    report: dict[str, Any] = {"dry_run": options.dry_run, "machine": machine()}
    for part, times in (("attention", attention_times), ("step", step_times)):
        if options.only not in (None, part):
            continue
        report[part] = []
        for slots in plan.slots:
            print(f"{part}, N {slots}", file=sys.stderr)
            report[part].append(times(plan, slots))
            mx.clear_cache()
    if options.only in (None, "model"):
        print("model", file=sys.stderr)
        report["model"] = model_times(plan)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
