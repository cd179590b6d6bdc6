"""Function transformations, in which a bounded cache cannot work.

`mx.compile` runs a function once and then replays what it recorded: a cache outside the function
would not change while the tokens go on. `mx.grad` and `mx.vmap` would leave arrays in it that are
invalid afterwards.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

__all__ = ["REFUSED", "tracing"]

REFUSED = (
    "A bounded cache cannot be used within mx.compile, mx.grad or mx.vmap: it changes from call to "
    "call, and they trace a call only once. Call the model uncompiled (compile parts of it that "
    "take no cache), or use mlx-lm's own caches there."
)


@cache
def _placeholder() -> mx.array:
    """An array that was the placeholder of an argument when a function was compiled."""
    inputs: list[mx.array] = []

    def keep(x: mx.array) -> mx.array:
        inputs.append(x)
        return x

    mx.compile(keep)(mx.zeros(1))
    return inputs[0]


def _tracing_by_mlx() -> bool:
    """The extension's answer without the extension: how MLX refuses to evaluate a placeholder."""
    try:
        mx.async_eval(_placeholder())
    except RuntimeError:  # it has no value: no function is being traced
        return False
    except ValueError:  # evaluation is forbidden: a function is being traced
        return True
    raise AssertionError("MLX evaluated a placeholder.")


try:
    from mlx_h2o.attention.backends.cpu import (
        tracing as tracing,  # if it was built for this MLX
    )
except ImportError:
    tracing = _tracing_by_mlx
    _placeholder()  # made now, while no function is being traced
