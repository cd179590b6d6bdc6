"""The variants of GPU kernels that prove themselves, and the small cases that they run on.

Attention's operations and MLX's own attention (`OF_MLX`) are compared here. A fused step needs a
layer: its case is `layer/fused_case.py`.

MLX's own attention of few queries over plain rows is the best there is where nothing but the output
is wanted. On Apple's GPUs it takes two passes from 1,024 keys (4,096 on small ones), and other
kernels from 8,192 keys where eight query heads share a KV head. Both have been wrong: from 1,024
keys with grouped queries on an M3 Max (mlx#4022, with MLX 0.31.1, closed without a cause), and in
batches with the other (mlx#4431: MLX 0.32.2, mended in 0.32.3). So these are checked like our own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_h2o.attention.backends import reference
from mlx_h2o.attention.backends.operands import Options
from mlx_h2o.attention.backends.self_check import (
    LOGITS,
    MASS,
    MLX_OVER_OURS,
    OUT,
    Error,
    Pair,
    worst,
)
from mlx_h2o.attention.backends.tiling import MOST_QUERIES
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.slots.packed import PackedRows, Packing, Rows, dense
from mlx_h2o.slots.softmax import Mask

#: The operations of the attention kernels: methods of a backend.
OPERATIONS = ("attention", "attention_with_scores", "attention_with_mass")
#: The operation of variants of MLX's own attention, of few queries over `TWO_PASSES` keys or more.
OF_MLX = "MLX's attention"

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
#: Keys from which a large Apple GPU takes two passes.
TWO_PASSES = 1024
#: Query heads of a KV head, and keys, from which there is a kernel for them alone.
EIGHT, KEYS_OF_EIGHT = 8, 8192
# Neither is a multiple of what a block of keys holds.
KEYS = TWO_PASSES + 27, KEYS_OF_EIGHT + 13


@dataclass(frozen=True)
class AttentionVariant:
    """All properties that decide which text of the attention kernels a call compiles.

    Attributes:
        operation: One of `OPERATIONS`, or `OF_MLX`.
        dtype: The dtype of queries, keys and values.
        widths: The widths D and Dv.
        packing: Bits and group size of keys, then of values; 0 bits are dense rows.
        group: Query heads of a KV head.
        queries: L rounded up to a power of two (not for `OF_MLX`), or 0 for a prompt's.
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
        queries = L if operation == OF_MLX else 1 << (L - 1).bit_length()
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
            0 if L > MOST_QUERIES else queries,
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


#: A function that compares small steps of a variant, with settings like a layer's, with the
#: definition.
Proof = Callable[["FusedVariant", CacheSettings], Error]


class Form(NamedTuple):
    """A layer's part of the variant (`CacheSettings.gpu_form`)."""

    score: str
    priority: str
    per_layer: bool
    age_normalised: bool
    value_weighted: bool
    packing: Packing
    framed: bool
    remembers: bool
    answers: bool


class FusedVariant(NamedTuple):
    """A layer's form, with the types of its rows and calls.

    Attributes:
        form: The layer's form, the attributes of `Form`.
        dtype: The dtype of keys and values.
        widths: The widths D and Dv.
        group: Query heads of a KV head.
        heads: KV heads where a layer's heads decide together, else 0.
        sinks: Whether there are attention sinks.
    """

    form: tuple[object, ...]
    dtype: mx.Dtype
    widths: tuple[int, int]
    group: int
    heads: int
    sinks: bool

    @classmethod
    def of(
        cls, settings: CacheSettings, call: AttentionCall, keys: mx.array, values: mx.array
    ) -> FusedVariant:
        """The variant of a step; computed at every step.

        Args:
            settings: The settings of a layer, whose policy has kernels.
            call: The call, with queries `[B, Hq, 1, D]` and sinks.
            keys: `[B, H, 1, D]`.
            values: `[B, H, 1, Dv]`.
        """
        form, (_, H, _, D) = settings.gpu_form, keys.shape
        assert form is not None
        heads = H if form[2] else 0
        group = call.q.shape[1] // H
        return cls(form, keys.dtype, (D, values.shape[-1]), group, heads, call.sinks is not None)

    def __str__(self) -> str:
        form = Form(*self.form)  # type: ignore[arg-type]
        D, Dv = self.widths
        parts = [f"a fused step of {_name(self.dtype)}, keys {D} wide, values {Dv}{form.packing}"]
        if form.packing.packs:
            parts[0] += f" by {form.packing.group_size}"
        parts += [f"{self.group} query heads a KV head"]
        parts += [f"scores {form.score}", f"victims by {form.priority}"]
        parts += [f"{self.heads} heads together"] * bool(self.heads)
        parts += ["by age"] * form.age_normalised + ["by values"] * form.value_weighted
        parts += ["in a frame"] * form.framed + ["sinks"] * self.sinks
        parts += ["a remainder"] * form.answers
        parts += ["statistics of the evicted"] * (form.remembers and not form.answers)
        return ", ".join(parts)


def check_attention(backend: Any, variant: AttentionVariant) -> Error:
    """Compare a backend's attention on small cases with the definition on the CPU.

    Args:
        backend: A module or an object with the methods of `OPERATIONS`.
        variant: The variant to run.
    """
    if variant.operation == OF_MLX:
        counts = KEYS if variant.group == EIGHT else KEYS[:1]
        errors = [_attention_error(backend, variant, keys) for keys in counts]
        return max(errors, key=lambda error: error.size)
    if not variant.queries:
        return _attention_error(backend, variant, SLOTS_OF_PROMPT)
    one_pass = _attention_error(backend, variant, SLOTS)
    if not one_pass.tolerable:
        return one_pass
    two_passes = _attention_error(_large(backend), variant, SLOTS_OF_TWO_PASSES)
    return max(one_pass, two_passes, key=lambda e: e.size)


def _large(backend: Any) -> Any:
    """A backend that shares its work out as on a large GPU, if it shares work out."""
    architecture = getattr(backend, "architecture", None)
    if architecture is None or architecture().startswith("sm_"):
        return backend
    return replace(backend, architecture=lambda: LARGE_APPLE_GPU)


def _attention_error(backend: Any, variant: AttentionVariant, slots: int) -> Error:
    """One case over so many slots."""
    with mx.stream(mx.cpu):
        q, k, v, options = operands(variant, slots)
        mx.eval(q, dense(k), dense(v))
    of_mlx = variant.operation == OF_MLX  # which the definition calls
    attend = reference.attention if of_mlx else getattr(backend, variant.operation)
    outputs = attend(q, k, v, **options)
    outputs = [outputs] if isinstance(outputs, mx.array) else list(outputs)
    mx.eval(outputs)
    with mx.stream(mx.cpu):
        expected = _expected(variant, q, k, v, options)
        mx.eval(expected)
    return worst(_pairs(variant, outputs, expected))


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
    logits = BATCH, HEADS * G, L, slots
    mask = _mask(variant.mask, rng, logits, hides_all=variant.operation != OF_MLX)
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


def _mask(kind: str, rng: np.random.Generator, shape: tuple[int, ...], hides_all: bool) -> Mask:
    """A mask that hides a third of the slots, and all of them in one of many rows.

    MLX's attention leaves a query that sees no key undefined; for it `hides_all` is False.
    """
    if kind == "none":
        return None
    if kind == "causal":
        return "causal"
    visible = rng.random(shape) > 1 / 3
    if shape[2] > 1 and hides_all:
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
    variant: AttentionVariant, outputs: list[mx.array], expected: list[mx.array]
) -> dict[str, Pair]:
    """Outputs by name, with their tolerances."""
    second = ("masses", MASS) if variant.operation.endswith("mass") else ("logits", LOGITS)
    ours = variant.queries and variant.operation != OF_MLX
    out = OUT[variant.dtype].times(1 if ours else MLX_OVER_OURS)
    named = [("output", out), second, ("log-sum-exp", LOGITS)]
    return {
        name: Pair(ours, theirs, tolerance)
        for (name, tolerance), ours, theirs in zip(named, outputs, expected, strict=False)
    }


def _packing(rows: Rows) -> tuple[int, int]:
    """Bits and group size, or 0 and 1."""
    return (rows.bits, rows.group_size) if isinstance(rows, PackedRows) else (0, 1)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
