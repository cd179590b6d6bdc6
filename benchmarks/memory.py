"""Memory that is told and memory that is held, by these caches and by mlx-lm's, in one run.

    python -m benchmarks.memory --slots 512

Each kind of caches gets a process of its own, which says after each stage what its caches tell
(`nbytes`), what MLX holds for them (active memory), what lies in MLX's pool of free buffers, the
most that was active during the stage, and how much larger the process is than before. The model's
weights and a conversation that warms everything up, evictions included, come before. The command
fails where one of ours holds more than 1.05 times what it tells.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

import mlx_h2o
from benchmarks.weighing import MOST_OVER, SEQUENCES, Scale, Weight, parser
from mlx_h2o._blas import use_openblas

#: Of the model: two layers of eight KV heads, 16 KiB of keys and values a token in float32.
LAYERS, HEADS, GROUP, WIDTH = 2, 8, 2, 128
# Tokens over the slots: something is evicted.
WARM_UP = 64
STEPS = 16
COLUMNS = ("caches", "stage", "told", "held", "held / told", "pool", "peak", "resident")

#: Makes the caches of one conversation.
Make = Callable[[nn.Module, int], list[Any]]


def ours(**settings: Any) -> Make:
    """Bounded caches of so many slots."""
    return lambda model, slots: mlx_h2o.make_prompt_cache(model, slots, **settings)


def theirs(kind: Callable[[int], Any]) -> Make:
    """mlx-lm's, each layer's made of a number of slots."""
    return lambda model, slots: [kind(slots) for _ in range(LAYERS)]


ARMS: dict[str, Make] = {
    "mlx-h2o": ours(),
    "mlx-h2o, 8 bits": ours(bits=8),
    "mlx-h2o, 4 bits": ours(bits=4),
    "mlx-h2o, h2o": ours(policy="h2o"),
    "KVCache": theirs(lambda slots: KVCache()),
    "RotatingKVCache": theirs(lambda slots: RotatingKVCache(slots, keep=4)),
    "QuantizedKVCache, 8 bits": theirs(lambda slots: QuantizedKVCache(64, 8)),
}
#: mlx-lm cannot batch it.
UNBATCHED = ("QuantizedKVCache, 8 bits",)


def the_model() -> nn.Module:
    """Of random weights, whose caches are large beside them."""
    shape = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 256,
        "num_attention_heads": HEADS * GROUP,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH,
        "rms_norm_eps": 1e-5,
        "vocab_size": 256,
        "max_position_embeddings": 8192,
    }
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(shape))
    mx.eval(model.parameters())
    return model


def read(model: nn.Module, cache: list[Any], tokens: int, chunk: int) -> None:
    """A prompt, in chunks as mlx-lm reads it."""
    for start in range(0, tokens, chunk):
        model(mx.full((1, min(chunk, tokens - start)), 5, mx.int32), cache=cache)
        mx.eval([entry.state for entry in cache])
        mx.clear_cache()  # as mlx-lm does


def decode(model: nn.Module, cache: list[Any], tokens: int) -> None:
    """Token after token."""
    for _ in range(tokens):
        mx.eval(model(mx.full((1, 1), 7, mx.int32), cache=cache))


def reported_bytes(cache: list[Any]) -> int:
    """What the caches of a conversation say."""
    return sum(entry.nbytes for entry in cache)


def conversation(arm: str, args: argparse.Namespace) -> Iterator[Weight]:
    """One conversation: a prompt, tokens, growth, and another size."""
    model, make = the_model(), ARMS[arm]
    cache = make(model, args.slots)
    read(model, cache, args.slots + WARM_UP, args.chunk)
    decode(model, cache, 2)
    del cache
    scale = Scale(arm)
    cache = make(model, args.slots)
    read(model, cache, 200, args.chunk)
    yield scale.weighed("a short prompt", reported_bytes(cache))
    decode(model, cache, 100)
    yield scale.weighed("growth while decoding", reported_bytes(cache))
    read(model, cache, args.tokens, args.chunk)
    yield scale.weighed("a long prompt", reported_bytes(cache))
    decode(model, cache, 64)
    yield scale.weighed("decoding", reported_bytes(cache))
    if "mlx-h2o" not in arm:
        return
    for name, slots in (("half the slots", args.slots // 2), ("all of them", args.slots)):
        mlx_h2o.resize(cache, slots)
        read(model, cache, args.slots, args.chunk)
        decode(model, cache, 8)
        yield scale.weighed(f"resized: {name}", reported_bytes(cache))


def batch(arm: str, args: argparse.Namespace) -> Iterator[Weight]:
    """Sequences that decode side by side, in mlx-lm's batches."""
    model, make = the_model(), ARMS[arm]
    if arm in UNBATCHED:
        return
    warm = BatchGenerator(model, prefill_step_size=args.chunk, max_tokens=2)
    warm.insert(
        [[5] * (args.slots + WARM_UP)] * 2, caches=[make(model, args.slots) for _ in range(2)]
    )
    while any(warm.next()):
        pass
    del warm
    scale = Scale(arm)
    generator = BatchGenerator(model, prefill_step_size=args.chunk, max_tokens=4 * STEPS)
    prompts = [[5] * (args.tokens // SEQUENCES + 10 * i) for i in range(SEQUENCES)]
    generator.insert(prompts, caches=[make(model, args.slots) for _ in prompts])
    while len(generator.next()[1]) < len(prompts):
        pass
    yield scale.weighed(f"a batch of {SEQUENCES}: the prompts", generator.prompt_cache_nbytes)
    for _ in range(STEPS):
        generator.next()
    yield scale.weighed(f"a batch of {SEQUENCES}: decoding", generator.prompt_cache_nbytes)


def measured(arm: str, args: argparse.Namespace) -> list[Weight]:
    """All stages of an arm, in this process."""
    use_openblas()
    return [*conversation(arm, args), *batch(arm, args)]


def in_own_process(arm: str) -> list[Weight]:
    """The same in a process of its own, with this one's options."""
    command = [sys.executable, "-m", "benchmarks.memory", *sys.argv[1:], "--arm", arm]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [Weight(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    args = parser().parse_args()
    if args.arm:
        print(json.dumps([asdict(row) for row in measured(args.arm, args)]))
        return
    rows = [row for arm in ARMS for row in in_own_process(arm)]
    print(f"Keys and values of {args.tokens} tokens and {args.slots} slots, MiB\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---|---|" + "---:|" * (len(COLUMNS) - 2))
    for row in rows:
        print("| " + " | ".join(row.cells) + " |")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if over := [f"{row.caches}, {row.stage}" for row in rows if row.is_too_much]:
        sys.exit(f"More than {MOST_OVER} of what is told is held by {'; '.join(over)}.")


if __name__ == "__main__":
    main()
