"""Launches of the attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlx_h2o.backends.launcher import SIMDGROUP, Interface, Launcher
from mlx_h2o.backends.tiling import MOST_QUERIES, WIDTHS, slots_per_block, tiling
from mlx_h2o.remainder import SATURATION, Remainder

# Kinds of masks and exports, as in attention_vector.metal.
NO_MASK, CAUSAL, ARRAY_MASK = 0, 1, 2
EXPORT_NOTHING, EXPORT_LSE, EXPORT_LOGITS = 0, 1, 2

_VECTOR = Interface(
    "attention_vector",
    (
        "params",
        "factors",
        "queries",
        "keys",
        "values",
        "mask",
        "sinks",
        "counts",
        "mean_keys",
        "var_keys",
        "mean_values",
        "means",
    ),
    ("out", "lse", "logits", "distances"),
    {"mask": "const device bool* mask = nullptr;\nconst int64_t mask_strides[4] = {0, 0, 0, 0};"},
)
_MERGE = Interface("attention_merge", ("params", "partials", "partial_lses"), ("out", "lse"))

# Ints before the table, and per row of it, as in work.h.
_LAUNCH_INTS = _WORK_INTS = 8


@dataclass(frozen=True)
class Ranges:
    """Where KV heads of different lengths lie in a flat buffer `[B, S, D]`.

    Attributes:
        starts: First slot of each head.
        lengths: Slots of each head that are attended to.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass
class Attended:
    """What the kernels wrote; None for what they were not asked for.

    What there is per slot lies head after head. With ranges it is flat: a head's logits are the
    `[G, L, length]` after those of the heads before it.

    Attributes:
        out: `[B, Hq, L, Dv]` in the queries' dtype.
        lse: `[B, Hq, L]` float32.
        logits: `[B, Hq, L, N]` float32, minus infinity where masked; or `[B, G * L * slots]`.
        distances: ||k - mean||^2 `[B, Hk, N]` float32; or `[B, slots]`.
    """

    out: mx.array
    lse: mx.array | None = None
    logits: mx.array | None = None
    distances: mx.array | None = None


def supports(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Whether the kernels are written for these operands."""
    return (
        q.shape[2] <= MOST_QUERIES
        and k.shape[-1] in WIDTHS
        and v.shape[-1] in WIDTHS
        and q.dtype == k.dtype == v.dtype
    )


def attend(
    launcher: Launcher,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    remainder: Remainder | None = None,
    saturation: float = SATURATION,
    means: mx.array | None = None,
    ranges: Ranges | None = None,
    export_lse: bool = True,
    export_logits: bool = True,
    architecture: str = "",
) -> Attended:
    """Attention that reads keys and values once and writes what a policy asks for.

    Args:
        launcher: Of the GPU.
        q: `[B, Hq, L, D]`, L at most 8.
        k: `[B, Hk, N, D]`, or flat `[B, S, D]` with ranges.
        v: `[B, Hk, N, Dv]`, or flat `[B, S, Dv]`.
        scale: Factor on q.k.
        mask: None, "causal" (aligned at the end), or an array that broadcasts to `[B, Hq, L, M]`:
            its last column is the last slot's, and slots before its first are visible.
        sinks: Attention-sink logits `[Hq]`.
        remainder: Joins as one more column, which lse covers.
        saturation: t of the remainder's formula.
        means: `[B, Hk, D]` float32: measure the keys' distances from them.
        ranges: Where each head's slots lie.
        export_lse: Write the lse.
        export_logits: Write the logits (and the lse).
        architecture: The GPU's, see `slots_per_block`.
    """
    heads = _heads(k, ranges)
    if ranges is not None:
        k, v = k[:, None], v[:, None]
    B, Hq, L, D = q.shape
    Hk, Dv, slots = len(heads), v.shape[-1], sum(length for length, _, _ in heads)
    G, longest = Hq // Hk, max(length for length, _, _ in heads)
    block = slots_per_block(
        [length for length, _, _ in heads], G, L, D, Dv, k.dtype.size, architecture
    )
    table = _work(heads, block or longest)
    inputs = {"queries": q, "keys": k, "values": v, "factors": _factors(scale, saturation)}
    kind, columns = NO_MASK, 0
    if isinstance(mask, str):
        kind = CAUSAL if L > 1 else NO_MASK
    elif mask is not None:
        kind, columns = ARRAY_MASK, mask.shape[-1] if mask.shape[-1] > 1 else longest
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        inputs["mask"] = mx.broadcast_to(mask, (B, Hq, L, columns))
    inputs["params"] = _params((L, slots, columns, Hk), table)
    if sinks is not None:
        inputs["sinks"] = mx.contiguous(sinks)
    if remainder is not None:
        names = ("counts", "mean_keys", "var_keys", "mean_values")
        inputs |= zip(names, map(mx.contiguous, remainder.arrays.values()), strict=True)
    if means is not None:
        inputs["means"] = mx.contiguous(means)

    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {}
    if block is None:
        outputs["out"] = ((B, Hq, L, Dv), q.dtype)
    else:
        outputs["out"] = ((B, len(table), G, L, Dv), k.dtype)
    if block is not None or export_lse or export_logits:
        outputs["lse"] = ((B, len(table), G, L), mx.float32)
    if export_logits:
        outputs["logits"] = ((B, G * L * slots), mx.float32)
    if means is not None:
        outputs["distances"] = ((B, slots), mx.float32)

    tiles = tiling(D, Dv, G, L, k.dtype.size)
    template = {
        "T": k.dtype,
        "D": D,
        "DV": Dv,
        "G": G,
        "QUERIES": tiles.queries,
        "ROWS": tiles.rows,
        "ROW_GROUPS": tiles.row_groups,
        "SIMDS": tiles.simdgroups,
        "KEYS": tiles.keys,
        "MASK": kind,
        "SINKS": sinks is not None,
        "REMAINDER": remainder is not None,
        "DISTANCES": means is not None,
        "EXPORT": EXPORT_LOGITS if export_logits else EXPORT_LSE if "lse" in outputs else EXPORT_NOTHING,
    }
    written = launcher.launch(
        _VECTOR,
        inputs,
        outputs,
        template,
        (1, len(table), B * tiles.row_blocks),
        tiles.simdgroups * SIMDGROUP,
    )
    if block is not None:
        written |= _merged(launcher, written["out"], written["lse"], table, Hk, q.dtype)
    return _shaped(written, ranges is None, (B, Hq, Hk, L, longest))
