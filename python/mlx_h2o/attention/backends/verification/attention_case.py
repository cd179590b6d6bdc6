"""The attention kernels on a small case, compared with the definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_h2o.attention.backends import reference
from mlx_h2o.attention.backends.operands import Options
from mlx_h2o.attention.backends.tiling import MOST_QUERIES
from mlx_h2o.attention.backends.verification.compared import (
    LOGITS,
    MASS,
    OUT,
    Error,
    Pair,
    Tolerance,
    worst,
)
from mlx_h2o.storage.packed import PackedRows, Rows, dense
from mlx_h2o.storage.softmax import Mask

#: The operations of the attention kernels: methods of a backend.
OPERATIONS = ("attention", "attention_with_scores", "attention_with_mass")
#: The kernels of these operations, whose text a verdict belongs to.
KERNELS = ("attention_vector", "attention_merge", "prompt_lse", "prompt_mass")

# A full step of the largest threadgroup (32 simdgroups of 16 slots) and an uneven rest.
SLOTS = 555
# The number of slots from which a large GPU takes two passes.
SLOTS_OF_TWO_PASSES = 1100
LARGE_APPLE_GPU = "applegpu_g13s"
# Tiles of 64 rows and 64 keys, of which the last ones are partly filled.
PROMPT, SLOTS_OF_PROMPT = 70, 150
# Two sequences and two heads, so that the second ones are read with a stride.
BATCH, HEADS = 2, 2
# High enough that few slots have most of the weight, and a wrong logit shows in the output. A
# prompt's output is MLX's own, which rounds logits to the model's dtype: large ones lose much.
SHARPNESS, SHARPNESS_OF_PROMPT = 3.0, 1.0


# The tolerance for MLX's attention of a prompt, as a multiple of ours.
MLX_OVER_OURS = 4


@dataclass(frozen=True)
class AttentionVariant:
    """All properties that decide which text of the attention kernels a call compiles.

    Attributes:
        operation: One of `OPERATIONS`.
        dtype: The dtype of queries, keys and values.
        widths: The widths D and Dv.
        packing: Bits and group size of keys, then of values; 0 bits are dense rows.
        group: Query heads of a KV head.
        queries: L rounded up to a power of two, or 0 for a prompt's.
        mask: "none", "causal" or an array's dtype.
        sinks: Whether there are attention sinks.
        ranges: Whether each head's slots are a range of flat buffers.
    """

    operation: str
    dtype: mx.Dtype
    widths: tuple[int, int]
    packing: tuple[int, int, int, int]
    group: int
    queries: int
    mask: str = "none"
    sinks: bool = False
    ranges: bool = False

    @classmethod
    def of(
        cls, operation: str, q: mx.array, k: Rows, v: Rows, options: Options
    ) -> AttentionVariant:
        """The variant of a call, whose arguments are those of `mlx_h2o.attention.ops`."""
        L, mask, ranges = q.shape[2], options.get("mask"), options.get("ranges")
        kind = "none"
        if isinstance(mask, mx.array):
            kind = _name(mask.dtype)
        elif mask is not None and L > 1:
            kind = "causal"
        return cls(
            operation,
            k.dtype,
            (k.shape[-1], v.shape[-1]),
            (*_packing(k), *_packing(v)),
            q.shape[1] // (k.shape[1] if ranges is None else len(ranges)),
            0 if L > MOST_QUERIES else 1 << (L - 1).bit_length(),
            kind,
            options.get("sinks") is not None,
            ranges is not None,
        )

    def __str__(self) -> str:
        k_bits, k_group, v_bits, v_group = self.packing
        rows = [
            f"{width} wide" + (f" in {bits} bits by {size}" if bits else "")
            for width, bits, size in zip(
                self.widths, (k_bits, v_bits), (k_group, v_group), strict=True
            )
        ]
        parts = [f"{self.operation.replace('_', ' ')} of {_name(self.dtype)}"]
        parts += [f"keys {rows[0]}", f"values {rows[1]}", f"{self.group} query heads a KV head"]
        parts.append(f"{self.queries} queries" if self.queries else "a prompt")
        parts += [] if self.mask == "none" else [f"mask {self.mask}"]
        parts += ["sinks"] * self.sinks + ["ranges"] * self.ranges
        return ", ".join(parts)


def check(backend: Any, variant: AttentionVariant) -> Error:
    """Compare a backend's attention on small cases with the definition on the CPU.

    Args:
        backend: A module or an object with the methods of `OPERATIONS`.
        variant: The variant to run.
    """
    if not variant.queries:
        return _check(backend, variant, SLOTS_OF_PROMPT)
    one_pass = _check(backend, variant, SLOTS)
    if not one_pass.held:
        return one_pass
    two_passes = _check(_large(backend), variant, SLOTS_OF_TWO_PASSES)
    return max(one_pass, two_passes, key=lambda e: e.size)


def _large(backend: Any) -> Any:
    """A backend that shares its work out as on a large GPU, if it shares work out."""
    architecture = getattr(backend, "architecture", None)
    if architecture is None or architecture().startswith("sm_"):
        return backend
    return replace(backend, architecture=lambda: LARGE_APPLE_GPU)


def _check(backend: Any, variant: AttentionVariant, slots: int) -> Error:
    """One case over so many slots."""
    with mx.stream(mx.cpu):
        q, k, v, options = operands(variant, slots)
        mx.eval(q, dense(k), dense(v))
    found = getattr(backend, variant.operation)(q, k, v, **options)
    found = [found] if isinstance(found, mx.array) else list(found)
    mx.eval(found)
    with mx.stream(mx.cpu):
        expected = _expected(variant, q, k, v, options)
        mx.eval(expected)
    return worst(_pairs(variant, found, expected))


def operands(variant: AttentionVariant, slots: int) -> tuple[mx.array, Rows, Rows, Options]:
    """Queries, keys, values and options of a variant, from random numbers that are always the same.

    Args:
        variant: The variant of the call.
        slots: Slots of each head; with ranges the second head has an eighth of them.
    """
    rng = np.random.default_rng(slots)
    (D, Dv), G, dtype = variant.widths, variant.group, variant.dtype
    L = variant.queries or PROMPT
    heads = [slots] * HEADS
    if variant.ranges:
        heads = [slots, max(slots // 8, L)]

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, np.float32))

    sharpness = SHARPNESS if variant.queries else SHARPNESS_OF_PROMPT
    q = (sharpness * normal(BATCH, HEADS * G, L, D)).astype(dtype)
    shape = (BATCH, sum(heads)) if variant.ranges else (BATCH, HEADS, slots)
    k_bits, k_group, v_bits, v_group = variant.packing
    k = _stored(normal(*shape, D).astype(dtype), k_bits, k_group)
    v = _stored(normal(*shape, Dv).astype(dtype), v_bits, v_group)
    options: Options = {"scale": D**-0.5}
    mask = _mask(variant.mask, rng, (BATCH, HEADS * G, L, slots))
    if mask is not None:
        options["mask"] = mask
    if variant.sinks:
        options["sinks"] = (2 * normal(HEADS * G)).astype(dtype)
    if variant.ranges:
        options["ranges"] = [(0, heads[0]), (heads[0], heads[1])]
    return q, k, v, options


def _stored(rows: mx.array, bits: int, group_size: int) -> Rows:
    """Rows as a cache stores them."""
    return PackedRows.of(rows, bits, group_size) if bits else rows


def _mask(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Mask:
    """A mask that hides a third of the slots, and all of them in one of many rows."""
    if kind == "none":
        return None
    if kind == "causal":
        return "causal"
    visible = rng.random(shape) > 1 / 3
    if shape[2] > 1:
        visible[:, :, -1] = False
    if kind == "bool":
        return mx.array(visible)
    dtype: mx.Dtype = getattr(mx, kind)
    added = mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)
    return mx.where(mx.array(visible), added, mx.array(mx.finfo(dtype).min, dtype))


def _expected(
    variant: AttentionVariant, q: mx.array, k: Rows, v: Rows, options: Options
) -> list[mx.array]:
    """The results of the definition, in float32."""
    q, k, v = q.astype(mx.float32), dense(k).astype(mx.float32), dense(v).astype(mx.float32)
    if variant.operation == "attention_with_mass":
        return list(reference.attention_with_mass(q, k, v, **options))
    return list(reference.attention_with_scores(q, k, v, **options))


def _pairs(
    variant: AttentionVariant, found: list[mx.array], expected: list[mx.array]
) -> dict[str, Pair]:
    """Outputs by name, with their tolerances."""
    second = ("masses", MASS) if variant.operation.endswith("mass") else ("logits", LOGITS)
    out = OUT[variant.dtype]
    if not variant.queries:
        out = Tolerance(MLX_OVER_OURS * out.absolute, MLX_OVER_OURS * out.relative)
    named = [("output", out), second, ("log-sum-exp", LOGITS)]
    return {
        name: Pair(ours, theirs, tolerance)
        for (name, tolerance), ours, theirs in zip(named, found, expected, strict=False)
    }


def _packing(rows: Rows) -> tuple[int, int]:
    """Bits and group size, or 0 and 1."""
    return (rows.bits, rows.group_size) if isinstance(rows, PackedRows) else (0, 1)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
