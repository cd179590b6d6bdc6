"""What doctor times: attention and fused steps, ours and mlx-lm's, of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from mlx_h2o.attention.backends import choice, decoders
from mlx_h2o.attention.backends.decoder import DecodeStep, HeadPlan, Lent, PlannedToken
from mlx_h2o.attention.ops import scaled_dot_product_attention_with_scores
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.policies import make_policy
from mlx_h2o.storage.packed import PackedRows, Packing, Rows, value_lengths
from mlx_h2o.storage.remainder import Remainder

#: A layer of a model of 4 or 8 billion weights.
QUERY_HEADS, KV_HEADS, WIDTH = 32, 8, 128
GROUP_SIZE = 64
POLICY = "salient"
# Tokens that a full layer has seen beyond those it holds.
EVICTED = 1000

MLX, SCORES, PACKED_8, PACKED_4 = (
    "MLX's attention",
    "attention with scores",
    "the same, rows in 8 bits",
    "the same, rows in 4 bits",
)
WINDOW, STEP, STEP_8 = (
    "RotatingKVCache and MLX's attention",
    f"fused step, {POLICY}",
    f"fused step, {POLICY}, rows in 8 bits",
)
#: Bits of keys and values by arm, 0 for dense.
BITS = {MLX: 0, SCORES: 0, PACKED_8: 8, PACKED_4: 4, WINDOW: 0, STEP: 0, STEP_8: 8}
ATTENTION, STEPS = (MLX, SCORES, PACKED_8, PACKED_4), (WINDOW, STEP, STEP_8)


@dataclass(frozen=True)
class Size:
    """Of one call.

    Attributes:
        slots: N of each KV head.
        dtype: The dtype of queries, and of dense keys and values.
    """

    slots: int
    dtype: mx.Dtype

    @property
    def dense_bytes(self) -> int:
        """Of keys and values."""
        return 2 * KV_HEADS * self.slots * WIDTH * self.dtype.size


def usual_dtype() -> mx.Dtype:
    """Half on a GPU; float32 on a CPU, where 16-bit arithmetic is slow."""
    return mx.float32 if choice.gpu() is None else mx.float16


def attention(size: Size, name: str) -> Callable[[], mx.array]:
    """One query's attention over keys and values of its own, by the arm's name."""
    q = mx.random.normal((1, QUERY_HEADS, 1, WIDTH)).astype(size.dtype)
    k, v = (_rows(size, (1, KV_HEADS, size.slots, WIDTH)) for _ in range(2))
    mx.eval(q, k, v)
    scale = WIDTH**-0.5
    if name == MLX:
        return lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)
    stored: list[Rows] = [k, v]
    if BITS[name]:
        packed = [PackedRows.of(rows, BITS[name], GROUP_SIZE) for rows in (k, v)]
        mx.eval([rows.arrays for rows in packed])
        stored = list(packed)

    def with_scores() -> mx.array:
        out, scores, lse = scaled_dot_product_attention_with_scores(q, *stored, scale=scale)
        tied: mx.array = mx.depends(out, [scores, lse])
        return tied

    return with_scores


def step(size: Size, name: str) -> Callable[[], mx.array] | None:
    """One token in a full layer, by the arm's name; None where no fused step is to be had."""
    new = [
        mx.random.normal((1, heads, 1, WIDTH)).astype(size.dtype)
        for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
    ]
    mx.eval(new)
    return _window(size, *new) if name == WINDOW else _fused(size, BITS[name], *new)


def _window(size: Size, q: mx.array, k: mx.array, v: mx.array) -> Callable[[], mx.array]:
    """mlx-lm's sliding window, full."""
    cache = RotatingKVCache(max_size=size.slots, keep=4)
    mx.eval(cache.update_and_fetch(*(_rows(size, (1, KV_HEADS, size.slots, WIDTH)),) * 2))

    def work() -> mx.array:
        keys, values = cache.update_and_fetch(k, v)
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=WIDTH**-0.5)

    return work


def _fused(
    size: Size, bits: int, q: mx.array, k: mx.array, v: mx.array
) -> Callable[[], mx.array] | None:
    """A layer whose every slot is in use, with a decoder that evicts at every token."""
    if choice.gpu() is None and choice.cpu() is None:
        return None
    N, policy = size.slots, make_policy(POLICY)
    packing = Packing(bits, bits, GROUP_SIZE) if bits else Packing()
    keys, values = (_rows(size, (1, KV_HEADS * N, WIDTH)) for _ in range(2))
    fields = {**packing.fields("keys", keys), **packing.fields("values", values)}
    fields["positions"] = mx.tile(mx.arange(EVICTED, EVICTED + N, dtype=mx.int32), (1, KV_HEADS))
    fields["scores"] = mx.random.uniform(shape=(1, KV_HEADS * N))
    if policy.keeps_value_lengths(packing):
        fields["value_lengths"] = value_lengths(values)
    remembered = Remainder.empty(1, KV_HEADS, WIDTH, WIDTH)
    remembered.count += EVICTED
    remembered.var_key += 1
    victims = mx.zeros((1, KV_HEADS, 1), mx.int32)
    mx.eval(fields, remembered.arrays, victims)
    settings = CacheSettings(budgets=(N,) * KV_HEADS, policy=policy, packing=packing)
    decoder = decoders.decoder_for(Lent(fields, remembered, victims), settings)
    offset = EVICTED + N

    def work() -> mx.array:
        nonlocal offset
        offset += 1
        heads = tuple(
            HeadPlan(h * N, N, 0, policy.recent_slots(N), offset - N, True) for h in range(KV_HEADS)
        )
        token = PlannedToken(offset, heads)
        return decoder.step(DecodeStep(q, k, v, WIDTH**-0.5, None, token))[0]

    return work


def _rows(size: Size, shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape).astype(size.dtype)
