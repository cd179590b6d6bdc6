"""Golden 1: attention with scores. dtypes x GQA x masks x attention sinks x value width x L."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import mlx.core as mx

from golden.group import Arrays, Parameters
from golden.numbers import MASK, SINKS, K, Q, V, hashed, seed_of, tensor
from mlx_h2o.attention.ops import (
    attention_mass,
    scaled_dot_product_attention_with_scores,
)
from mlx_h2o.slots.softmax import Mask

NAME = "attention"


def cases() -> Iterator[tuple[str, Parameters]]:
    product = itertools.product(
        ("float32", "float16", "bfloat16"),
        ((4, 4), (4, 2), (8, 1)),
        ("none", "causal", "bool", "additive"),
        (False, True),
        (64, 32),
        (1, 3),
    )
    for i, (dtype, (Hq, Hk), mask, sinks, Dv, L) in enumerate(product):
        name = f"{dtype}-{Hq}of{Hk}-{mask}{'-sinks' if sinks else ''}-v{Dv}-L{L}"
        yield (
            name,
            {
                "seed": 1000 + i,
                "dtype": dtype,
                "batch": 1 + i % 2,
                "query_heads": Hq,
                "kv_heads": Hk,
                "queries": L,
                "keys": 19,
                "key_width": 64,
                "value_width": Dv,
                "scale": 0.125,
                "mask": mask,
                "sinks": sinks,
            },
        )


def inputs(parameters: Parameters) -> Arrays:
    p = parameters
    if p["mask"] in ("none", "causal"):
        return {}
    batch = (p["batch"], 1) if p["mask"] == "bool" else ()
    shape = (*batch, p["queries"], p["keys"])
    visible = hashed(seed_of(p["seed"], MASK), math.prod(shape)) >= 2**62
    visible = visible.reshape(shape)
    if p["mask"] == "bool":
        visible[..., 0, :] &= p["queries"] == 1  # With more queries than one, the first sees none.
        return {"mask": mx.array(visible)}
    added = tensor(p["seed"], MASK, shape, p["dtype"])
    return {"mask": mx.where(mx.array(visible), added, mx.finfo(added.dtype).min)}


def run(parameters: Parameters, inputs: Arrays) -> Arrays:
    p = parameters
    B, Hk, N = p["batch"], p["kv_heads"], p["keys"]
    q = tensor(p["seed"], Q, (B, p["query_heads"], p["queries"], p["key_width"]), p["dtype"])
    k = tensor(p["seed"], K, (B, Hk, N, p["key_width"]), p["dtype"])
    v = tensor(p["seed"], V, (B, Hk, N, p["value_width"]), p["dtype"])
    mask: Mask = inputs.get("mask")
    if p["mask"] == "causal":
        mask = "causal"
    sinks = tensor(p["seed"], SINKS, (p["query_heads"],)) if p["sinks"] else None
    out, scores, lse = scaled_dot_product_attention_with_scores(
        q, k, v, scale=p["scale"], mask=mask, sinks=sinks
    )
    return {"out": out, "scores": scores, "lse": lse, "mass": attention_mass(scores, lse, Hk)}


def watched(parameters: Parameters, inputs: Arrays) -> tuple[Arrays, float]:
    return run(parameters, inputs), math.inf
