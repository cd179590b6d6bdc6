"""Golden 9: conversations of three turns with pins.

They pin tokens before any came (a system prompt), tokens of a later turn, and tokens that are held
already; some heads are too small for the pins, and in some turns less of the past counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from golden import trajectory
from golden.group import Parameters, parameters_of
from golden.trajectory import inputs, run, watched
from mlx_h2o.policies import make_policy

__all__ = ["NAME", "cases", "inputs", "run", "watched"]

NAME = "turns"

# Three turns, each read and answered; the third brings a document that exceeds the budget.
CALLS = [[26, 1], [1, 40], [12, 1], [1, 40], [40, 1], [1, 40]]
# The first calls of the second and the third turn.
SECOND, THIRD = 41, 82
RECORDED = [0, 1, 40, 41, 42, 60, 82, 83, 100, 122]
CHUNKS = [SECOND]
# (call before which the span is pinned, first position, one past the last).
PINS = [[0, 0, 5], [SECOND, 68, 71], [THIRD, 117, 119]]
MIXED = trajectory.STORES["mixed"]


def cases() -> Iterator[tuple[str, Parameters]]:
    seed = 12000

    def case(policy: str, carries: list[float], **changed: Any) -> Parameters:
        nonlocal seed
        seed += 16
        own = {"sink": 2, "recent": 0.25}
        if policy in ("h2o", "salient"):
            own["window"] = 16
        parameters = {"policy": parameters_of(make_policy(policy, **own)), "pins": PINS, **changed}
        turns = {"turn_calls": [SECOND, THIRD], "carries": carries}
        talk = {"calls": CALLS, "recorded": RECORDED, "chunks": CHUNKS}
        return trajectory.plain_case(seed, **parameters, **turns, **talk)

    ragged = {"budgets": trajectory.RAGGED, "remainder": True}
    for policy in ("salient", "distinct", "h2o", "ema", "ema-logits", "tova"):
        yield policy, case(policy, [0.5, 0.25])
        yield f"{policy}-ragged", case(policy, [0.25, 0.0], cache=ragged)
    for policy in ("streaming", "keydiff"):
        yield f"{policy}-ragged", case(policy, [1.0, 1.0], cache=ragged)
    yield "salient-mixed", case("salient", [0.5, 0.0], cache=ragged | MIXED)
    yield "salient-batch", case("salient", [0.5, 0.5], batch=2)
    # The smallest head gets a slot of the larger one.
    yield "salient-raised", case("salient", [0.5, 0.5], cache=ragged, pins=[[0, 0, 14]])
    plain = {"budgets": [[64, 64], [64, 64]], "remainder": True, "attending": False}
    pins = [[0, 0, 20], [SECOND, 68, 80]]
    yield "keydiff-plain", case("keydiff", [1.0, 1.0], kind="plain", cache=plain, pins=pins)
