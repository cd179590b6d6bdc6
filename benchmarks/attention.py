"""One layer's attention for one token: MLX's, ours in all its forms, and a plain read of equal
size.

Between two reads of the same keys and values more is read than the caches hold, as in a layer of a
large model; small shapes have too few copies for that and are served by the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, cycle
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from benchmarks.layers import full_layer
from benchmarks.machine import cache_bytes, probe
from benchmarks.measuring import Arm, Progress, Samples, in_turns, timed
from mlx_h2o.attention.backends.operands import Ranges
from mlx_h2o.attention.ops import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_mass,
    scaled_dot_product_attention_with_scores,
)
from mlx_h2o.policies import make_policy
from mlx_h2o.slots.packed import PackedRows, Packing, Rows

READ = "plain read"
MLX = "MLX"
OFF = "no scores"
SCORES = "scores"
MASS = "mass only"
UNIFORM = "uniform heads"
RAGGED = "ragged heads"
STEP = "step, streaming"
STEP_H2O = "step, h2o"
STEP_DISTINCT = "step, distinct"
STEP_RAGGED = "step, distinct, ragged"

EIGHT = "8 bits"
FOUR = "4 bits"
MIXED = "8-bit keys, 4-bit values"
COMPOSITE = "mlx-lm, 8 bits"

#: Attention with scores over packed rows.
PACKED = {EIGHT: Packing(8, 8), FOUR: Packing(4, 4), MIXED: Packing(8, 4)}
# The packing of each arm that reads packed rows.
PACKINGS = {**PACKED, COMPOSITE: PACKED[EIGHT]}

# The fused steps; `streaming` without a remainder shows the cost of a step without a choice.
STEPS = {STEP: ("streaming", False), STEP_H2O: ("h2o", True), STEP_DISTINCT: ("distinct", True)}

# The ragged head has this many times the slots of each other head.
RAGGEDNESS = 8
# The most copies of keys and values that an arm cycles through.
MOST_COPIES = 32


@dataclass(frozen=True)
class Shape:
    """A layer's heads and widths."""

    query_heads: int
    kv_heads: int
    key_width: int
    value_width: int

    def __str__(self) -> str:
        widths = f"{self.key_width}"
        if self.value_width != self.key_width:
            widths += f"/{self.value_width}"
        return f"({self.query_heads}, {self.kv_heads}, {widths})"


#: Llama-like with 4 and 2 query heads per KV head, the embedded model, and one KV head (MLA).
LARGE = Shape(32, 8, 128, 128)
SHAPES = (LARGE, Shape(16, 8, 128, 128), Shape(4, 2, 64, 64), Shape(16, 1, 576, 512))
SLOTS = (256, 1024, 4096, 16384)
# The size at which packed rows are measured.
PACKED_SLOTS = 4096


@dataclass(frozen=True)
class Case:
    """One size of the measurement.

    Attributes:
        shape: Heads and widths.
        slots: N, per KV head.
        dtype: Its name in mlx.core.
    """

    shape: Shape
    slots: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.packed_bytes(Packing())

    @property
    def packs(self) -> bool:
        """Whether packed rows are measured too."""
        return (self.shape, self.slots) == (LARGE, PACKED_SLOTS)

    def packed_bytes(self, packing: Packing) -> int:
        """Bytes of keys and values stored with this packing."""
        size = self.mx_dtype.size
        row = packing.row_bytes("keys", self.shape.key_width, size)
        row += packing.row_bytes("values", self.shape.value_width, size)
        return self.shape.kv_heads * self.slots * row

    @property
    def mx_dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = getattr(mx, self.dtype)
        return dtype

    def ragged_lengths(self) -> list[int]:
        """Lengths of the same sum; the first head has `RAGGEDNESS` times as many as each other."""
        others = self.shape.kv_heads - 1
        part = self.shape.kv_heads * self.slots // (others + RAGGEDNESS)
        return [self.shape.kv_heads * self.slots - others * part, *[part] * others]


@dataclass(frozen=True)
class Result:
    """The result of a case; some arms are missing with one KV head or without packed rows."""

    case: Case
    samples: Samples

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the plain read."""
        return self.case.nbytes / self.samples.median(READ)

    def share_of_bandwidth(self, arm: str) -> float:
        """Bytes of keys and values per second, as a share of the plain read's."""
        stored = self.case.packed_bytes(PACKINGS.get(arm, Packing()))
        return self.samples.speed(arm, READ) * stored / self.case.nbytes

    def price(self, arm: str, base: str) -> float:
        """The share by which an arm takes longer than another."""
        return self.samples.ratio(arm, base) - 1

    def as_json(self) -> dict[str, Any]:
        """All times and ratios."""
        arms = self.samples.as_json()
        for arm, times in arms.items():
            times["over_mlx"] = self.samples.speed(arm, MLX)
            times["share_of_bandwidth"] = self.share_of_bandwidth(arm)
        return {
            **asdict(self.case.shape),
            "slots": self.case.slots,
            "dtype": self.case.dtype,
            "nbytes": self.case.nbytes,
            "bandwidth": self.bandwidth,
            "arms": arms,
            "price": {
                name: self.price(arm, base)
                for name, (arm, base) in PRICES.items()
                if arm in arms and base in arms
            },
        }


#: The prices: an arm, and the same arm without the feature.
PRICES = {
    "scores": (SCORES, OFF),
    "mass": (MASS, OFF),
    "ragged": (RAGGED, UNIFORM),
    "ragged_step": (STEP_RAGGED, STEP_DISTINCT),
    "h2o": (STEP_H2O, STEP),
    "distinct": (STEP_DISTINCT, STEP),
}


def measure(case: Case, rounds: int, progress: Progress | None = None) -> Result:
    """Measure one case on the CPU."""
    with mx.stream(mx.cpu):
        samples = in_turns(arms_of(case), rounds, progress=progress)
    mx.clear_cache()
    return Result(case, samples)


def arms_of(case: Case) -> dict[str, Arm]:
    """Everything measured for a case, by name."""
    shape, dtype = case.shape, case.mx_dtype
    Hk, N = shape.kv_heads, case.slots
    copies = min(MOST_COPIES, 1 + -(-2 * cache_bytes() // case.nbytes))
    q = mx.random.normal((1, shape.query_heads, 1, shape.key_width)).astype(dtype)
    k = mx.random.normal((1, Hk, N, shape.key_width)).astype(dtype)
    v = mx.random.normal((1, Hk, N, shape.value_width)).astype(dtype)
    scale = shape.key_width**-0.5
    pairs = [(k + 0, v + 0) for _ in range(copies)]
    mx.eval(q, pairs)
    # The arms share the copies and cycle together, or one would find rows that another has read.
    pair = cycle(pairs)
    flat = cycle([(k.reshape(1, Hk * N, -1), v.reshape(1, Hk * N, -1)) for k, v in pairs])

    def over(
        attention: Callable[..., Any],
        operands: Iterator[tuple[Rows, Rows]] | Iterator[tuple[mx.array, mx.array]] = pair,
        **options: Any,
    ) -> Arm:
        return timed(lambda: mx.eval(attention(q, *next(operands), scale=scale, **options)))

    arms = {
        READ: plain_read(case.nbytes),
        MLX: over(mx.fast.scaled_dot_product_attention),
        OFF: over(scaled_dot_product_attention),
        SCORES: over(scaled_dot_product_attention_with_scores),
        MASS: over(scaled_dot_product_attention_with_mass),
    }

    def step(policy: str, remainder: bool, lengths: Sequence[int]) -> Arm:
        keys, values = k.reshape(1, Hk * N, -1), v.reshape(1, Hk * N, -1)
        layers = [
            full_layer(make_policy(policy), keys, values, lengths, q, remainder=remainder)
            for _ in range(copies)
        ]
        layer = cycle(layers)
        return timed(lambda: mx.eval(next(layer)()))

    for name, (policy, remainder) in STEPS.items():
        arms[name] = step(policy, remainder, [N] * Hk)
    if Hk > 1:
        attention = scaled_dot_product_attention
        arms[UNIFORM] = over(attention, flat, ranges=ranges_of([N] * Hk))
        arms[RAGGED] = over(attention, flat, ranges=ranges_of(case.ragged_lengths()))
        arms[STEP_RAGGED] = step("distinct", True, case.ragged_lengths())
    if case.packs:
        packed = {name: packed_copies(k, v, packing) for name, packing in PACKED.items()}
        for name, operands in packed.items():
            arms[name] = over(scaled_dot_product_attention_with_scores, operands)
        arms[COMPOSITE] = over(composite, packed[EIGHT])
    return arms


def packed_copies(k: mx.array, v: mx.array, packing: Packing) -> Iterator[tuple[Rows, Rows]]:
    """Packed keys and values, endlessly, from more copies than the caches hold."""
    keys = packing.rows("keys", packing.fields("keys", k))
    values = packing.rows("values", packing.fields("values", v))
    copies = min(MOST_COPIES, 1 + -(-2 * cache_bytes() // (keys.nbytes + values.nbytes)))
    return cycle([(copied(keys), copied(values)) for _ in range(copies)])


def copied(rows: Rows) -> Rows:
    """The same rows in memory of their own."""
    if not isinstance(rows, PackedRows):
        return rows + 0
    words, scales, biases = (array + 0 for array in rows.arrays)
    mx.eval(words, scales, biases)
    return replace(rows, words=words, scales=scales, biases=biases)


def composite(q: mx.array, k: PackedRows, v: PackedRows, *, scale: float) -> mx.array:
    """mlx-lm's attention over a quantized cache: three operations, and no scores."""
    out: mx.array = quantized_scaled_dot_product_attention(
        q[...],  # mlx-lm scales the array it gets in place
        (k.words, k.scales, k.biases),
        (v.words, v.scales, v.biases),
        scale,
        None,
        k.group_size,
        k.bits,
    )
    return out


def ranges_of(lengths: Sequence[int]) -> Ranges:
    """Ranges of heads that lie one after the other."""
    return tuple(zip([0, *accumulate(lengths)], lengths, strict=False))


def plain_read(nbytes: int) -> Arm:
    """An arm with the seconds that a plain read of `nbytes` takes at the rate beyond the caches."""
    from mlx_h2o import _ext

    whole, native = max(256 << 20, 4 * cache_bytes()), probe()
    return lambda: nbytes / native.read_bandwidth(whole, threads=_ext.threads())
