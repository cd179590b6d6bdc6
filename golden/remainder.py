"""Golden 3: the remainder. Folding, its column, joining, plain rows; and the extremes of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import mlx.core as mx

from golden.group import Arrays, Parameters
from golden.numbers import (
    LOGIT,
    LSE,
    MEAN_KEY,
    MEAN_VALUE,
    VARIANCE,
    WEIGHT,
    K,
    Q,
    V,
    hashed,
    seed_of,
    tensor,
)
from mlx_h2o.slots.remainder import SATURATION, Remainder

NAME = "remainder"


SHAPE = {"batch": 2, "kv_heads": 2, "key_width": 32, "value_width": 48}
FOLDS = {"one": [1], "one-by-one": [1] * 9, "chunk": [17], "chunks": [5, 1, 30, 2]}
# Powers of two of queries and of variances; the number of tokens folded.
COLUMNS = {
    "plain": (0, 0, 40),
    "sharp": (3, 6, 4000),
    "faint": (-8, -8, 1),
    "empty": (0, 0, 0),
    "huge-queries": (70, 0, 7),
    "huge-variance": (3, 100, 7),
    "no-variance": (2, -100, 16777216),
}
# Kinds of lse and of the column's logit.
JOINS = {
    "plain": ("numbers", "numbers"),
    "nothing-kept": ("nothing", "numbers"),
    "nothing-evicted": ("numbers", "nothing"),
    "nothing": ("nothing", "nothing"),
    "kept-far-above": ("far above", "numbers"),
    "evicted-far-above": ("numbers", "far above"),
}
# Saturation of each KV head; the other columns have the usual one.
SATURATIONS = {
    "none": [0.0, 0.0],
    "each": [0.0, 4.0],
    "small": [0.5, 2.0],
    "none-huge-queries": [0.0, 4.0],
}
QUERIES = {"query_heads": 4, "queries": 3}


def cases() -> Iterator[tuple[str, Parameters]]:
    seeds = itertools.count(3001)
    for name, rows in FOLDS.items():
        for weighted, power in itertools.product((False, True), (0, 12, -12)):
            of_fold = {"rows": rows, "weighted": weighted, "power": power}
            called = f"fold-{name}{'-weighted' if weighted else ''}-2^{power}"
            yield called, {"kind": "fold", "seed": next(seeds), **SHAPE, **of_fold}
    for name, (q_power, variance_power, count) in COLUMNS.items():
        powers = {"q_power": q_power, "variance_power": variance_power}
        of_column = {**QUERIES, "scale": 0.1875, "count": count, **powers}
        yield f"column-{name}", {"kind": "column", "seed": next(seeds), **SHAPE, **of_column}
    for name, (lse, r) in JOINS.items():
        for dtype in ("float32", "float16", "bfloat16"):
            of_join = {**QUERIES, "dtype": dtype, "lse": lse, "logit": r}
            yield f"join-{name}-{dtype}", {"kind": "join", "seed": next(seeds), **SHAPE, **of_join}
    for count in (1, 2, 4, 8):
        yield f"rows-{count}", {"kind": "rows", "seed": next(seeds), **SHAPE, "rows": count}
    for name, saturation in SATURATIONS.items():
        q_power, variance_power, count = COLUMNS["huge-queries" if "huge" in name else "plain"]
        powers = {"q_power": q_power, "variance_power": variance_power}
        of_column = {**QUERIES, "scale": 0.1875, "count": count, **powers}
        of_case = {"kind": "column", "seed": next(seeds), **SHAPE, **of_column}
        yield f"saturation-{name}", {**of_case, "saturation": saturation}


def inputs(parameters: Parameters) -> Arrays:
    return {}


def run(parameters: Parameters, inputs: Arrays) -> Arrays:
    return {"fold": fold, "column": column, "join": join, "rows": rows}[parameters["kind"]](
        parameters
    )


def watched(parameters: Parameters, inputs: Arrays) -> tuple[Arrays, float]:
    return run(parameters, inputs), math.inf


def fold(p: Parameters) -> Arrays:
    """Rows `[B, H, sum(rows), width]`, folded in parts of the given lengths."""
    B, H, T = p["batch"], p["kv_heads"], sum(p["rows"])
    keys = tensor(p["seed"], K, (B, H, T, p["key_width"]), power=p["power"])
    values = tensor(p["seed"], V, (B, H, T, p["value_width"]), power=p["power"])
    counted = hashed(seed_of(p["seed"], WEIGHT), B * H * T).reshape(B, H, T) >= 2**63
    weights = mx.array(counted).astype(mx.float32)
    remainder = Remainder.empty(B, H, p["key_width"], p["value_width"])
    first = 0
    for count in p["rows"]:
        part = slice(first, first + count)
        remainder = remainder.fold(
            keys[:, :, part], values[:, :, part], weights[:, :, part] if p["weighted"] else None
        )
        first += count
    return remainder.arrays


def column(p: Parameters) -> Arrays:
    """Variances are squares of the generated numbers, times 2^variance_power."""
    B, H, D = p["batch"], p["kv_heads"], p["key_width"]
    remainder = Remainder(
        mx.full((B, H), float(p["count"])),
        tensor(p["seed"], MEAN_KEY, (B, H, D)),
        mx.square(tensor(p["seed"], VARIANCE, (B, H, D))) * 2.0 ** p["variance_power"],
        tensor(p["seed"], MEAN_VALUE, (B, H, p["value_width"])),
    )
    q = tensor(p["seed"], Q, (B, p["query_heads"], p["queries"], D), power=p["q_power"])
    return {"logit": remainder.column(q, p["scale"], p.get("saturation", SATURATION))}


def join(p: Parameters) -> Arrays:
    """`nothing` is minus infinity, `far above` the generated numbers plus 200."""
    B, H, Hq, L = p["batch"], p["kv_heads"], p["query_heads"], p["queries"]

    def logits(which: int, kind: str) -> mx.array:
        numbers = tensor(p["seed"], which, (B, Hq, L))
        if kind == "nothing":
            return mx.full(numbers.shape, -mx.inf)
        return numbers + 200 if kind == "far above" else numbers

    remainder = Remainder.empty(B, H, p["key_width"], p["value_width"])
    remainder.mean_value = tensor(p["seed"], MEAN_VALUE, (B, H, p["value_width"]))
    out = tensor(p["seed"], V, (B, Hq, L, p["value_width"]), p["dtype"])
    if p["lse"] == "nothing":
        out = mx.zeros_like(out)
    out, lse = remainder.join(out, logits(LSE, p["lse"]), logits(LOGIT, p["logit"]))
    return {"out": out, "lse": lse}


def rows(p: Parameters) -> Arrays:
    """Plain rows of the statistics that `column` uses."""
    B, H, D = p["batch"], p["kv_heads"], p["key_width"]
    remainder = Remainder(
        mx.full((B, H), 40.0),
        tensor(p["seed"], MEAN_KEY, (B, H, D)),
        mx.square(tensor(p["seed"], VARIANCE, (B, H, D))),
        tensor(p["seed"], MEAN_VALUE, (B, H, p["value_width"])),
    )
    keys, values = remainder.plain_rows(p["rows"])
    return {"keys": keys, "values": values}
