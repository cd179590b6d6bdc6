"""Launches of the GPU kernels, the same for Metal and CUDA.

MLX writes a kernel's signature from the arrays it gets, so an optional buffer that is not there has
no name: its declaration, as a null pointer, then goes before the body. Template arguments say that
it is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import mlx.core as mx

from mlx_h2o.backends.kernel_text import kernel_text
from mlx_h2o.backends.tiling import MOST_QUERIES, WIDTHS, Tiling, tiling
from mlx_h2o.remainder import SATURATION, Remainder

SIMDGROUP = 32

# Kinds of masks and exports, as in attention_vector.metal.
NO_MASK, CAUSAL, ARRAY_MASK = 0, 1, 2
EXPORT_NOTHING, EXPORT_LSE, EXPORT_LOGITS = 0, 1, 2

_ABSENT_MASK = "const device bool* mask = nullptr;\nconst int64_t mask_strides[4] = {0, 0, 0, 0};\n"


@dataclass(frozen=True)
class Ranges:
    """Where heads of different lengths lie in a flat buffer `[B, S, D]`.

    Attributes:
        starts: First slot of each KV head.
        lengths: Slots of each KV head that are attended to.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass
class Attended:
    """What an attention kernel wrote; None for what it was not asked for.

    What there is per slot lies head after head: with heads of different lengths head k's logits are
    the `[G, L, length]` after those of the heads before it.

    Attributes:
        out: `[B, Hq, L, Dv]` in the queries' dtype.
        lse: `[B, Hq, L]` float32.
        logits: `[B, Hq, L, N]` float32, minus infinity where masked; flat `[B, G * L * slots]` with
            ranges.
        distances: ||k - mean||^2 `[B, Hk, N]` float32; flat `[B, slots]` with ranges.
    """

    out: mx.array
    lse: mx.array | None = None
    logits: mx.array | None = None
    distances: mx.array | None = None


class Launches:
    """The launches of one kind of GPU.

    Args:
        make: `mx.fast.metal_kernel` or `mx.fast.cuda_kernel`, looked up when first needed.
        prelude: `"metal"` or `"cuda"`.
    """

    def __init__(self, make: Callable[[], Callable[..., Any]], prelude: str):
        self._make = make
        self._prelude = prelude
        self._kernel = cache(self._build)

    def attend(
        self,
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
        export: int = EXPORT_LOGITS,
    ) -> Attended:
        """Attention that writes what its policy asks for, reading keys and values once.

        Args:
            q: `[B, Hq, L, D]`, L at most 8.
            k: `[B, Hk, N, D]`, or flat `[B, S, D]` with ranges.
            v: `[B, Hk, N, Dv]`, or flat `[B, S, Dv]`.
            scale: Factor on q.k.
            mask: None, "causal" or an array that broadcasts to `[B, Hq, L, M]`; its last column is
                the last slot's, and slots before its first are visible.
            sinks: Attention-sink logits `[Hq]`.
            remainder: Joins as one more column; `lse` covers it.
            saturation: t of the remainder's formula.
            means: `[B, Hk, D]` float32, from which distances are measured.
            ranges: Where each head's slots lie.
            export: What to write besides the output.
        """
        B, Hq, L, D = q.shape
        if ranges is None:
            Hk, N = k.shape[1], k.shape[2]
            lengths, starts, memory_heads = (N,) * Hk, (0,) * Hk, tuple(range(Hk))
        else:
            k, v = k[:, None], v[:, None]
            Hk, N = len(ranges.lengths), max(ranges.lengths)
            lengths, starts, memory_heads = ranges.lengths, ranges.starts, (0,) * Hk
        Dv, G, slots = v.shape[-1], Hq // Hk, sum(lengths)
        kind, columns = NO_MASK, 0
        inputs: dict[str, mx.array] = {}
        if isinstance(mask, str):
            kind = CAUSAL if L > 1 else NO_MASK
        elif mask is not None:
            kind, columns = ARRAY_MASK, mask.shape[-1] if mask.shape[-1] > 1 else N
            mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
            inputs["mask"] = mx.broadcast_to(mask, (B, Hq, L, columns))
        if sinks is not None:
            inputs["sinks"] = mx.contiguous(sinks)
        if remainder is not None:
            inputs["counts"] = mx.contiguous(remainder.count)
            inputs["mean_keys"] = mx.contiguous(remainder.mean_key)
            inputs["var_keys"] = mx.contiguous(remainder.var_key)
            inputs["mean_values"] = mx.contiguous(remainder.mean_value)
        if means is not None:
            inputs["means"] = mx.contiguous(means)

        table = _whole_heads(lengths, starts, memory_heads)
        tiles = tiling(D, Dv, G, L, k.dtype.size)
        outputs = {"out": ((B, Hq, L, Dv), q.dtype)}
        if export != EXPORT_NOTHING:
            outputs["lse"] = ((B, Hq, L), mx.float32)
        if export == EXPORT_LOGITS:
            outputs["logits"] = ((B, G * L * slots), mx.float32)
        if means is not None:
            outputs["distances"] = ((B, slots), mx.float32)
        written = self._attention_vector(
            {
                "params": _params(L, slots, columns, Hk, table),
                "factors": _factors(scale, saturation),
                "queries": q,
                "keys": k,
                "values": v,
                **inputs,
            },
            outputs,
            tiles,
            (len(table), B),
            {
                "T": k.dtype,
                "D": D,
                "DV": Dv,
                "G": G,
                "MASK": kind,
                "SINKS": sinks is not None,
                "REMAINDER": remainder is not None,
                "DISTANCES": means is not None,
                "EXPORT": export,
            },
        )
        result = Attended(**written)
        if ranges is None:
            if result.logits is not None:
                result.logits = result.logits.reshape(B, Hq, L, N)
            if result.distances is not None:
                result.distances = result.distances.reshape(B, Hk, N)
        return result
