"""The CPU kernels of python/src: attention that costs what reading the keys and values costs.

Importing this raises ImportError, with the reason, where the extension is missing or was built for
another MLX.
"""

from __future__ import annotations

from importlib.metadata import version

import mlx.core as mx

from mlx_h2o.backends.reference import Ranges, Seed, attention_mass
from mlx_h2o.masks import Mask
from mlx_h2o.packed import PackedRows, Rows

try:
    from mlx_h2o import _ext
except ImportError as error:
    raise ImportError(f"the extension mlx_h2o._ext cannot be loaded ({error})") from error

# Checked before any call: another MLX lays its classes out differently.
if _ext.built_for_mlx != version("mlx").partition(".dev")[0]:
    raise ImportError(
        f"the extension was built for MLX {_ext.built_for_mlx}, and {version('mlx')} is installed"
    )

try:
    _ext.Stored([mx.zeros((1, 1, 1, 1))])
except TypeError as error:
    raise ImportError("the extension and MLX were built with different nanobinds") from error

__all__ = [
    "attention",
    "attention_mass",
    "attention_with_mass",
    "attention_with_scores",
]


def attention(
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
    return _call(_ext.Export.none, q, k, v, scale, mask, sinks, seed, ranges)[0]


def attention_with_scores(
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
    out, lse, scores = _call(_ext.Export.logits, q, k, v, scale, mask, sinks, seed, ranges)
    return out, scores, lse


def attention_with_mass(
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
    out, lse, mass = _call(_ext.Export.mass, q, k, v, scale, mask, sinks, seed, ranges)
    return out, mass, lse


def _call(
    wanted: _ext.Export,
    q: mx.array,
    k: Rows,
    v: Rows,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
    seed: Seed | None,
    ranges: Ranges | None,
) -> list[mx.array]:
    return _ext.attention(
        q,
        stored(k),
        stored(v),
        scale=scale,
        causal=isinstance(mask, str),
        mask=None if isinstance(mask, str) else mask,
        sinks=sinks,
        seed=seed,
        ranges=None if ranges is None else list(ranges),
        wanted=wanted,
    )


def stored(rows: Rows) -> _ext.Stored:
    """Keys or values as the extension takes them."""
    if isinstance(rows, PackedRows):
        return _ext.Stored(rows.arrays, rows.bits, rows.group_size)
    return _ext.Stored([rows])
