"""Launches of the kernels that score prompts: two passes over the keys, and no logits in memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_h2o.attention.backends.attention_launches import kind_of_mask, mask_rows
from mlx_h2o.attention.backends.launcher import Launcher, Outputs
from mlx_h2o.attention.backends.row_buffers import buffers, packing
from mlx_h2o.attention.backends.tiling import WIDTHS
from mlx_h2o.attention.backends.work import Ranges, params, work_of
from mlx_h2o.slots.packed import Rows

# Rows and keys of a threadgroup, and its threads, as in logit_tile.h.
_TILE = 64
_THREADS = 256


def supports(q: mx.array, k: Rows) -> bool:
    """Whether the kernels support these operands."""
    return k.shape[-1] in WIDTHS and k.shape[-2] > 0 and q.dtype == k.dtype


def prompt_lse(
    launcher: Launcher,
    q: mx.array,
    k: Rows,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    ranges: Ranges | None = None,
) -> mx.array:
    """Log-sum-exp `[B, Hq, L]` float32 of each query's logits, minus infinity if it sees no key.

    Args:
        launcher: The GPU's launcher.
        q: `[B, Hq, L, D]`.
        k: `[B, Hk, N, D]`, or flat `[B, S, D]` with ranges; dense or packed.
        scale: Factor on q.k.
        mask: As in `attention_launches.attend`.
        ranges: The ranges of each head's slots.
    """
    call = _Call(q, k, scale, mask, ranges)
    rows = q.shape[1] // len(call.lengths) * q.shape[2]
    return call.launch(launcher, "prompt_lse", {}, {"lse": (q.shape[:3], mx.float32)}, rows)["lse"]


def prompt_mass(
    launcher: Launcher,
    q: mx.array,
    k: Rows,
    lse: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    ranges: Ranges | None = None,
) -> mx.array:
    """The mass of each slot from the queries, `[B, Hk, N]` float32, or `[B, slots]` with ranges.

    Args:
        launcher: The GPU's launcher.
        q: `[B, Hq, L, D]`.
        k: `[B, Hk, N, D]`, or flat `[B, S, D]` with ranges; dense or packed.
        lse: `[B, Hq, L]` over all columns of the softmax.
        scale: Factor on q.k.
        mask: As in `attention_launches.attend`.
        ranges: The ranges of each head's slots.
    """
    call = _Call(q, k, scale, mask, ranges)
    shape = k.shape[:3] if ranges is None else (k.shape[0], sum(call.lengths))
    outputs: Outputs = {"mass": (shape, mx.float32)}
    inputs = {"lse": mx.contiguous(lse)}
    return call.launch(launcher, "prompt_mass", inputs, outputs, max(call.lengths))["mass"]


class _Call:
    """The arguments of both passes."""

    def __init__(
        self,
        q: mx.array,
        k: Rows,
        scale: float,
        mask: mx.array | str | None,
        ranges: Ranges | None,
    ):
        B, Hq, L, D = q.shape
        if ranges is None:
            self.lengths: tuple[int, ...] = (k.shape[2],) * k.shape[1]
        else:
            self.lengths, k = ranges.lengths, k[:, None]
        kind, columns = kind_of_mask(mask, L, max(self.lengths))
        self._inputs = {
            "params": params(work_of(self.lengths, ranges, None), L, columns),
            "factors": mx.array([scale]),
            "queries": q,
            **buffers(keys=k),
        }
        if isinstance(mask, mx.array):
            self._inputs["mask"] = mask_rows(mask, (B, Hq, L, columns))
        self._template: dict[str, Any] = {
            "D": D,
            **packing(keys=k),
            "G": Hq // len(self.lengths),
            "MASK": kind,
        }
        self._batch = B

    def launch(
        self,
        launcher: Launcher,
        kernel: str,
        inputs: dict[str, mx.array],
        outputs: Outputs,
        along_x: int,
    ) -> dict[str, mx.array]:
        """Launch a kernel with one threadgroup per tile along x.

        Args:
            launcher: The GPU's launcher.
            kernel: The kernel's name.
            inputs: Inputs by the names of their buffers, beside those of all kernels.
            outputs: Names, shapes and dtypes.
            along_x: The number of queries or keys along x.
        """
        return launcher.launch(
            kernel,
            self._inputs | inputs,
            outputs,
            self._template,
            (-(-along_x // _TILE), len(self.lengths), self._batch),
            _THREADS,
        )
