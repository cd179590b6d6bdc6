"""Golden 3: priorities and choices. Every policy, unit, weighting, count of victims; ties."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from golden.group import Arrays, Parameters, parameters_of, policy_of
from golden.margins import margin
from golden.numbers import MEAN_KEY, WEIGHT, WORTH, K, V, hashed, seed_of, tensor
from mlx_h2o.policies import Policy, Slots, make_policy
from mlx_h2o.policies.selection import evictable_slots, select_kept, select_victims
from mlx_h2o.slots.packed import value_lengths

NAME = "selection"

SCORED = ("distinct", "h2o", "ema", "ema-logits", "tova")
UNSCORED = ("streaming", "keydiff")
# Weights of the policy `salient`, by the case's name.
SALIENT: dict[str, dict[str, float]] = {
    "": {},
    "-values": {"distance_weight": 0.0, "value_weight": 1.5, "age_weight": 0.0},
}


def policies() -> Iterator[tuple[str, Policy]]:
    """Every policy with every setting that changes a choice."""
    for name in SCORED:
        for unit, aged, weighted in itertools.product(
            ("head", "layer"), (False, True), (False, True)
        ):
            marks = ("-aged" if aged else "") + ("-valued" if weighted else "")
            yield (
                f"{name}-{unit}{marks}",
                make_policy(
                    name, unit=unit, age_normalised=aged, value_weighted=weighted, sink=3, recent=5
                ),
            )
    keys_only = {"mass_weight": 0.0, "age_weight": 0.25}
    for unit in ("head", "layer"):
        yield (
            f"distinct-keys-{unit}",
            make_policy("distinct", unit=unit, sink=3, recent=0.25, **keys_only),
        )
        for name in UNSCORED:
            yield f"{name}-{unit}", make_policy(name, unit=unit, sink=3, recent=5)


SHAPE = {"batch": 2, "kv_heads": 2, "slots": 24, "key_width": 32, "value_width": 48}


def cases() -> Iterator[tuple[str, Parameters]]:
    seeds = itertools.count(5016, 16)

    def case(kind: str, policy: Policy, **numbers: Any) -> Parameters:
        of_case = {"kind": kind, "seed": next(seeds), "policy": parameters_of(policy)}
        return {**of_case, **SHAPE, **numbers}

    def choices(name: str, policy: Policy) -> Iterator[tuple[str, Parameters]]:
        # Below the least count for a mean, or at it; only some policies use a mean.
        for evicted in (15, 16) if policy.uses_evicted_mean else (16,):
            for count in (1, 3):
                numbers = {"evicted": evicted, "count": count, "scores": "numbers"}
                yield f"victims-{name}-{count}-of-{evicted}", case("victims", policy, **numbers)
        for prompt, pool in (("window", 5), ("full", 1), ("window", 1)):
            of_prompts = make_policy(policy, prompt=prompt, pool=pool)
            numbers = {"evicted": 7, "count": 15, "scores": "numbers"}
            yield f"kept-{name}-{prompt}-{pool}", case("kept", of_prompts, **numbers)

    for name, policy in policies():
        yield from choices(name, policy)
    for name in ("h2o", "ema", "tova"):
        for unit, count in itertools.product(("head", "layer"), (1, 4)):
            policy = make_policy(name, unit=unit, sink=3, recent=5)
            numbers = {"evicted": 16, "count": count, "scores": "ties"}
            yield f"victims-{name}-{unit}-ties-{count}", case("victims", policy, **numbers)
    for unit, count in itertools.product(("head", "layer"), (1, 6)):
        policy = make_policy("h2o", unit=unit, sink=3, recent=5)
        yield f"extremes-{unit}-{count}", case("extremes", policy, evicted=16, count=count)
    for name, weights in SALIENT.items():
        for unit in ("head", "layer"):
            policy = make_policy("salient", unit=unit, sink=3, recent=5, **weights)
            yield from choices(f"salient{name}-{unit}", policy)


def inputs(parameters: Parameters) -> Arrays:
    """Positions in any order (all heads agree where the layer chooses), and scores."""
    p = parameters
    shape = (p["batch"], p["kv_heads"], p["slots"])
    # Sinks and the newest are always held; between them `evicted` tokens are missing, head by head.
    total = p["slots"] + p["evicted"]
    weights = hashed(seed_of(p["seed"], WEIGHT), shape[0] * shape[1] * total)
    positions = np.zeros(shape, np.int32)
    for b, h in np.ndindex(shape[0], shape[1]):
        of_head = 0 if p["policy"]["unit"] == "layer" else h
        lot = weights.reshape(*shape[:2], total)[b, of_head].copy()
        lot[: p["policy"]["sink"]] = 0
        lot[total - 5 :] = 0
        chosen = np.argsort(lot, kind="stable")[: p["slots"]]
        order = hashed(seed_of(p["seed"], WEIGHT, 1 + b), p["slots"])
        positions[b, h] = chosen[np.argsort(order, kind="stable")]
    numbers = mx.abs(tensor(p["seed"], WORTH, shape))
    arrays = {"positions": mx.array(positions)}
    if p["kind"] == "extremes":
        levels = mx.array([-mx.inf, -1e30, 0.0, -0.0, 2.0, mx.inf, mx.nan, 3.4028234663852886e38])
        level = mx.array((hashed(seed_of(p["seed"], WORTH), numbers.size) % 8).astype(np.int32))
        return arrays | {"priority": levels[level].reshape(shape)}
    if p["scores"] == "ties":
        numbers = mx.floor(numbers * 2)
    arrays["scores"] = numbers
    if p["kind"] == "kept" and p["policy"]["prompt"] == "window":
        arrays["window_mass"] = mx.abs(tensor(p["seed"], WORTH, shape, layer=1))
    return arrays


def run(parameters: Parameters, inputs: Arrays) -> Arrays:
    return watched(parameters, inputs)[0]


def watched(parameters: Parameters, inputs: Arrays) -> tuple[Arrays, float]:
    p, policy = parameters, policy_of(parameters["policy"])
    slots = slots_of(p, inputs)
    N, count, unit = p["slots"], p["count"], policy.unit
    if p["kind"] == "kept":
        priority = policy.prompt_priority(slots, inputs.get("window_mass"))
        winners = select_kept(priority, slots.positions, slots.evictable, count, unit)
        least = margin(priority, slots.evictable, unit, N - count, ordered=False)
        return {"priority": priority, "kept": winners}, least
    priority = inputs["priority"] if p["kind"] == "extremes" else policy.priority(slots)
    victims = select_victims(priority, slots.positions, slots.evictable, count, unit)
    if p["kind"] == "extremes":
        return {"victims": victims}, math.inf
    if p["scores"] == "ties":
        # Small whole numbers and their halves are computed without rounding, so ties are exact.
        return {"priority": priority, "victims": victims}, math.inf
    least = margin(priority, slots.evictable, unit, count)
    return {"priority": priority, "victims": victims}, least


def slots_of(p: Parameters, inputs: Arrays) -> Slots:
    """The slots as the policy sees them."""
    policy = policy_of(p["policy"])
    B, H, N = p["batch"], p["kv_heads"], p["slots"]
    offset = p["slots"] + p["evicted"]
    positions = inputs["positions"]
    values = tensor(p["seed"], V, (B, H, N, p["value_width"]))
    return Slots(
        keys=tensor(p["seed"], K, (B, H, N, p["key_width"])),
        values=values,
        positions=positions,
        scores=inputs.get("scores", mx.zeros(positions.shape)),
        offset=offset,
        evictable=evictable_slots(positions, offset, policy.sink, policy.recent_slots(N)),
        evicted=p["evicted"],
        evicted_mean_key=tensor(p["seed"], MEAN_KEY, (B, H, p["key_width"])),
        value_lengths=value_lengths(values) if policy.uses_value_lengths else None,
    )
