"""Attention -> scores: a call's queries attend, and the policy learns what they looked at."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_h2o.attention import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_mass,
    scaled_dot_product_attention_with_scores,
)
from mlx_h2o.backends.reference import QUERY_BLOCK, Seed
from mlx_h2o.masks import Mask, block_of
from mlx_h2o.packed import AnyRows, first_rows
from mlx_h2o.policies import Observation, ObservedMass, Policy
from mlx_h2o.remainder import Remainder


def observe(
    policy: Policy,
    q: mx.array,
    keys: AnyRows,
    values: AnyRows,
    fields: dict[str, mx.array],
    *,
    heads: int,
    offset: int,
    scale: float,
    mask: Mask,
    sinks: mx.array | None,
    remainder: Remainder | None,
    own: bool,
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Attend with L queries to N slots of H KV heads.

    Args:
        policy: Whose scores are accumulated.
        q: `[B, Hq, L, D]`.
        keys: `[B, H, N, D]`, the new rows last.
        values: `[B, H, N, Dv]`.
        fields: "positions" `[B, H, N]` and, where the policy looks at attention, "scores".
        heads: H.
        offset: The next logical position, after these queries.
        scale: Factor on q.k.
        mask: As in `H2OKVCache.attend`.
        sinks: Attention-sink logits `[Hq]`.
        remainder: That answers beside the slots, if any.
        own: Whether keys and values are the cache's own.

    Returns:
        out `[B, Hq, L, Dv]`; the new scores `[B, H, N]`, or None; the mass that the prompt's last
        `window` queries gave each slot, `[B, H, N]`, or None where the policy wants none.
    """
    L, N = q.shape[2], keys.shape[2]
    scores = fields.get("scores")
    looks = policy.needs_attention
    windowed = looks and L > 1 and policy.prompt == "window"
    # Queries before this one are attended to and not looked at.
    first_seen = (L - min(policy.window, L)) if windowed else (0 if looks else L)

    def operands(start: int, end: int) -> tuple[int, dict[str, Any]]:
        """How many keys the queries start to end - 1 see, and what attention needs for it."""
        block = block_of(mask, start, end, L, N, own)
        seed: Seed | None = None
        if remainder is not None:
            seed = remainder.column(q[:, :, start:end], scale), remainder.mean_value
        return block.keys, {
            "q": q[:, :, start:end],
            "k": first_rows(keys, block.keys),
            "v": first_rows(values, block.keys),
            "scale": scale,
            "mask": block.mask,
            "sinks": sinks,
            "seed": seed,
        }

    outs = []
    if first_seen:
        outs.append(scaled_dot_product_attention(**operands(0, first_seen)[1]))
    window_mass = None
    # A window is one block, and so is whatever leaves no logits behind.
    step = L if windowed or policy.sums_mass else QUERY_BLOCK
    for start in range(first_seen, L, step):
        end = min(start + step, L)
        n_keys, call = operands(start, end)
        seen: Observation
        if policy.sums_mass:
            out, mass, _ = scaled_dot_product_attention_with_mass(**call)
            # Keys made of the cached ones may have more heads than these (MLA).
            seen = ObservedMass(mass.reshape(mass.shape[0], heads, -1, n_keys).mean(axis=2))
        else:
            out, logits, lse = scaled_dot_product_attention_with_scores(**call)
            seen = Observation(logits, lse, heads)
        outs.append(out)
        assert scores is not None
        if windowed:
            window_mass = mass_of_window(policy, seen, fields, offset, L)
            seen.stands_for = stands_for(L, N, end - start)
        part = policy.accumulate(scores[..., :n_keys], seen)
        rest = scores[..., n_keys:]
        scores = mx.concatenate([part, rest], axis=-1) if rest.size else part
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)
    return out, scores, window_mass


def mass_of_window(
    policy: Policy, seen: Observation, fields: dict[str, mx.array], offset: int, L: int
) -> mx.array:
    """Mass of the last `window` queries of the whole prompt, `[B, H, N]`.

    A chunk shorter than the window lacks queries of earlier chunks; each slot's mean mass per step
    stands in for them.
    """
    missing = policy.window - L
    if missing <= 0:
        return seen.mass
    ages = mx.maximum(offset - L - fields["positions"], 1).astype(mx.float32)
    return seen.mass + missing * policy.mean_mass(fields["scores"], ages)


def stands_for(L: int, N: int, window: int) -> mx.array:
    """How many of a chunk's L queries each of a window's queries stands for, per slot `[N]`.

    Every old slot was seen by all L queries and by `window` of them in the window; new row j by
    L - j and by min(window, L - j).
    """
    new = mx.arange(L, 0, -1).astype(mx.float32)
    old = mx.full((N - L,), L / window)
    return mx.concatenate([old, new / mx.minimum(new, window)])
