"""What the GPU backends share: everything but who builds a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import mlx.core as mx

from mlx_h2o import gpu_decoding
from mlx_h2o.backends import attention_launches, prompt_launches, reference, work
from mlx_h2o.backends.launcher import Launcher
from mlx_h2o.backends.reference import Ranges, Seed
from mlx_h2o.decode_step import Decoding
from mlx_h2o.masks import Mask
from mlx_h2o.packed import PackedRows, Rows
from mlx_h2o.policies import Policy


@cache
def default_architecture() -> str:
    """What MLX calls the default device: "applegpu_g13s", "sm_90"."""
    return str(mx.device_info()["architecture"])


@dataclass
class Gpu:
    """The kernels of metal/ on one kind of GPU.

    Attributes:
        launcher: Builds and launches them.
        architecture: Names the GPU, by which work is shared out (`tiling.slots_per_block`).
    """

    launcher: Launcher
    architecture: Callable[[], str] = default_architecture

    def attend(self, q: mx.array, k: Rows, v: Rows, **options: Any) -> attention_launches.Attended:
        """See `attention_launches.attend`."""
        options.setdefault("architecture", self.architecture())
        return attention_launches.attend(self.launcher, q, k, v, **options)

    def attention(
        self,
        q: mx.array,
        k: Rows,
        v: Rows,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
        seed: Seed | None = None,
        ranges: Ranges | None = None,
    ) -> mx.array:
        """See `mlx_h2o.attention.scaled_dot_product_attention`."""
        # Over plain rows MLX's own attention is the best there is.
        packed = isinstance(k, PackedRows) or isinstance(v, PackedRows)
        plain = seed is None and ranges is None and not packed
        if plain or not prompt_launches.supports(q, k):
            return reference.attention(
                q, k, v, scale=scale, mask=mask, sinks=sinks, seed=seed, ranges=ranges
            )
        return self._out_and_lse(q, k, v, scale, mask, sinks, seed, ranges)[0]

    def attention_with_scores(
        self,
        q: mx.array,
        k: Rows,
        v: Rows,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
        seed: Seed | None = None,
        ranges: Ranges | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """See `mlx_h2o.attention.scaled_dot_product_attention_with_scores`."""
        if not attention_launches.supports(q, k, v):
            return reference.attention_with_scores(
                q, k, v, scale=scale, mask=mask, sinks=sinks, seed=seed, ranges=ranges
            )
        attended = self.attend(
            q, k, v, scale=scale, mask=mask, sinks=sinks, ranges=_ranges_of(ranges)
        )
        out, scores, lse = attended.out, attended.logits, attended.lse
        assert scores is not None
        assert lse is not None
        if seed is not None:
            out, lse = reference.join(out, lse, *seed)
        if ranges is not None:
            scores = _placed(scores, ranges, (q.shape[1] // len(ranges), q.shape[2]), k, -mx.inf)
        return out, scores, lse

    def attention_with_mass(
        self,
        q: mx.array,
        k: Rows,
        v: Rows,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
        seed: Seed | None = None,
        ranges: Ranges | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """See `mlx_h2o.attention.scaled_dot_product_attention_with_mass`."""
        if not prompt_launches.supports(q, k):
            return reference.attention_with_mass(
                q, k, v, scale=scale, mask=mask, sinks=sinks, seed=seed, ranges=ranges
            )
        out, lse = self._out_and_lse(q, k, v, scale, mask, sinks, seed, ranges)
        mass = prompt_launches.prompt_mass(
            self.launcher, q, k, lse, scale=scale, mask=mask, ranges=_ranges_of(ranges)
        )
        if ranges is not None:
            mass = _placed(mass, ranges, (), k, 0.0)
        return out, mass, lse

    def _out_and_lse(
        self,
        q: mx.array,
        k: Rows,
        v: Rows,
        scale: float,
        mask: Mask,
        sinks: mx.array | None,
        seed: Seed | None,
        ranges: Ranges | None,
    ) -> tuple[mx.array, mx.array]:
        """Attention `[B, Hq, L, Dv]` and its log-sum-exp `[B, Hq, L]`, with all columns."""
        if attention_launches.supports(q, k, v):
            attended = self.attend(
                q,
                k,
                v,
                scale=scale,
                mask=mask,
                sinks=sinks,
                ranges=_ranges_of(ranges),
                export=attention_launches.EXPORT_LSE,
            )
            assert attended.lse is not None
            out, lse = attended.out, attended.lse
        else:
            out = _attention_of_prompt(q, k, v, scale, mask, sinks, ranges)
            lse = prompt_launches.prompt_lse(
                self.launcher, q, k, scale=scale, mask=mask, ranges=_ranges_of(ranges)
            )
            # MLX's attention says nothing about rows that see nothing.
            out = mx.where((lse == -mx.inf)[..., None], mx.zeros((), out.dtype), out)
            if sinks is not None:
                lse = mx.logaddexp(lse, sinks.astype(mx.float32)[:, None])
        return (out, lse) if seed is None else reference.join(out, lse, *seed)

    def can_decode(self, policy: Policy, keys: mx.array, values: mx.array) -> bool:
        """See `decoding.can_decode`."""
        fits = gpu_decoding.supports(policy, keys, values)
        return fits and gpu_decoding.writes_in_place(self.launcher)

    def start_decoding(self, *layer: Any) -> Decoding:
        """See `decoding.start_decoding`."""
        return gpu_decoding.GPUDecoding(self.launcher, self.architecture(), *layer)


def _attention_of_prompt(
    q: mx.array,
    k: Rows,
    v: Rows,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
    ranges: Ranges | None,
) -> mx.array:
    """MLX's attention of many queries; packed rows are dequantized a KV head at a time."""
    if not (isinstance(k, PackedRows) or isinstance(v, PackedRows)):
        return reference.attention(q, k, v, scale=scale, mask=mask, sinks=sinks, ranges=ranges)
    heads = k.shape[1] if ranges is None else len(ranges)
    group = q.shape[1] // heads
    outs = []
    for h in range(heads):
        # In a flat buffer the head's slots are its range, in another they are an axis.
        where: Any = (slice(None), slice(h, h + 1))
        if ranges is not None:
            start, length = ranges[h]
            where = (slice(None), None, slice(start, start + length))
        queries = slice(h * group, (h + 1) * group)
        of_head = mask
        if isinstance(mask, mx.array) and mask.ndim > 2 and mask.shape[-3] > 1:
            of_head = mask[..., queries, :, :]
        outs.append(
            reference.attention(
                q[:, queries],
                _narrow(k[where]),
                _narrow(v[where]),
                scale=scale,
                mask=of_head,
                sinks=None if sinks is None else sinks[queries],
            )
        )
    return mx.concatenate(outs, axis=1)


def _narrow(rows: Rows) -> mx.array:
    """Rows in the model's dtype."""
    if not isinstance(rows, PackedRows):
        return rows
    return mx.dequantize(
        rows.words, rows.scales, rows.biases, group_size=rows.group_size, bits=rows.bits
    )


def _ranges_of(ranges: Ranges | None) -> work.Ranges | None:
    """First slots and lengths, as launches want them."""
    if ranges is None:
        return None
    return work.Ranges(tuple(start for start, _ in ranges), tuple(length for _, length in ranges))


def _placed(
    flat: mx.array, ranges: Ranges, rows: tuple[int, ...], k: Rows, filler: float
) -> mx.array:
    """What lies head after head, each `[*rows, length]`, at the heads' ranges `[B, *rows, S]`."""
    ends = accumulate(math.prod(rows) * length for _, length in ranges)
    heads = mx.split(flat, list(ends)[:-1], axis=1)
    parts = [
        head.reshape(flat.shape[0], *rows, length)
        for head, (_, length) in zip(heads, ranges, strict=True)
    ]
    return reference.placed(parts, ranges, k.shape[1], filler)
