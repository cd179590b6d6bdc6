"""Golden 12: prompts that are read twice. Worths, slots shared out, rows kept and values fitted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import mlx.core as mx
import numpy as np

from golden import framed, trajectory
from golden.caches import caches_of
from golden.group import Arrays, Parameters, parameters_of
from golden.margins import watching
from golden.numbers import SINKS, WORTH, K, Q, V, tensor
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.compression import twice, value_fit
from mlx_h2o.compression.second_reading import SecondReading
from mlx_h2o.layer.layer import Layer
from mlx_h2o.policies import make_policy

NAME = "twice"

# Rounding to a level has the error of a fit, which is some ten times that of a sum.
LEVELS_COARSER = 10


def cases() -> Iterator[tuple[str, Parameters]]:
    seed = 18000

    def reading(policy: str = "salient", **changed: Any) -> Parameters:
        nonlocal seed
        seed += 16
        of_policy = parameters_of(make_policy(policy, sink=2, recent=0.25))
        cache = {"remainder": True, **changed.pop("cache", {})}
        cache = {"budgets": trajectory.RAGGED, **cache}
        plain = {
            "calls": [], "prompt": 70, "chunk": 40, "request": 3, "room": 4, "steps": 6,
            "dtype": "float32",
        }  # fmt: skip
        case = trajectory.plain_case(seed, policy=of_policy, cache=cache, **plain | changed)
        for name in ("recorded", "chunks", *([] if case["calls"] else ["calls"])):
            del case[name]
        return case | {"kind": "reading"}

    stores = {"dense": {}, "4bit": trajectory.STORES["4bit"], "k8v4": trajectory.STORES["k8v4"]}
    for store, packing in stores.items():
        yield f"salient-{store}", reading(cache=packing)
    yield "half", reading(dtype="float16", steps=0)
    yield "h2o", reading("h2o")
    yield "streaming", reading("streaming")
    yield "attention-sinks", reading(sinks=True)
    yield "batch", reading(batch=2)
    yield "no-remainder", reading(cache={"remainder": False})
    yield "framed", reading(cache=framed.STORES["4bit"], framed=True)
    # Of more queries than 1024 a part is kept; their weights are computed in blocks.
    yield (
        "many-queries",
        reading(query_heads=8, kv_heads=2, prompt=300, chunk=150, cache={"budgets": [[60, 40]]}),
    )
    # A head keeps slots of its own whose rows are worth less than those of others.
    yield "unequal", reading(prompt=100, cache={"budgets": [[14, 90], [14, 14]]})
    # Heads that differ in rows and have a remainder, when the prompt comes.
    calls = [[40, 1], [1, 8]]
    yield "later", reading(calls=calls)
    yield "later-4bit", reading(calls=calls, cache=stores["4bit"])
    yield "later-short", reading(calls=[[9, 1]])
    growing = {"budgets": [[40, 40]] * 2, "filling": [[50, trajectory.RAGGED]]}
    yield "growing", reading(cache=growing)

    for name, own, whole in (
        ("some", [3, 5, 0, 2], 30),
        ("none", [0] * 4, 30),
        ("all", [4] * 4, 1000),
        ("fewer", [9] * 4, 30),
    ):
        for ties in (False, True):
            seed += 16
            yield (
                f"sharing-{name}{'-ties' * ties}",
                {"kind": "sharing", "seed": seed, "heads": 4, "rows": 20, "own": own}
                | {"whole": whole, "ties": ties},
            )  # fmt: skip


def inputs(parameters: Parameters) -> Arrays:
    """The key scaling of each layer, where the case has one; worths that are shared out."""
    p = parameters
    if p["kind"] == "reading":
        return framed.inputs(p) if p.get("framed") else {}
    worths = mx.abs(tensor(p["seed"], WORTH, (p["heads"], p["rows"])))
    if p["ties"]:
        worths = mx.floor(worths * 2)
    return {"worths": -mx.sort(-worths, axis=1)}


def run(parameters: Parameters, inputs: Arrays) -> Arrays:
    p = parameters
    if p["kind"] == "reading":
        return read(p, inputs)
    worths = np.array(inputs["worths"])
    counts = twice.shared_out([worths], p["whole"], np.array(p["own"], np.int64))
    return {"counts": mx.array(counts[0], mx.int32)}


def watched(parameters: Parameters, inputs: Arrays) -> tuple[Arrays, float]:
    with watching() as margins, watching_shares(margins), watching_levels(parameters, margins):
        results = run(parameters, inputs)
    return results, math.inf if parameters.get("ties") else min(margins)


def read(p: Parameters, inputs: Arrays) -> Arrays:
    """A conversation whose prompt is read twice, and decoding after it."""
    caches = cast(list[H2OKVCache], caches_of(p, inputs))
    streams = [Stream(p, layer) for layer in range(len(caches))]
    for length, times in p.get("calls", ()):
        for _ in range(times):
            attend(caches, streams, length)
    T, room = p["prompt"], p["room"]
    reading = twice.Reading(room=room, within=True)
    whole, least, parts = twice.slots_for(caches, T, reading)
    planned = [slots for cache in caches for slots in twice.planned_slots(cache, T)]
    own = twice.own_slots(planned, whole, least)
    older = twice.make_room(caches, parts, T + room)
    chunks = [min(p["chunk"], T - first) for first in range(0, T, p["chunk"])]
    for length in chunks:
        attend(caches, streams, length)
    group = p["query_heads"] // p["kv_heads"]
    every = -(-T * group // value_fit.MOST_QUERIES)
    looks = [SecondReading(cast(Layer, cache.layer), every) for cache in caches]
    for length in chunks:
        outs = []
        for stream, look in zip(streams, looks, strict=True):
            call, k, v = stream.next(p["request"] + length)
            outs.append(look.look(call, k, v))
        mx.eval(outs)
    most = max(worth.shape[2] for look in looks for worth in look.worths)
    worths = [mx.concatenate([padded(x, most, 0) for x in look.worths], axis=1) for look in looks]
    list(twice.keep(caches, looks, older, whole, own, room))
    most = max(cache.size() for cache in caches)
    rows = [kept_rows(cache, most) for cache in caches]
    results = {
        "again": mx.stack(outs),
        "worths": mx.stack(worths),
        "budgets": mx.array([cache.budgets for cache in caches], mx.int32),
        "kept": mx.stack([positions for positions, _ in rows]),
        "values": mx.stack([values for _, values in rows]),
    }
    if "remainder.count" in caches[0].arrays():
        for name in ("count", "mean_key", "var_key", "mean_value"):
            of_layers = [cache.arrays()[f"remainder.{name}"] for cache in caches]
            results[f"remainder.{name}"] = mx.stack(of_layers)
    if p["steps"]:
        steps = [mx.stack(attend(caches, streams, 1)) for _ in range(p["steps"])]
        results["out"] = mx.concatenate(steps, axis=3)
    return results


class Stream:
    """A layer's queries, keys and values, call after call."""

    def __init__(self, p: Parameters, layer: int):
        T, chunk = p["prompt"], p["chunk"]
        before = sum(length * times for length, times in p.get("calls", ()))
        tokens = before + 2 * T + -(-T // chunk) * p["request"] + p["steps"]
        B, Hq, Hk, D = p["batch"], p["query_heads"], p["kv_heads"], p["key_width"]
        self.q = tensor(p["seed"], Q, (B, Hq, tokens, D), layer=layer)
        self.k = tensor(p["seed"], K, (B, Hk, tokens, D), p["dtype"], layer)
        self.v = tensor(p["seed"], V, (B, Hk, tokens, p["value_width"]), p["dtype"], layer)
        self.sinks = tensor(p["seed"], SINKS, (Hq,), layer=layer) if p["sinks"] else None
        self.scale, self.first = p["scale"], 0

    def next(self, L: int) -> tuple[AttentionCall, mx.array, mx.array]:
        """The call of the next L tokens, and their keys and values."""
        first, self.first = self.first, self.first + L
        q, k, v = (x[:, :, first : first + L] for x in (self.q, self.k, self.v))
        return AttentionCall(q, self.scale, "causal", self.sinks), k, v


def attend(caches: Sequence[H2OKVCache], streams: Sequence[Stream], L: int) -> list[mx.array]:
    """One call of every layer: outputs `[B, Hq, L, Dv]`."""
    outs = []
    for cache, stream in zip(caches, streams, strict=True):
        call, k, v = stream.next(L)
        keys, values = cache.update_and_fetch(k, v)
        mask = None if L == 1 else "causal"
        outs.append(
            cache.attend(call.q, keys, values, scale=call.scale, mask=mask, sinks=call.sinks)
        )
    mx.eval(outs)
    return outs


def kept_rows(cache: H2OKVCache, most: int) -> tuple[mx.array, mx.array]:
    """Positions `[B, H, most]` in order, then -1, and the values there, then 0."""
    assert cache.store is not None
    positions, values = [], []
    for run in cache.store.runs:
        slots = cache.slots(run)
        order = mx.argsort(slots.positions, axis=-1)
        at = mx.take_along_axis(slots.positions, order, axis=2)
        positions.append(padded(at, most, -1))
        rows = mx.take_along_axis(slots.values, order[..., None], axis=2)
        values.append(padded(rows, most, 0))
    return mx.concatenate(positions, axis=1), mx.concatenate(values, axis=1)


def padded(rows: mx.array, most: int, unused: int) -> mx.array:
    """Rows `[B, heads, N, ...]`, and unused ones up to so many."""
    widths = [(0, most - rows.shape[2] if axis == 2 else 0) for axis in range(rows.ndim)]
    return mx.pad(rows, widths, constant_values=mx.array(unused, rows.dtype))


@contextmanager
def watching_shares(margins: list[float]) -> Iterator[None]:
    """Note the margin by which a row is among those that heads share out."""
    shared_out = twice.shared_out

    def noted(
        worths: Sequence[np.ndarray[Any, Any]], whole: int, own: np.ndarray[Any, Any]
    ) -> list[list[int]]:
        heads = np.concatenate(list(worths)).astype(np.float64)
        T = heads.shape[1]
        counts = np.minimum(own, T)
        others = np.sort(heads[np.arange(T) >= counts[:, None]])[::-1]
        free = whole - int(counts.sum())
        if 0 < free < len(others):
            margins.append(float((others[free - 1] - others[free]) / heads.max()))
        return shared_out(worths, whole, own)

    with mock.patch.object(twice, "shared_out", noted):
        yield


@contextmanager
def watching_levels(p: Parameters, margins: list[float]) -> Iterator[None]:
    """Note how near a fitted value is to where it would be packed as another level."""
    settings = p.get("cache", {})
    bits, size = settings.get("v_bits", settings.get("bits")), settings.get("group_size", 1)
    fit = value_fit.least_squares

    def noted(*given: Any) -> np.ndarray[Any, Any]:
        values = fit(*given)
        if bits:
            groups = values.reshape(-1, size).astype(np.float64)
            least = groups.min(axis=1, keepdims=True)
            spread = groups.max(axis=1, keepdims=True) - least
            levels = (groups - least) / spread * (2**bits - 1)
            apart = np.abs(levels - np.floor(levels) - 0.5)
            margins.append(float(apart.min()) / LEVELS_COARSER)
        return values

    with mock.patch.object(value_fit, "least_squares", noted):
        yield
