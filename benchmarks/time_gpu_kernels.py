"""Times on a GPU: attention with and without export against MLX's own, and whole-model decoding.

For a Mac, or a machine with an NVIDIA GPU and mlx[cuda]. Prints JSON, and progress on stderr. With
--dry-run everything runs at tiny sizes on the CPU, which only shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.metadata import version
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import qwen3

from benchmarks.measuring import Arm, Samples, in_turns, timed
from benchmarks.model import decoding, steps, window_cache
from mlx_h2o import make_prompt_cache
from mlx_h2o.attention.backends import choice
from mlx_h2o.attention.backends.attention_launches import EXPORT_LOGITS, EXPORT_NOTHING
from mlx_h2o.attention.ops import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_scores,
)

MLX, OURS, EXPORTING = "MLX", "ours", "ours, exporting logits and lse"
FULL, WINDOW, H2O = "KVCache", "RotatingKVCache", "h2o"
# The keys and values read in a row take more bytes than any cache of a GPU.
CYCLED_BYTES = 1 << 30
MOST_COPIES = 64
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

#: Takes queries, keys and values and returns the output, of the queries' shape.
Attention = Callable[[mx.array, mx.array, mx.array], mx.array]


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
    q = mx.random.normal((1, plan.query_heads, 1, plan.width)).astype(mx.float16)
    mx.eval(q)

    def over(attention: Attention) -> Arm:
        def work() -> None:
            # Each output is the next call's queries, like layers that follow each other.
            out = q
            for k, v in pairs:
                out = attention(out, k, v)
            mx.eval(out)

        return timed(work, SHORTEST)

    scale = plan.width**-0.5
    return {
        MLX: over(lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)),
        OURS: over(ours(scale, EXPORT_NOTHING)),
        EXPORTING: over(ours(scale, EXPORT_LOGITS)),
    }


def ours(scale: float, export: int) -> Attention:
    """The GPU's kernels, or the CPU's if there is no GPU."""
    gpu = choice.gpu()
    if gpu is not None:
        return lambda q, k, v: gpu.attend(q, k, v, scale=scale, export=export).out
    if export == EXPORT_NOTHING:
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=scale)
    return lambda q, k, v: scaled_dot_product_attention_with_scores(q, k, v, scale=scale)[0]


def copies(plan: Plan, slots: int) -> list[tuple[mx.array, mx.array]]:
    """Keys and values, a pair for each call."""

    def rows() -> mx.array:
        return mx.random.normal((1, plan.kv_heads, slots, plan.width)).astype(mx.float16)

    pairs = [(rows(), rows()) for _ in range(calls(plan, slots))]
    mx.eval(pairs)
    return pairs


def calls(plan: Plan, slots: int) -> int:
    """The number of calls in a row in a measurement."""
    return min(MOST_COPIES, -(-CYCLED_BYTES // kv_bytes(plan, slots)))


def kv_bytes(plan: Plan, slots: int) -> int:
    """Bytes of the keys and values of one call."""
    return 2 * plan.kv_heads * slots * plan.width * 2


def attention_times(plan: Plan, slots: int) -> dict[str, Any]:
    """One size: seconds of a call, and the rates that follow."""
    samples = in_turns(attention_arms(plan, slots), plan.rounds)
    arms = of_one(samples, calls(plan, slots))
    for arm in arms.values():
        arm["bytes_per_second"] = kv_bytes(plan, slots) / arm["seconds"]
    return {
        "query_heads": plan.query_heads,
        "kv_heads": plan.kv_heads,
        "width": plan.width,
        "slots": slots,
        "arms": arms,
        "time_over_mlx": samples.ratio(OURS, MLX),
        "time_of_export": samples.ratio(EXPORTING, OURS),
    }


def of_one(samples: Samples, count: int) -> dict[str, dict[str, float]]:
    """Median and quartiles of one call, or token, of `count`."""
    return {
        arm: {name: seconds / count for name, seconds in found.items()}
        for arm, found in samples.as_json().items()
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
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "mlx-h2o")},
        "date": date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--only", choices=("attention", "model"), help="measure one of them")
    parser.add_argument("--slots", type=int, nargs="+", help="N of the attention")
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
    if options.only != "model":
        report["attention"] = []
        for slots in plan.slots:
            print(f"attention, N {slots}", file=sys.stderr)
            report["attention"].append(attention_times(plan, slots))
            mx.clear_cache()
    if options.only != "attention":
        print("model", file=sys.stderr)
        report["model"] = model_times(plan)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
