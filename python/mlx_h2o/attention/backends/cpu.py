"""The CPU kernels of c_api/src/cpu; attention takes about as long as reading keys and values.

Importing this raises ImportError, with the reason, if the extension is missing or was built for
another MLX.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Unpack

import mlx.core as mx

from mlx_h2o.attention.backends.operands import Operands, Options
from mlx_h2o.slots.packed import PackedRows, Rows

try:
    from mlx_h2o import _ext
except ImportError as error:
    raise ImportError(f"the extension mlx_h2o._ext cannot be loaded ({error})") from error

# Checked before any call, since another MLX has another layout of its classes.
if _ext.built_for_mlx != version("mlx").partition(".dev")[0]:
    raise ImportError(
        f"the extension was built for MLX {_ext.built_for_mlx}, and {version('mlx')} is installed"
    )

try:
    _ext.Stored([mx.zeros((1, 1, 1, 1))])
except TypeError as error:
    raise ImportError("the extension and MLX were built with different nanobinds") from error

tracing = _ext.tracing


def attention(q: mx.array, k: Rows, v: Rows, **options: Unpack[Options]) -> mx.array:
    """See `mlx_h2o.attention.ops.scaled_dot_product_attention`."""
    return _call(_ext.Export.none, Operands(q, k, v, **options))[0]


def attention_with_scores(
    q: mx.array, k: Rows, v: Rows, **options: Unpack[Options]
) -> tuple[mx.array, mx.array, mx.array]:
    """See `mlx_h2o.attention.ops.scaled_dot_product_attention_with_scores`."""
    out, lse, scores = _call(_ext.Export.logits, Operands(q, k, v, **options))
    return out, scores, lse


def attention_with_mass(
    q: mx.array, k: Rows, v: Rows, **options: Unpack[Options]
) -> tuple[mx.array, mx.array, mx.array]:
    """See `mlx_h2o.attention.ops.scaled_dot_product_attention_with_mass`."""
    out, lse, mass = _call(_ext.Export.mass, Operands(q, k, v, **options))
    return out, mass, lse


def pack(rows: mx.array, bits: int, group_size: int) -> PackedRows:
    """See `PackedRows.of`; bit for bit the same."""
    words, scales, biases = _ext.pack(rows, bits, group_size)
    return PackedRows(words, scales, biases, bits, group_size)


def _call(export: _ext.Export, call: Operands[Rows]) -> list[mx.array]:
    return _ext.attention(
        call.q,
        stored(call.k),
        stored(call.v),
        scale=call.scale,
        causal=isinstance(call.mask, str),
        mask=None if isinstance(call.mask, str) else call.mask,
        sinks=call.sinks,
        seed=call.seed,
        ranges=None if call.ranges is None else list(call.ranges),
        wanted=export,
    )


def stored(rows: Rows) -> _ext.Stored:
    """Keys or values of one kind in the extension's type."""
    if isinstance(rows, PackedRows):
        return _ext.Stored(rows.arrays, rows.bits, rows.group_size)
    return _ext.Stored([rows])
