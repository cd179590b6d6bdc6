"""MomentKV's column: count, means and value-key covariance of the evicted, to the first order.

Source: *MomentKV: Closing the Directional Gap in KV Cache Eviction for Long-Context Inference*,
https://arxiv.org/abs/2606.01563 (its abstract and readers' notes; no code was found). Of n evicted
rows with means k and v and covariance C of values and keys, a query q sees, to the first order,

    sum exp(q.k_i) v_i  =  n exp(q.k) (v + C q),      sum exp(q.k_i)  =  n exp(q.k)

so the column's value depends on the query. Victims are rows that the statistics represent well:
here those with the least attention so far times 1 - cosine of value and mean evicted value. The
paper's exact score may differ.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from benchmarks.board.column_cache import ELEMENT, SCORE, ColumnCache, kinds_of
from benchmarks.board.reading import having_read, plain, through
from benchmarks.board.rivals import Rival
from benchmarks.board.tasks import Task
from mlx_h2o.evaluate.reader import Reader

#: Tokens of the beginning, and the part of the slots for the newest tokens, that stay.
SINK, RECENT = 4, 0.25
#: Fewer slots than these leave nothing to choose.
FEWEST = 3 * SINK
TINY = 1e-9


class MomentCache(ColumnCache):
    """One layer.

    Args:
        slots: Rows of each head.
    """

    def __init__(self, slots: int):
        super().__init__()
        self.slots = slots
        self.count = 0
        self.key_mean: mx.array | None = None
        self.value_mean: mx.array | None = None
        self.covariance: mx.array | None = None

    @property
    def state(self) -> list[mx.array]:
        moments = self.key_mean, self.value_mean, self.covariance
        return super().state + [x for x in moments if x is not None]

    @property
    def counted(self) -> int:
        moments = self.key_mean, self.value_mean, self.covariance
        own = sum(x.size for x in moments if x is not None) * ELEMENT
        return super().counted + own + (0 if self.mass is None else self.mass.size * SCORE)

    def column(self, queries: mx.array) -> tuple[mx.array, mx.array] | None:
        if self.key_mean is None or self.value_mean is None or self.covariance is None:
            return None
        logits = (queries * self.key_mean[:, :, None]).sum(axis=-1) + math.log(self.count)
        values = self.value_mean[:, :, None] + queries @ self.covariance.swapaxes(-1, -2)
        return logits, values

    def evict(self) -> None:
        assert self.keys is not None
        assert self.values is not None
        assert self.mass is not None
        N = self.keys.shape[2]
        if self.slots >= N:
            return
        aligned: mx.array | float = 0.0
        if self.value_mean is not None:
            mean = self.value_mean[:, :, None]
            lengths = mx.linalg.norm(self.values, axis=-1) * mx.linalg.norm(mean, axis=-1)
            aligned = (self.values * mean).sum(axis=-1) / mx.maximum(lengths, TINY)
        worth = self.mass * (1 - aligned) + TINY
        place = mx.arange(N)
        stays = (place < SINK) | (place >= N - round(RECENT * self.slots))
        order = mx.argsort(mx.where(stays, mx.inf, worth), axis=-1)
        self._gather(order[..., : N - self.slots])
        self.keep(mx.sort(order[..., N - self.slots :], axis=-1))

    def _gather(self, which: mx.array) -> None:
        """Add rows to the statistics: places `[B, H, n]`."""
        assert self.keys is not None
        assert self.values is not None
        keys = mx.take_along_axis(self.keys, which[..., None], axis=2)
        values = mx.take_along_axis(self.values, which[..., None], axis=2)
        n, m = which.shape[2], self.count
        k, v = keys.mean(axis=2), values.mean(axis=2)
        own = (values - v[:, :, None]).swapaxes(-1, -2) @ (keys - k[:, :, None])  # [B, H, Dv, D]
        if self.key_mean is None or self.value_mean is None or self.covariance is None:
            self.key_mean, self.value_mean, self.covariance = k, v, own / n
        else:
            # Chan's update of a covariance by another group's.
            dk, dv = k - self.key_mean, v - self.value_mean
            between = dv[..., :, None] * dk[..., None, :] * (m * n / (m + n))
            self.covariance = (self.covariance * m + own + between) / (m + n)
            self.key_mean = self.key_mean + dk * (n / (m + n))
            self.value_mean = self.value_mean + dv * (n / (m + n))
        self.count = m + n


def caches(model: nn.Module, size: int) -> list[Any]:
    """Empty caches of a number of bytes.

    Args:
        model: The model.
        size: Bytes of all layers in a 16-bit model, shared out evenly among all heads.

    Raises:
        ValueError: The bytes are too few, or the model has other layers.
    """
    kinds = kinds_of(model)
    heads = sum(kind.heads for kind in kinds)
    made = []
    for kind in kinds:
        key, value = kind.widths.key, kind.widths.value
        moments = (key + value + key * value) * ELEMENT
        slots = (size // heads - moments) // ((key + value) * ELEMENT + SCORE)
        if slots < FEWEST:
            raise ValueError(
                f"the covariance of {value} x {key} takes {moments:,} of a head's "
                f"{size // heads:,} bytes, which leaves {max(slots, 0)} slots"
            )
        made.append(MomentCache(slots))
    return made


def rival() -> Rival:
    """MomentKV on the board."""

    def sized(reader: Reader, part: Task, share: float) -> list[Any]:
        size = int(share * plain(reader.model, part.sized))
        return having_read(reader, caches(reader.model, size), part)

    return Rival(
        "MomentKV (from the paper)",
        "https://arxiv.org/abs/2606.01563",
        f"covariance in full, {SINK} sinks, a quarter of the slots for the newest",
        through(sized),
    )
