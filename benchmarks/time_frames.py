"""The cost of key scaling (`Frame`) to a decode step, and of our encoder to a prompt.

    python -m benchmarks.time_frames [--rounds 41] [--model smollm2-135m] [--tokens 2048]

One layer shaped like SmolLM2's (9 query heads, 3 KV heads, width 64), 512 slots in 6 bits, with and
without key scaling, step after step through the cache; then, with a model, a prompt read with rows
packed by range and by `mx.quantize`. Arms take turns; ratios are of medians, and in brackets of the
fastest quarters.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest import mock

import mlx.core as mx

from benchmarks.measuring import Arm, Samples, in_turns, timed
from mlx_h2o import H2OKVCache, load, make_prompt_cache
from mlx_h2o.attention.backends.choice import pack
from mlx_h2o.layer import layer
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import PackedRows

QUERY_HEADS, HEADS, WIDTH, SLOTS, BITS = 9, 3, 64, 512, 6
FRAMED, PLAIN = "in a frame", "as they come"
BY_RANGE, BY_MX = "by range", "mx.quantize"


def decoding(dtype: mx.Dtype, framed: bool) -> Arm:
    """Steps of one full layer."""

    def rows(heads: int, tokens: int) -> mx.array:
        return mx.random.normal((1, heads, tokens, WIDTH)).astype(dtype)

    frame = Frame.of(rows(HEADS, 64)) if framed else None
    cache = H2OKVCache(budgets=[SLOTS] * HEADS, bits=BITS, frame=frame)

    def call(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        mask = "causal" if q.shape[2] > 1 else None
        keys, values = cache.update_and_fetch(k, v)
        return cache.attend(q, keys, values, scale=WIDTH**-0.5, mask=mask)

    mx.eval(call(*(rows(heads, SLOTS + 8) for heads in (QUERY_HEADS, HEADS, HEADS))))
    token = [rows(heads, 1) for heads in (QUERY_HEADS, HEADS, HEADS)]
    mx.eval(token)
    return timed(lambda: mx.eval(call(*token)))


def by_mx(rows: mx.array, bits: int, group_size: int) -> PackedRows:
    words, scales, biases = mx.quantize(rows, group_size=group_size, bits=bits)
    return PackedRows(words, scales, biases, bits, group_size)


def reading(model: object, tokens: int, packed_by: Callable[..., PackedRows]) -> Arm:
    """A prompt of `tokens` tokens, from an empty cache."""
    prompt = mx.arange(3, 3 + tokens)[None]

    def arm() -> float:
        cache = make_prompt_cache(model, tokens + 64, bits=BITS, budgets="uniform")
        start = time.perf_counter()
        with mock.patch.object(layer, "pack", packed_by):
            for first in range(0, tokens, 512):
                mx.eval(model(prompt[:, first : first + 512], cache=cache))
        return time.perf_counter() - start

    return arm


def print_ratio(what: str, samples: Samples, arm: str, base: str) -> None:
    seconds = samples.median(base)
    ratio, quiet = samples.ratio(arm, base), samples.quiet_ratio(arm, base)
    print(f"{what}: {arm} over {base} {ratio:.3f} ({quiet:.3f}), {1e3 * seconds:.3f} ms {base}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        arms = {name: decoding(dtype, name == FRAMED) for name in (FRAMED, PLAIN)}
        print_ratio(f"a step in {dtype}", in_turns(arms, arguments.rounds), FRAMED, PLAIN)
        rows = mx.random.normal((1, HEADS, arguments.tokens, WIDTH)).astype(dtype)
        mx.eval(rows)
        arms = {
            name: timed(lambda rows=rows, of=of: mx.eval(of(rows, BITS, 64).arrays))
            for name, of in ((BY_RANGE, pack), (BY_MX, by_mx))
        }
        print_ratio(
            f"packing a prompt in {dtype}", in_turns(arms, arguments.rounds), BY_RANGE, BY_MX
        )
    if arguments.model:
        model, _ = load(arguments.model)
        packers = ((BY_RANGE, pack), (BY_MX, by_mx))
        arms = {name: reading(model, arguments.tokens, of) for name, of in packers}
        samples = in_turns(arms, max(arguments.rounds // 5, 3))
        print_ratio(f"a prompt of {arguments.tokens}", samples, BY_RANGE, BY_MX)


if __name__ == "__main__":
    main()
