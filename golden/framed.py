"""Golden 8: conversations of group `trajectory`, packed keys with key scaling (`Frame`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from golden import trajectory
from golden.group import Arrays, Parameters, parameters_of
from golden.numbers import MEAN_KEY, WORTH, tensor
from golden.trajectory import run, watched
from mlx_h2o.policies import make_policy

__all__ = ["NAME", "cases", "inputs", "run", "watched"]

NAME = "framed"

STORES: dict[str, dict[str, Any]] = {
    "6bit": {"bits": 6, "group_size": 32},
    "4bit": {"bits": 4, "group_size": 32},
    "k5": {"k_bits": 5, "group_size": 32},
    "mixed": {"bits": 4, "group_size": 32, "recent_bits": 8},
    "mixed-dense": {"k_bits": 4, "v_bits": 6, "group_size": 32, "recent_bits": 16},
}


def cases() -> Iterator[tuple[str, Parameters]]:
    seed = 9000

    def case(policy: str, store: str, **changed: Any) -> Parameters:
        nonlocal seed
        seed += 16
        of_policy = parameters_of(make_policy(policy, sink=2, recent=0.25))
        cache = {"budgets": trajectory.RAGGED, "remainder": True, **STORES[store]}
        return trajectory.plain_case(seed, policy=of_policy, cache=cache, **changed)

    for policy in ("distinct", "h2o", "keydiff"):
        for store in STORES:
            yield f"{policy}-{store}", case(policy, store)
    yield "distinct-batch", case("distinct", "6bit", batch=2)
    yield "distinct-many-queries", case("distinct", "4bit", query_heads=8)
    # This case has no centre: attention sinks would not move with it.
    yield "distinct-sinks", case("distinct", "6bit", sinks=True)


def inputs(parameters: Parameters) -> Arrays:
    """The key scaling of each layer: centre and scale, `[layers, Hk, D]`."""
    p, layers = parameters, len(parameters["cache"]["budgets"])
    shape = layers, p["kv_heads"], p["key_width"]
    centre = mx.zeros(shape) if p["sinks"] else 2 * tensor(p["seed"], MEAN_KEY, shape)
    return {
        "frame.centre": centre,
        "frame.scale": 0.5 + mx.abs(tensor(p["seed"], WORTH, shape)),
    }
