"""Golden 4: whole conversations. A prompt in chunks, 200 decode steps, a later turn.

Every policy with every store, uniform and ragged heads, and variants of the settings; also the form
for models that attend by themselves, where the remainder is attended to as plain rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from golden.caches import caches_of, most_slots
from golden.group import Arrays, Parameters, parameters_of
from golden.margins import watching
from golden.numbers import SINKS, K, Q, V, tensor
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.policies import Policy, make_policy

NAME = "trajectory"

# Chunks and decode steps as (tokens, times): a prompt that fits and then does not, decoding,
# a later turn shorter than the windows, decoding.
CALLS = [[20, 1], [12, 1], [1, 100], [9, 1], [1, 108]]
# Calls whose results are recorded: chunks, the first steps after them, and some later ones.
RECORDED = [1, 2, 3, 40, 101, 102, 103, 150, 210]
# Calls whose output is recorded for all their queries, not the last alone.
CHUNKS = [102]

STORES: dict[str, dict[str, Any]] = {
    "dense": {},
    "8bit": {"bits": 8, "group_size": 32},
    "4bit": {"bits": 4, "group_size": 32},
    "k8v4": {"k_bits": 8, "v_bits": 4, "group_size": 32},
    "mixed": {"bits": 4, "group_size": 32, "recent_bits": 8},
    "mixed-dense": {"k_bits": 4, "v_bits": 2, "group_size": 32, "recent_bits": 16},
}
# Saturations of a layer's KV heads, the same in both layers.
SATURATIONS: dict[str, Any] = {"none": 0.0, "each": [0.0, 2.0]}
# Settings of the policy `salient`, by the case's name; only the first has all stores.
SALIENT: dict[str, dict[str, Any]] = {
    "": {"window": 16},
    "-layer": {"unit": "layer", "evict_every": 3, "prompt": "full"},
    "-values": {"value_weight": 1.5, "distance_weight": 0.0, "window": 16},
}
# RoPEs of keys whose positions roll (`slots/rope.py`), of all channels and of half of them.
ROPES: dict[str, dict[str, Any]] = {
    "": {"dims": 32, "base": 10000.0, "scale": 1.0, "traditional": False},
    "-pairs": {"dims": 16, "base": 500.0, "scale": 0.5, "traditional": True},
}
UNIFORM, RAGGED = [[24, 24], [24, 24]], [[18, 30], [26, 22]]


def policies() -> Iterator[tuple[str, Policy]]:
    """Each policy, with settings that fit budgets of two dozen slots."""
    yield "distinct", make_policy("distinct", sink=2, recent=0.25)
    yield (
        "distinct-keys",
        make_policy("distinct", sink=2, recent=0.25, mass_weight=0.0, age_weight=0.25),
    )
    yield "h2o", make_policy("h2o", sink=2, recent=0.25, window=16)
    yield "ema", make_policy("ema", sink=2, recent=6, decay=0.75)
    yield "ema-logits", make_policy("ema-logits", sink=2, recent=6, decay=0.75)
    yield "tova", make_policy("tova", sink=2, recent=6)
    yield "streaming", make_policy("streaming", sink=4, recent=6)
    yield "keydiff", make_policy("keydiff", sink=2, recent=6)


def variants() -> Iterator[tuple[str, Parameters]]:
    """Settings outside the product: a name, and the differences from a plain case."""
    h2o = {"sink": 1, "recent": 0.25}
    for name, policy in {
        "h2o-full": make_policy("h2o", prompt="full", **h2o),
        "h2o-aged": make_policy("h2o", prompt="full", age_normalised=True, **h2o),
        "h2o-valued": make_policy("h2o", window=8, pool=3, value_weighted=True, **h2o),
        "h2o-three": make_policy("h2o", window=8, evict_every=3, **h2o),
        "distinct-full": make_policy("distinct", prompt="full", **h2o),
        "distinct-valued": make_policy("distinct", value_weighted=True, **h2o),
        "distinct-three": make_policy("distinct", evict_every=3, **h2o),
        "ema-full": make_policy("ema", decay=0.75, prompt="full", **h2o),
        "streaming-two": make_policy("streaming", sink=4, evict_every=2),
    }.items():
        yield name, {"policy": parameters_of(policy)}
    for name in ("distinct", "h2o", "keydiff", "streaming"):
        layer = make_policy(name, unit="layer", sink=2, recent=6)
        yield f"{name}-layer", {"policy": parameters_of(layer)}
    distinct = parameters_of(make_policy("distinct", sink=2, recent=0.25))
    yield "distinct-batch", {"policy": distinct, "batch": 2}
    yield "distinct-sinks", {"policy": distinct, "sinks": True}
    yield "distinct-wide-values", {"policy": distinct, "value_width": 64}
    yield "distinct-many-queries", {"policy": distinct, "query_heads": 8, "kv_heads": 1}
    yield "distinct-no-sinks", {"policy": {**distinct, "sink": 0, "recent": 0}}
    for name in ("distinct", "h2o", "streaming"):
        silent = make_policy(name, sink=2, recent=0.25)
        for kind, budgets in (("uniform", UNIFORM), ("ragged", RAGGED)):
            cache = {"budgets": budgets, "remainder": False}
            yield (
                f"{name}-{kind}-no-remainder",
                {"policy": parameters_of(silent), "cache": cache},
            )


def plain_case(seed: int, **changed: Any) -> Parameters:
    """A conversation that differs from a plain one by some parameters."""
    plain: Parameters = {
        "kind": "attending",
        "seed": seed,
        "batch": 1,
        "query_heads": 4,
        "kv_heads": 2,
        "key_width": 32,
        "value_width": 32,
        "scale": 0.1875,
        "sinks": False,
        "calls": CALLS,
        "recorded": RECORDED,
        "chunks": CHUNKS,
        "cache": {"budgets": UNIFORM, "remainder": True},
    }
    whole = plain | changed
    heads = whole["kv_heads"]
    whole["cache"] = whole["cache"] | {
        "budgets": [layer[:heads] for layer in whole["cache"]["budgets"]]
    }
    return whole


def saturated() -> Iterator[tuple[str, Parameters]]:
    """Cases whose heads have remainders of another saturation."""
    policy = parameters_of(make_policy("distinct", sink=2, recent=0.25))
    for name, saturation in SATURATIONS.items():
        for store in ("dense", "4bit"):
            cache = {"budgets": RAGGED, "remainder": True, **STORES[store]}
            cache["saturation"] = saturation
            yield f"saturation-{name}-{store}", {"policy": policy, "cache": cache}


def salient() -> Iterator[tuple[str, Parameters]]:
    """Cases of the policy `salient`, in every store where heads differ."""
    for name, settings in SALIENT.items():
        policy = parameters_of(make_policy("salient", sink=2, recent=0.25, **settings))
        for store, packing in STORES.items():
            for kind, budgets in (("uniform", UNIFORM), ("ragged", RAGGED)):
                if (name or kind == "uniform") and store not in ("dense", "mixed"):
                    continue
                if name and kind == "ragged":
                    continue
                cache = {"budgets": budgets, "remainder": True, **packing}
                yield f"salient{name}-{kind}-{store}", {"policy": policy, "cache": cache}


def rolling() -> Iterator[tuple[str, Parameters]]:
    """Cases whose queries see the kept keys at positions without gaps."""
    policy = parameters_of(make_policy("salient", sink=2, recent=0.25))
    for turned, rope in ROPES.items():
        cache = {"budgets": RAGGED, "remainder": False, "rope": rope}
        yield f"salient-rolling{turned}", {"policy": policy, "cache": cache}


def cases() -> Iterator[tuple[str, Parameters]]:
    seed = 6000

    def case(changed: Parameters) -> Parameters:
        nonlocal seed
        seed += 16
        return plain_case(seed, **changed)

    for name, policy in policies():
        for store, settings in STORES.items():
            for kind, budgets in (("uniform", UNIFORM), ("ragged", RAGGED)):
                cache = {"budgets": budgets, "remainder": True, **settings}
                yield (
                    f"{name}-{kind}-{store}",
                    case({"policy": parameters_of(policy), "cache": cache}),
                )
    for name, changed in variants():
        yield f"{name}-variant", case(changed)
    for name, policy in policies():
        if policy.needs_attention:
            continue
        for remainder in (True, False):
            for size in (24, 64):
                cache = {"budgets": [[size] * 2] * 2, "remainder": remainder, "attending": False}
                yield (
                    f"{name}-plain-{size}{'' if remainder else '-no-remainder'}",
                    case(
                        {"kind": "plain", "policy": parameters_of(policy), "cache": cache},
                    ),
                )
    for name, changed in (*saturated(), *salient(), *rolling()):
        yield name, case(changed)


def inputs(parameters: Parameters) -> Arrays:
    return {}


def run(parameters: Parameters, inputs: Arrays) -> Arrays:
    return replayed(parameters, inputs)[0]


def watched(parameters: Parameters, inputs: Arrays) -> tuple[Arrays, float]:
    with watching() as margins:
        results, _ = replayed(parameters, inputs)
    return results, min(margins)


def replayed(
    p: Parameters, inputs: Arrays, caches: list[BoundedKVCache] | None = None
) -> tuple[Arrays, list[BoundedKVCache]]:
    """Replay a conversation; return the recorded results and the caches.

    Args:
        p: The case's parameters.
        inputs: The layers' "frame.centre" and "frame.scale" (key scaling), or nothing.
        caches: The case's caches; None: those of `caches_of`.
    """
    caches = caches_of(p, inputs) if caches is None else caches
    layers = [Layer(p, layer, cache) for layer, cache in enumerate(caches)]
    results: dict[str, list[mx.array]] = {}
    calls = [length for length, times in p["calls"] for _ in range(times)]
    for call, L in enumerate(calls):
        for cache in caches:
            begin_call(p, call, cache)
        outs = [layer.call(L) for layer in layers]
        mx.eval(outs)
        if call in p["chunks"]:
            results[f"chunk.{call}"] = [mx.stack(outs)]
        if call in p["recorded"]:
            results.setdefault("out", []).append(mx.stack([out[:, :, -1] for out in outs]))
            most = max(most_slots(p), max(cache.size() for cache in caches))
            for name in ("kept", "scores"):
                if name == "kept" or caches[0].policy.needs_attention:
                    of_layers = [mx.array(field_by_position(cache, name, most)) for cache in caches]
                    results.setdefault(name, []).append(mx.stack(of_layers))
    arrays = {
        name: mx.stack(parts) if name in ("out", "kept", "scores") else parts[0]
        for name, parts in results.items()
    }
    if "remainder.count" in caches[0].arrays():
        for name in ("count", "mean_key", "var_key", "mean_value"):
            arrays[f"remainder.{name}"] = mx.stack(
                [cache.arrays()[f"remainder.{name}"] for cache in caches]
            )
    return arrays, caches


def begin_call(p: Parameters, call: int, cache: BoundedKVCache) -> None:
    """Pin the spans due before a call, and begin its turn where the case (`turns`) says so.

    Args:
        p: The case's parameters.
        call: The call's number.
        cache: A layer's cache.
    """
    spans = [(first, end) for at, first, end in p.get("pins", ()) if at == call]
    if spans:
        cache.pin(spans)
    for at, carry in zip(p.get("turn_calls", ()), p.get("carries", ()), strict=True):
        if at == call:
            cache.new_turn(carry)


class Layer:
    """One layer of a conversation: its stream of queries, keys and values, and its cache."""

    def __init__(self, p: Parameters, layer: int, cache: BoundedKVCache):
        self.cache, self.scale, self.attending = cache, p["scale"], p["kind"] == "attending"
        B, T = p["batch"], sum(length * times for length, times in p["calls"])
        Hq, Hk, D = p["query_heads"], p["kv_heads"], p["key_width"]
        self.q = tensor(p["seed"], Q, (B, Hq, T, D), layer=layer)
        self.k = tensor(p["seed"], K, (B, Hk, T, D), layer=layer)
        self.v = tensor(p["seed"], V, (B, Hk, T, p["value_width"]), layer=layer)
        self.sinks = tensor(p["seed"], SINKS, (Hq,), layer=layer) if p["sinks"] else None

    def call(self, L: int) -> mx.array:
        """Attend with the next L tokens: out `[B, Hq, L, Dv]`."""
        first = self.cache.offset
        q, k, v = (x[:, :, first : first + L] for x in (self.q, self.k, self.v))
        mask = self.cache.make_mask(L)
        keys, values = self.cache.update_and_fetch(k, v)
        if self.attending:
            mask = None if L == 1 else "causal"
            return self.cache.attend(q, keys, values, scale=self.scale, mask=mask, sinks=self.sinks)
        out: mx.array = mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=self.scale, mask=mask, sinks=self.sinks
        )
        return out


def field_by_position(cache: BoundedKVCache, name: str, most: int) -> np.ndarray:
    """Positions ("kept") or scores `[B, H, most]` in order of position; unused places are -1, or 0.

    Args:
        cache: A layer's cache.
        name: "kept" or "scores".
        most: The number of columns of the result.
    """
    store = cache.store
    assert store is not None
    parts = []
    for run in store.runs:
        slots = cache.slots(run)
        positions = np.array(slots.positions)
        field = positions if name == "kept" else np.array(slots.scores)
        part = np.take_along_axis(field, np.argsort(positions, axis=-1), axis=-1)
        unused = [(0, 0), (0, 0), (0, most - part.shape[-1])]
        parts.append(np.pad(part, unused, constant_values=-1 if name == "kept" else 0))
    whole: np.ndarray = np.concatenate(parts, axis=1)
    return whole
