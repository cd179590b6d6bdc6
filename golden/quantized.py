"""Golden 2: packing rows, and attention over packed rows. Bits of keys and values x group sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import mlx.core as mx

from golden.group import Arrays, Parameters
from golden.numbers import SINKS, K, Q, V, tensor
from mlx_h2o.attention.ops import scaled_dot_product_attention_quantized_with_scores
from mlx_h2o.slots.packed import PackedRows

NAME = "quantized"

BITS = ((2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (8, 8), (8, 4), (4, 8), (3, 6), (2, 8))


def cases() -> Iterator[tuple[str, Parameters]]:
    product = itertools.product(BITS, (32, 64, 128), (("none", 1), ("causal", 4)))
    for i, ((k_bits, v_bits), group_size, (mask, L)) in enumerate(product):
        dtype = ("float32", "float32", "float16", "bfloat16")[i % 4]
        sinks = i % 3 == 0
        name = f"k{k_bits}v{v_bits}-g{group_size}-{mask}-{dtype}{'-sinks' if sinks else ''}"
        yield (
            name,
            {
                "seed": 2000 + i,
                "dtype": dtype,
                "batch": 1,
                "query_heads": 4,
                "kv_heads": 2,
                "queries": L,
                "keys": 11,
                "key_width": 128,
                "value_width": 128,
                "scale": 0.0625,
                "mask": mask,
                "sinks": sinks,
                "k_bits": k_bits,
                "v_bits": v_bits,
                "group_size": group_size,
            },
        )


def inputs(parameters: Parameters) -> Arrays:
    p = parameters
    packed: dict[str, mx.array] = {}
    for name, which, width in (("k", K, p["key_width"]), ("v", V, p["value_width"])):
        rows = tensor(p["seed"], which, (p["batch"], p["kv_heads"], p["keys"], width), p["dtype"])
        of = PackedRows.of(rows, p[f"{name}_bits"], p["group_size"])
        packed |= {f"{name}_w": of.words, f"{name}_s": of.scales, f"{name}_b": of.biases}
    return packed


def run(parameters: Parameters, inputs: Arrays) -> Arrays:
    p = parameters
    shape = (p["batch"], p["query_heads"], p["queries"], p["key_width"])
    out, scores, lse = scaled_dot_product_attention_quantized_with_scores(
        tensor(p["seed"], Q, shape, p["dtype"]),
        *(inputs[f"{x}_{part}"] for x in "kv" for part in "wsb"),
        scale=p["scale"],
        k_bits=p["k_bits"],
        v_bits=p["v_bits"],
        group_size=p["group_size"],
        mask=None if p["mask"] == "none" else p["mask"],
        sinks=tensor(p["seed"], SINKS, (p["query_heads"],)) if p["sinks"] else None,
    )
    return {"out": out, "scores": scores, "lse": lse}


def watched(parameters: Parameters, inputs: Arrays) -> tuple[Arrays, float]:
    return run(parameters, inputs), math.inf
