"""The kernels of metal/ as a backend, through `mx.fast.metal_kernel` or `mx.fast.cuda_kernel`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import Any, Unpack

import mlx.core as mx

from mlx_h2o.attention.backends import (
    attention_launches,
    gpu_decoder,
    prompt_launches,
    reference,
    work,
)
from mlx_h2o.attention.backends.decoder import Decoder, Lent
from mlx_h2o.attention.backends.launcher import Launcher
from mlx_h2o.attention.backends.operands import Operands, Options, Ranges
from mlx_h2o.attention.backends.self_check import SelfCheck
from mlx_h2o.attention.backends.self_check_variants import (
    OF_MLX,
    TWO_PASSES,
    AttentionVariant,
    FusedVariant,
    Proof,
    check_attention,
)
from mlx_h2o.attention.backends.tiling import MOST_QUERIES
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.slots.packed import PackedRows, Rows
from mlx_h2o.slots.softmax import join


@cache
def default_architecture() -> str:
    """MLX's name of the default device: "applegpu_g13s", "sm_90"."""
    return str(mx.device_info()["architecture"])


@dataclass
class Gpu:
    """The kernels of metal/ on one kind of GPU.

    Attributes:
        launcher: The launcher, which builds and launches them.
        architecture: The GPU's name, by which work is shared out (`tiling.slots_per_block`).
        self_check: The verdicts on which variants of the kernels may be used.
    """

    launcher: Launcher
    architecture: Callable[[], str] = default_architecture
    self_check: SelfCheck = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.self_check is None:
            self.self_check = SelfCheck(lambda: self.architecture())

    def pack(self, rows: mx.array, bits: int, group_size: int) -> PackedRows:
        """See `PackedRows.of`."""
        return reference.pack(rows, bits, group_size)

    def attend(
        self, q: mx.array, k: Rows, v: Rows, **options: Any
    ) -> attention_launches.VectorResult:
        """See `attention_launches.attend`."""
        options.setdefault("architecture", self.architecture())
        return attention_launches.attend(self.launcher, q, k, v, **options)

    def attention(self, q: mx.array, k: Rows, v: Rows, **options: Unpack[Options]) -> mx.array:
        """See `mlx_h2o.attention.ops.scaled_dot_product_attention`."""
        call = Operands(q, k, v, **options)
        # Over dense rows MLX's own attention is the fastest.
        plain = call.seed is None and call.ranges is None and not call.packed
        mlx_is_right = not plain or self._mlx_is_right(call)
        if plain and mlx_is_right:
            return reference.attention(q, k, v, **options)
        if prompt_launches.supports(q, k) and self._proven("attention", call):
            return self._out_and_lse(call)[0]
        # Of ranges the definition, too, asks MLX's for each head.
        if mlx_is_right and (call.ranges is None or q.shape[2] > MOST_QUERIES):
            return reference.attention(q, k, v, **options)
        return reference.attention_with_scores(q, k, v, **options)[0]

    def attention_with_scores(
        self, q: mx.array, k: Rows, v: Rows, **options: Unpack[Options]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """See `mlx_h2o.attention.ops.scaled_dot_product_attention_with_scores`."""
        call = Operands(q, k, v, **options)
        fits = attention_launches.supports(q, k, v)
        if not fits or not self._proven("attention_with_scores", call):
            return reference.attention_with_scores(q, k, v, **options)
        attended = self._attended(call)
        out, scores, lse = attended.out, attended.logits, attended.lse
        assert scores is not None
        assert lse is not None
        if call.seed is not None:
            out, lse = join(out, lse, *call.seed)
        if call.ranges is not None:
            rows = q.shape[1] // len(call.ranges), q.shape[2]
            scores = _placed(scores, call.ranges, rows, k, -mx.inf)
        return out, scores, lse

    def attention_with_mass(
        self, q: mx.array, k: Rows, v: Rows, **options: Unpack[Options]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """See `mlx_h2o.attention.ops.scaled_dot_product_attention_with_mass`."""
        call = Operands(q, k, v, **options)
        if not prompt_launches.supports(q, k) or not self._proven("attention_with_mass", call):
            return reference.attention_with_mass(q, k, v, **options)
        out, lse = self._out_and_lse(call)
        mass = prompt_launches.prompt_mass(
            self.launcher, q, k, lse, scale=call.scale, mask=call.mask, ranges=_ranges_of(call)
        )
        if call.ranges is not None:
            mass = _placed(mass, call.ranges, (), k, 0.0)
        return out, mass, lse

    def _attended(self, call: Operands[Rows], **export: Any) -> attention_launches.VectorResult:
        """Attention by the kernel that reads keys and values once; the seed is joined later."""
        return self.attend(
            call.q,
            call.k,
            call.v,
            scale=call.scale,
            mask=call.mask,
            sinks=call.sinks,
            ranges=_ranges_of(call),
            **export,
        )

    def _out_and_lse(self, call: Operands[Rows]) -> tuple[mx.array, mx.array]:
        """Attention `[B, Hq, L, Dv]` and its log-sum-exp `[B, Hq, L]`, with all columns."""
        if attention_launches.supports(call.q, call.k, call.v):
            attended = self._attended(call, export=attention_launches.EXPORT_LSE)
            assert attended.lse is not None
            out, lse = attended.out, attended.lse
        else:
            out = _attention_of_prompt(replace(call, seed=None))
            ranges = _ranges_of(call)
            lse = prompt_launches.prompt_lse(
                self.launcher, call.q, call.k, scale=call.scale, mask=call.mask, ranges=ranges
            )
            # MLX's attention leaves queries that attend to no key undefined.
            out = mx.where((lse == -mx.inf)[..., None], mx.zeros((), out.dtype), out)
            if call.sinks is not None:
                lse = mx.logaddexp(lse, call.sinks.astype(mx.float32)[:, None])
        return (out, lse) if call.seed is None else join(out, lse, *call.seed)

    def _proven(self, operation: str, call: Operands[Rows]) -> bool:
        """Whether the kernels of an operation agree with the definition on this device."""
        variant = AttentionVariant.of(operation, call.q, call.k, call.v, call.options)
        return self.self_check.usable(variant, lambda: check_attention(self, variant))

    def _mlx_is_right(self, call: Operands[Rows]) -> bool:
        """Whether MLX's own attention of such plain rows does here what the definition says."""
        few = call.q.shape[2] <= MOST_QUERIES and call.k.shape[2] >= TWO_PASSES
        return not few or self._proven(OF_MLX, call)

    def can_decode(
        self,
        settings: CacheSettings,
        call: AttentionCall,
        keys: mx.array,
        values: mx.array,
        proof: Proof,
    ) -> bool:
        """Whether there is a fused step for a layer like this one, verified on this device.

        Args:
            settings: The layer's settings.
            call: The call, with queries `[B, Hq, 1, D]` and sinks.
            keys: `[B, H, 1, D]`.
            values: `[B, H, 1, Dv]`.
            proof: The function that compares small steps like these with the definition.
        """
        if settings.gpu_form is None or not gpu_decoder.supports(keys, values):
            return False
        variant = FusedVariant.of(settings, call, keys, values)
        proven = self.self_check.usable(variant, lambda: proof(variant, settings))
        return proven and gpu_decoder.writes_in_place(self.launcher)

    def decoder(self, lent: Lent, settings: CacheSettings) -> Decoder:
        """See `choice.decoder_for`."""
        return gpu_decoder.GPUDecoder(self.launcher, self.architecture(), lent, settings)


def _attention_of_prompt(call: Operands[Rows]) -> mx.array:
    """MLX's attention of many queries; packed rows are dequantized a KV head at a time."""
    q, k, v, ranges, mask = call.q, call.k, call.v, call.ranges, call.mask
    if not call.packed:
        return reference.attention(q, k, v, **call.options)
    heads = k.shape[1] if ranges is None else len(ranges)
    group = q.shape[1] // heads
    outs = []
    for h in range(heads):
        # In a flat buffer the head's slots are its range, otherwise heads are an axis.
        where: Any = (slice(None), slice(h, h + 1))
        if ranges is not None:
            start, length = ranges[h]
            where = (slice(None), None, slice(start, start + length))
        queries = slice(h * group, (h + 1) * group)
        of_head = mask
        if isinstance(mask, mx.array) and mask.ndim > 2 and mask.shape[-3] > 1:
            of_head = mask[..., queries, :, :]
        sinks = None if call.sinks is None else call.sinks[queries]
        rows = _narrow(k[where]), _narrow(v[where])
        outs.append(
            reference.attention(q[:, queries], *rows, scale=call.scale, mask=of_head, sinks=sinks)
        )
    return mx.concatenate(outs, axis=1)


def _narrow(rows: Rows) -> mx.array:
    """Rows in the model's dtype."""
    if not isinstance(rows, PackedRows):
        return rows
    return mx.dequantize(
        rows.words, rows.scales, rows.biases, group_size=rows.group_size, bits=rows.bits
    )


def _ranges_of(call: Operands[Rows]) -> work.Ranges | None:
    """First slots and lengths, in the launches' type."""
    if call.ranges is None:
        return None
    starts, lengths = zip(*call.ranges, strict=True)
    return work.Ranges(starts, lengths)


def _placed(
    flat: mx.array, ranges: Ranges, rows: tuple[int, ...], k: Rows, filler: float
) -> mx.array:
    """Arrays `[*rows, length]`, head after head, at the heads' ranges `[B, *rows, S]`."""
    ends = accumulate(math.prod(rows) * length for _, length in ranges)
    heads = mx.split(flat, list(ends)[:-1], axis=1)
    parts = [
        head.reshape(flat.shape[0], *rows, length)
        for head, (_, length) in zip(heads, ranges, strict=True)
    ]
    return reference.placed(parts, ranges, k.shape[1], filler)


#: The kernels of metal/ on Apple's and on NVIDIA's GPUs.
METAL = Gpu(Launcher(mx.fast.metal_kernel, "metal"))
CUDA = Gpu(Launcher(mx.fast.cuda_kernel, "cuda"))
