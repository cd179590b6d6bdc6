"""Golden 3: each policy's scores after attention over a step or a chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx

from golden.group import Arrays, Parameters, parameters_of, policy_of
from golden.numbers import SINKS, WORTH, K, Q, tensor
from mlx_h2o.attention.ops import scaled_dot_product_attention_with_scores
from mlx_h2o.policies import Observation, make_policy

NAME = "accumulate"


def cases() -> Iterator[tuple[str, Parameters]]:
    policies = {
        "distinct": make_policy("distinct"),
        "h2o": make_policy("h2o"),
        "ema": make_policy("ema"),
        "ema-0.5": make_policy("ema", decay=0.5),
        "ema-logits": make_policy("ema-logits"),
        "tova": make_policy("tova"),
    }
    seed = 4000
    for name, policy in policies.items():
        for L in (1, 6):
            for Hq, sinks in ((2, False), (6, True)):
                seed += 1
                yield (
                    f"{name}-L{L}-G{Hq // 2}{'-sinks' if sinks else ''}",
                    {
                        "seed": seed,
                        "policy": parameters_of(policy),
                        "batch": 2,
                        "query_heads": Hq,
                        "kv_heads": 2,
                        "queries": L,
                        "keys": 21,
                        "key_width": 32,
                        "scale": 0.1875,
                        "sinks": sinks,
                    },
                )


def inputs(parameters: Parameters) -> Arrays:
    """Logits and lse of causal attention, and earlier scores (0 for the new slots)."""
    p = parameters
    B, H, N, L = p["batch"], p["kv_heads"], p["keys"], p["queries"]
    q = tensor(p["seed"], Q, (B, p["query_heads"], L, p["key_width"]))
    k = tensor(p["seed"], K, (B, H, N, p["key_width"]))
    sinks = tensor(p["seed"], SINKS, (p["query_heads"],)) if p["sinks"] else None
    _, logits, lse = scaled_dot_product_attention_with_scores(
        q, k, k, scale=p["scale"], mask="causal", sinks=sinks
    )
    scores = mx.abs(tensor(p["seed"], WORTH, (B, H, N)))
    return {"logits": logits, "lse": lse, "scores": mx.where(mx.arange(N) < N - L, scores, 0.0)}


def run(parameters: Parameters, inputs: Arrays) -> Arrays:
    policy = policy_of(parameters["policy"])
    scores = inputs["scores"]
    observation = Observation(inputs["logits"], inputs["lse"], scores.shape[1])
    return {"scores": policy.accumulate(scores, observation)}


def watched(parameters: Parameters, inputs: Arrays) -> tuple[Arrays, float]:
    return run(parameters, inputs), math.inf
