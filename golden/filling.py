"""Golden 10: conversations of group `trajectory` in caches that grow to new shares of slots.

They grow through two stages, each begun by a single step, by a chunk, or both by one prompt;
nothing is evicted before the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from golden import trajectory
from golden.group import Parameters, parameters_of
from golden.trajectory import inputs, run, watched
from mlx_h2o.policies import make_policy

__all__ = ["NAME", "cases", "inputs", "run", "watched"]

NAME = "filling"

UNIFORM = trajectory.UNIFORM
# (tokens, slots of each layer's heads): some heads grow and shrink again, some become alike.
STAGES = [[24, [[34, 14], [30, 18]]], [48, [[14, 26], [28, 28]]]]
# Tokens 25 and 49 come alone, in chunks, or both in one.
TALKS: dict[str, Parameters] = {
    "steps": {
        "calls": [[9, 2], [1, 8], [7, 1], [1, 16], [11, 1], [1, 12]],
        "recorded": [7, 8, 10, 26, 39],
        "chunks": [10],
    },
    "chunks": {
        "calls": [[20, 1], [8, 1], [1, 12], [12, 1], [1, 10]],
        "recorded": [0, 1, 14, 24],
        "chunks": [14],
    },
    "prompt": {"calls": [[60, 1], [1, 8]], "recorded": [0, 1, 8], "chunks": [1]},
}


def cases() -> Iterator[tuple[str, Parameters]]:
    seed = 14000

    def case(policy: str, store: str = "dense", talk: str = "steps", **changed: Any) -> Parameters:
        nonlocal seed
        seed += 16
        own: dict[str, Any] = {"sink": 2, "recent": 0.25, **changed.pop("settings", {})}
        if policy in ("h2o", "salient"):
            own["window"] = 16
        cache = {"budgets": UNIFORM, "remainder": True, **trajectory.STORES[store]}
        cache |= {"filling": STAGES, **changed.pop("cache", {})}
        of_policy = parameters_of(make_policy(policy, **own))
        return trajectory.plain_case(seed, policy=of_policy, cache=cache, **TALKS[talk], **changed)

    for policy in ("salient", "distinct", "h2o", "ema", "tova", "streaming", "keydiff"):
        yield policy, case(policy)
    for talk in ("chunks", "prompt"):
        yield f"salient-{talk}", case("salient", talk=talk)
        yield f"distinct-8bit-{talk}", case("distinct", "8bit", talk)
        yield f"salient-mixed-{talk}", case("salient", "mixed", talk)
    for policy, store in (("salient", "4bit"), ("salient", "mixed"), ("ema", "mixed-dense")):
        yield f"{policy}-{store}", case(policy, store)
    yield "salient-batch", case("salient", batch=2)
    yield "salient-three", case("salient", settings={"evict_every": 3})
    yield "h2o-no-remainder", case("h2o", cache={"remainder": False})
    # In the second stage the smallest head gets slots of the other one for its pins.
    yield "salient-pins", case("salient", pins=[[0, 0, 6], [12, 26, 31]])
