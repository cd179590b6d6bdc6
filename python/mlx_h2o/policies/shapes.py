"""Checks that a registered policy returns arrays of the right shapes, before a cache holds rows.

Otherwise a wrong shape would appear in the middle of a step, when rows are already stored.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlx_h2o.policies.base import Observation, ObservedMass, Policy, Slots

#: Slots of the trial: the least that the policy needs, within these bounds.
FEWEST_SLOTS, MOST_SLOTS = 16, 256


def check_shapes(policy: Policy, heads: int, key_width: int, value_width: int) -> None:
    """Raise ValueError if `accumulate`, `priority` or `prompt_priority` return other shapes.

    This project's own policies are tested; others are called once, with made-up rows of one
    sequence. An exception over made-up rows is ignored.

    Args:
        policy: The policy to check.
        heads: KV heads, H.
        key_width: Width of a key, D.
        value_width: Width of a value, Dv.
    """
    if type(policy).__module__.startswith(f"{__package__}."):
        return
    N = min(max(policy.least_budget(), FEWEST_SLOTS), MOST_SLOTS)
    shape = (1, heads, N)
    scores = mx.ones(shape)
    keys = mx.sin(mx.arange(heads * N * key_width).astype(mx.float32))
    values = mx.cos(mx.arange(heads * N * value_width).astype(mx.float32))
    slots = Slots(
        keys=keys.reshape(*shape, key_width),
        values=values.reshape(*shape, value_width),
        positions=mx.broadcast_to(mx.arange(N, dtype=mx.int32), shape),
        scores=scores,
        offset=N,
        evictable=mx.ones(shape, mx.bool_),
        evicted=0,
        evicted_mean_key=mx.zeros((1, heads, key_width)),
    )
    observation: Observation = ObservedMass(scores / N)
    if not policy.sums_mass:
        logits = mx.zeros((1, heads, 1, N))
        observation = Observation(logits, mx.logsumexp(logits, axis=-1), heads)
    windowed = policy.needs_attention and policy.prompt == "window"
    calls: dict[str, Callable[[], object]] = {
        "priority": lambda: policy.priority(slots),
        "prompt_priority": lambda: policy.prompt_priority(slots, scores if windowed else None),
    }
    if policy.needs_attention:
        calls["accumulate"] = lambda: policy.accumulate(scores, observation)
    for method, call in calls.items():
        try:
            result = call()
        except Exception:
            # Made-up rows are no reason to refuse a policy; a real step would raise again.
            continue
        require_shape(policy, method, result, shape)


def require_shape(policy: Policy, method: str, result: object, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the result of a policy's method is an array of this shape.

    Args:
        policy: The policy, for the message.
        method: The method's name, for the message.
        result: The method's result.
        shape: The shape that it must have.
    """
    if isinstance(result, mx.array) and result.shape == shape:
        return
    what = result.shape if isinstance(result, mx.array) else type(result).__name__
    raise ValueError(
        f"{type(policy).__name__}.{method} of policy {policy.name!r} must give an array "
        f"[batch, KV heads, slots] of shape {shape}; it gave {what}."
    )
