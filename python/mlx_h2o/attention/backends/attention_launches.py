"""Launches of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlx_h2o.attention.backends.launcher import SIMDGROUP, Launcher, Outputs
from mlx_h2o.attention.backends.row_buffers import buffers, packing, row_bytes
from mlx_h2o.attention.backends.tiling import MOST_QUERIES, WIDTHS, slots_per_block, tiling
from mlx_h2o.attention.backends.work import Ranges, Work, params, work_of
from mlx_h2o.slots.packed import PackedRows, Rows
from mlx_h2o.slots.remainder import SATURATION, Remainder

# Kinds of masks and exports, as in attention_vector.metal.
NO_MASK, CAUSAL, ARRAY_MASK = range(3)
EXPORT_NOTHING, EXPORT_LSE, EXPORT_LOGITS = range(3)

# The remainder's buffers, with the statistic in each.
REMAINDER = {
    "counts": "count",
    "mean_keys": "mean_key",
    "var_keys": "var_key",
    "mean_values": "mean_value",
}
_MERGE_SIMDGROUPS = 8


@dataclass
class VectorResult:
    """The outputs of the kernels; None for outputs that were not requested.

    Outputs per slot lie head after head. With ranges they are flat: a head's logits are the
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


def supports(q: mx.array, k: Rows, v: Rows) -> bool:
    """Whether the kernels support these operands.

    Args:
        q: `[B, Hq, L, D]`.
        k: `[B, Hk, N, D]`, or flat `[B, S, D]`; dense or packed.
        v: `[B, Hk, N, Dv]`, or flat `[B, S, Dv]`; dense or packed.
    """
    return (
        q.shape[2] <= MOST_QUERIES
        and k.shape[-1] in WIDTHS
        and v.shape[-1] in WIDTHS
        and q.dtype == k.dtype == v.dtype
    )


def attend(launcher: Launcher, q: mx.array, k: Rows, v: Rows, **options: Any) -> VectorResult:
    """Attention that reads keys and values once and writes the outputs that a policy needs.

    Args:
        launcher: The GPU's launcher.
        q: As in `AttentionLaunch`.
        k: As in `AttentionLaunch`.
        v: As in `AttentionLaunch`.
        options: The other attributes of `AttentionLaunch`, by name.
    """
    return AttentionLaunch(q, k, v, **options).attended(launcher)


@dataclass(frozen=True, kw_only=True)
class AttentionLaunch:
    """One launch of the attention kernel.

    Attributes:
        q: `[B, Hq, L, D]`, L at most 8.
        k: `[B, Hk, N, D]`, or flat `[B, S, D]` with ranges; dense or packed.
        v: `[B, Hk, N, Dv]`, or flat `[B, S, Dv]`; dense or packed.
        scale: Factor on q.k.
        mask: None, "causal" (aligned at the end), or an array that broadcasts to `[B, Hq, L, M]`:
            its last column is the last slot's, and slots before its first are visible.
        sinks: Attention-sink logits `[Hq]`.
        remainder: The remainder, which joins as one more column; lse covers it.
        saturation: t of the remainder's formula for each KV head; None is the default for all.
        frame_scale: The scale of the key scaling (`Frame`) of keys and remainder, `[Hk, D]`
            float32.
        means: `[B, Hk, D]` float32, from which to measure the keys' distances.
        ranges: The ranges of each head's slots.
        export: Outputs besides `out`: none, the lse, or lse and logits.
        architecture: The GPU's, see `slots_per_block`.
        after: An output of a kernel that changed keys and values in place, so that this one runs
            later.
    """

    q: mx.array = field(kw_only=False)
    k: Rows = field(kw_only=False)
    v: Rows = field(kw_only=False)
    scale: float
    mask: mx.array | str | None = None
    sinks: mx.array | None = None
    remainder: Remainder | None = None
    saturation: tuple[float, ...] | None = None
    frame_scale: mx.array | None = None
    means: mx.array | None = None
    ranges: Ranges | None = None
    export: int = EXPORT_LOGITS
    architecture: str = ""
    after: mx.array | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Slots of each KV head."""
        return (self.k.shape[2],) * self.k.shape[1] if self.ranges is None else self.ranges.lengths

    def attended(self, launcher: Launcher) -> VectorResult:
        """Launch the kernel, and the one that merges the blocks that heads are cut into."""
        (B, Hq, L, D), Dv, lengths = self.q.shape, self.v.shape[-1], self.lengths
        G, itemsize = Hq // len(lengths), self.k.dtype.size
        # A flat buffer has no axis of heads.
        k, v = (r if self.ranges is None else r[:, None] for r in (self.k, self.v))
        packed = isinstance(k, PackedRows) or isinstance(v, PackedRows)
        stored = row_bytes(k) + row_bytes(v) if packed else None
        block = slots_per_block(lengths, G, L, D, Dv, itemsize, self.architecture, stored)
        work = work_of(lengths, self.ranges, block)
        kind, columns = kind_of_mask(self.mask, L, max(lengths))
        export = self.export if block is None else max(self.export, EXPORT_LSE)
        inputs = {"params": params(work, L, columns), **self._inputs(k, v, columns)}
        outputs = self._outputs(work, G, export)
        tiles = tiling(D, Dv, G, L, itemsize, packed)
        written = launcher.launch(
            "attention_vector",
            inputs,
            outputs,
            {
                "T": k.dtype,
                "D": D,
                "DV": Dv,
                **packing(keys=k, values=v),
                "G": G,
                "QUERIES": tiles.queries,
                "ROWS": tiles.rows,
                "ROW_GROUPS": tiles.row_groups,
                "SIMDS": tiles.simdgroups,
                "KEYS": tiles.keys,
                "MASK": kind,
                "SINKS": self.sinks is not None,
                "REMAINDER": self.remainder is not None,
                "DISTANCES": self.means is not None,
                "FRAME": self.frame_scale is not None,
                "EXPORT": export,
            },
            (1, work.items, B * tiles.row_blocks),
            tiles.simdgroups * SIMDGROUP,
        )
        if block is not None:
            out, lse, heads = written["out"], written["lse"], len(lengths)
            written |= _merged(launcher, inputs["params"], out, lse, heads)
        alike = lengths[0] if self.ranges is None else None
        return _shaped(written, (B, Hq, L, Dv), len(lengths), alike)

    def _inputs(self, k: Rows, v: Rows, columns: int) -> dict[str, mx.array]:
        """Buffers by name, without the table of work."""
        inputs = {
            "factors": _floats((self.scale,)),
            "queries": self.q,
            **buffers(keys=k, values=v),
        }
        if isinstance(self.mask, mx.array):
            inputs["mask"] = mask_rows(self.mask, (*self.q.shape[:3], columns))
        if self.sinks is not None:
            inputs["sinks"] = mx.contiguous(self.sinks)
        if self.remainder is not None:
            statistics = self.remainder.arrays
            inputs |= {name: mx.contiguous(statistics[of]) for name, of in REMAINDER.items()}
            inputs["saturation"] = _floats(self.saturation or (SATURATION,) * len(self.lengths))
        if self.frame_scale is not None:
            inputs["frame_scale"] = self.frame_scale
        if self.means is not None:
            inputs["means"] = mx.contiguous(self.means)
        if self.after is not None:
            inputs["after"] = self.after
        return inputs

    def _outputs(self, work: Work, G: int, export: int) -> Outputs:
        """Shapes and dtypes of the outputs, by name."""
        B, _, L, _ = self.q.shape
        outputs: Outputs = {"out": ((B, work.items, G, L, self.v.shape[-1]), self.q.dtype)}
        if export >= EXPORT_LSE:
            outputs["lse"] = ((B, work.items, G, L), mx.float32)
        if export == EXPORT_LOGITS:
            outputs["logits"] = ((B, G * L * work.slots), mx.float32)
        if self.means is not None:
            outputs["distances"] = ((B, work.slots), mx.float32)
        return outputs


def _merged(
    launcher: Launcher, launch_params: mx.array, partials: mx.array, lses: mx.array, heads: int
) -> dict[str, mx.array]:
    """out `[B, Hk, G * L, Dv]` and lse `[B, Hk, G * L]`, merged from the results of blocks."""
    B, _, G, L, Dv = partials.shape
    return launcher.launch(
        "attention_merge",
        {"params": launch_params, "partials": partials, "partial_lses": lses},
        {
            "out": ((B, heads, G * L, Dv), partials.dtype),
            "lse": ((B, heads, G * L), mx.float32),
        },
        {"DV": Dv, "SIMDS": _MERGE_SIMDGROUPS},
        (G * L, heads, B),
        _MERGE_SIMDGROUPS * SIMDGROUP,
    )


def _shaped(
    written: dict[str, mx.array], out_shape: tuple[int, ...], heads: int, equal: int | None
) -> VectorResult:
    """Outputs in the shapes of the operands; per-slot outputs only when heads are equal."""
    B, Hq, L, _ = out_shape
    shapes = {"out": out_shape, "lse": (B, Hq, L)}
    if equal is not None:
        shapes |= {"logits": (B, Hq, L, equal), "distances": (B, heads, equal)}
    return VectorResult(
        **{
            name: array.reshape(shapes[name]) if name in shapes else array
            for name, array in written.items()
        }
    )


def kind_of_mask(mask: mx.array | str | None, queries: int, slots: int) -> tuple[int, int]:
    """The template argument, and the number of columns of an array mask.

    Args:
        mask: None, "causal" or an array.
        queries: The number of queries L.
        slots: The number of slots N.
    """
    if mask is None or (isinstance(mask, str) and queries == 1):
        return NO_MASK, 0
    if isinstance(mask, str):
        return CAUSAL, 0
    return ARRAY_MASK, mask.shape[-1] if mask.shape[-1] > 1 else slots


def mask_rows(mask: mx.array, shape: tuple[int, ...]) -> mx.array:
    """An array mask as a view of `[B, Hq, L, columns]`."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return mx.broadcast_to(mask, shape)


# Most layers of a model have the same numbers.
@lru_cache(maxsize=64)
def _floats(numbers: tuple[float, ...]) -> mx.array:
    return mx.array(numbers, mx.float32)
