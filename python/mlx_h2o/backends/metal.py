"""The Metal backend: the kernels of metal/ through `mx.fast.metal_kernel`."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlx_h2o.backends import attention_launches, reference
from mlx_h2o.backends.launcher import Launcher
from mlx_h2o.backends.reference import attention_mass

__all__ = ["attend", "attention_mass", "attention_with_scores"]


def _make(**kernel: Any) -> Any:
    return mx.fast.metal_kernel(**kernel)


_LAUNCHER = Launcher(_make, "metal")


@cache
def _architecture() -> str:
    return str(mx.device_info()["architecture"])


def attend(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> attention_launches.Attended:
    """See `attention_launches.attend`."""
    options.setdefault("architecture", _architecture())
    return attention_launches.attend(_LAUNCHER, q, k, v, **options)


def attention_with_scores(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """See `mlx_h2o.attention.scaled_dot_product_attention_with_scores`."""
    if not attention_launches.supports(q, k, v):
        return reference.attention_with_scores(q, k, v, scale=scale, mask=mask, sinks=sinks)
    attended = attend(q, k, v, scale=scale, mask=mask, sinks=sinks)
    assert attended.logits is not None
    assert attended.lse is not None
    return attended.out, attended.logits, attended.lse
