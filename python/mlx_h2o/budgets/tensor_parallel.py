"""Tensor parallelism: the KV heads that this process holds of a model shared by several.

mlx-lm's `model.shard()` gives each rank consecutive KV heads of every layer, in order. A head
chooses for itself, so ranks need not communicate; where a whole layer evicts the same token
(`unit="layer"`), the mean priority of all its heads is taken over the ranks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear

from mlx_h2o import _checks

Item = TypeVar("Item")


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that share a model's KV heads.

    Attributes:
        rank: This process's rank, from 0.
        count: The number of processes.
    """

    rank: int
    count: int

    def own(self, of_heads: Sequence[Item]) -> tuple[Item, ...]:
        """This rank's items of a list with one for each KV head of a layer."""
        each = len(of_heads) // self.count
        return tuple(of_heads[self.rank * each : (self.rank + 1) * each])

    def own_rows(self, of_heads: mx.array) -> mx.array:
        """This rank's rows of an array `[H, ...]`."""
        return mx.split(of_heads, self.count, axis=0)[self.rank]


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks among which a model's KV heads are shared; None if this process has them all.

    Raises:
        ValueError: Only some of the processes share them, so they cannot agree.
    """
    for name, module in model.named_modules():
        sharded = isinstance(module, AllToShardedLinear | QuantizedAllToShardedLinear)
        if sharded and any(key in name.split(".")[-1] for key in ("k_proj", "kv_proj", "qkv")):
            group, everyone = module.group, mx.distributed.init()
            if group.size() != everyone.size():
                raise ValueError(
                    f"The model is shared by {group.size()} of {everyone.size()} processes: share "
                    "it by all of them (model.shard()), or run fewer."
                )
            return Ranks(group.rank(), group.size()) if group.size() > 1 else None
    return None


def mean_of_ranks(x: mx.array, count: int) -> mx.array:
    """The mean of every rank's array, the same on each."""
    return x if count == 1 else mx.distributed.all_sum(x) / count


def checked_ranks(count: int) -> int:
    """A checked number of processes that share a layer's heads.

    Raises:
        ValueError: The number is invalid, or another number of processes runs.
    """
    count = _checks.whole("ranks", count, 1)
    if count > 1 and mx.distributed.init().size() != count:
        raise ValueError(
            f"This cache holds its part of heads that {count} processes share, and "
            f"{mx.distributed.init().size()} are running: start as many (mlx.launch)."
        )
    return count
