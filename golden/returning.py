"""Golden 11: conversations of group `trajectory`, in which evicted rows come back from a file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from golden import framed, trajectory
from golden.caches import caches_of
from golden.group import Arrays, Parameters, parameters_of
from golden.margins import watching
from mlx_h2o.models.make import spill_to
from mlx_h2o.policies import make_policy
from mlx_h2o.spill.setting import Returns, Spill

NAME = "returning"

# A prompt in two chunks, decoding, a later turn, decoding.
CALLS = [[40, 1], [24, 1], [1, 50], [5, 1], [1, 40]]
# The second chunk, a step after rows came back, the turn, a step in it, the last.
RECORDED = [1, 18, 52, 60, 92]
CHUNKS = [52]
RETURNS = {"every": 8, "window": 4, "pages": 1, "rows": 6, "room": 0.5, "ahead": 3}
RAGGED = [[20, 32], [28, 24]]
FRAMED = "framed-"


def cases() -> Iterator[tuple[str, Parameters]]:
    seed = 15000

    def case(policy: str, budgets: list[list[int]], **changed: Any) -> Parameters:
        nonlocal seed
        seed += 16
        of_policy = parameters_of(make_policy(policy, sink=2, recent=0.25))
        cache = {"budgets": budgets, "remainder": True, **changed.pop("cache", {})}
        constants = {"calls": CALLS, "recorded": RECORDED, "chunks": CHUNKS, "returns": RETURNS}
        # To which KV heads of each layer rows come back.
        heads = changed.pop("heads", [[1, 1], [1, 1]])
        return trajectory.plain_case(
            seed, policy=of_policy, cache=cache, returning=heads, **constants, **changed
        )

    for store in ("dense", "4bit", "mixed"):
        yield f"salient-{store}", case("salient", RAGGED, cache=trajectory.STORES[store])
    for store in ("4bit", "mixed"):
        packing = framed.STORES[store]
        yield f"{FRAMED}{store}", case("salient", RAGGED, cache=packing, framed=True)
    yield "uniform", case("salient", trajectory.UNIFORM)
    yield "h2o-some-heads", case("h2o", RAGGED, heads=[[1, 0], [0, 1]])
    # Its scores are no sums of masses.
    yield "tova", case("tova", RAGGED)
    yield "attention-sinks", case("distinct", RAGGED, sinks=True)
    pins = [[1, 3, 6], [20, 60, 63]]
    yield "pins", case("salient", RAGGED, pins=pins)
    without = {"remainder": False}
    yield "no-remainder", case("salient", RAGGED, cache=without)
    for turned, rope in trajectory.ROPES.items():
        yield f"rolling{turned}", case("salient", RAGGED, cache={**without, "rope": rope})


def inputs(parameters: Parameters) -> Arrays:
    """The key scaling of each layer, where the case has one."""
    return framed.inputs(parameters) if parameters.get("framed") else {}


def run(parameters: Parameters, inputs: Arrays) -> Arrays:
    p = parameters
    returns = Returns(**p["returns"])
    caches = caches_of(p, inputs)
    heads = [frozenset(h for h, has in enumerate(layer) if has) for layer in p["returning"]]
    with tempfile.TemporaryDirectory() as folder:
        spill_to(caches, Spill(Path(folder), returns=returns), heads)
        results, _ = trajectory.replayed(p, inputs, caches)
        came = []
        for cache in caches:
            assert cache.spill is not None
            assert not cache.spill.failure
            assert cache.back is not None
            came.append(cache.back.returned)
    return {**results, "returned": mx.array(came, mx.int32)}


def watched(parameters: Parameters, inputs: Arrays) -> tuple[Arrays, float]:
    with watching() as margins:
        results = run(parameters, inputs)
    return results, min(margins)
