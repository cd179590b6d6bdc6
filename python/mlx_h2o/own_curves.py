"""A profile's curves by the very policy: each head's loss at b slots, from the policy run with b.

One pass of the full model over a text gives the queries, keys and values. On them every KV head is
tried token by token with every b of the grid and every order of the remainder, all side by side:
their logits are the same, so only masks, remainders and weighted sums differ. The loss is

    E ||W_o (o - o_b)||^2 / ||residual after attention||^2

with o the head's full attention output and o_b what b slots chosen by the policy, and their
remainder, give. Curves from a window (`calibration.calibrate`) mislead a policy that is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o import routing
from mlx_h2o.cache_lists import replaced
from mlx_h2o.calibration import GRID, Watcher, head_gram, output_projection, watched
from mlx_h2o.evaluate.simulation import SALIENT, STRIDE, Rule, Trial
from mlx_h2o.layer_kinds import layer_kinds
from mlx_h2o.profile import Profile, identity_of
from mlx_h2o.remainder import SATURATION

#: The orders that are tried: first, and second with the usual saturation.
ORDERS = (0.0, SATURATION)

#: Called with (layers done, layers in all).
Progress = Callable[[int, int], None]


@dataclass
class Curves:
    """What each head loses.

    Attributes:
        grid: Numbers of slots, ascending; the last is the whole text, and loses nothing.
        losses: `[layers][H]`, by order as in `ORDERS`, one loss a grid point.
    """

    grid: tuple[int, ...]
    losses: list[list[list[list[float]]]] = field(default_factory=list)

    def profile(self, model: nn.Module, **details: Any) -> Profile:
        """The curves as a profile: at each number of slots the better order's."""
        kinds = layer_kinds(model)
        identity = identity_of(model, [k.heads for k in kinds], [k.widths.key for k in kinds])
        best = [
            [tuple(falling([min(points) for points in zip(*orders, strict=True)])) for orders in h]
            for h in self.losses
        ]
        method = "output error of the policy itself, token by token"
        return Profile(identity, self.grid, tuple(map(tuple, best)), method, details)

    def saturation(self, budgets: Sequence[Sequence[int]]) -> list[list[float]]:
        """Each head's better t for these budgets `[layers][H]`, at the next grid point up."""
        return [
            [self._better(orders, b) for orders, b in zip(layer, slots, strict=True)]
            for layer, slots in zip(self.losses, budgets, strict=True)
        ]

    def _better(self, orders: Sequence[Sequence[float]], slots: int) -> float:
        at = next((i for i, b in enumerate(self.grid) if b >= slots), -1)
        losses = [points[at] for points in orders]
        return ORDERS[losses.index(min(losses))]


def falling(curve: Sequence[float]) -> list[float]:
    """The curve with every rise removed."""
    out = list(curve)
    for i in range(len(out) - 2, -1, -1):
        out[i] = max(out[i], out[i + 1])
    return out


class _Trying:
    """A cache that attends in full, and tries every setting on the way."""

    attending = True
    offset = 0

    def __init__(self, curves: Curves, rule: Rule, watcher: Watcher):
        self.curves, self.rule, self.watcher = curves, rule, watcher

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> Any:
        return mlx_lm_cache.KVCache().make_mask(
            N, return_array=return_array, window_size=window_size
        )

    def attend(
        self, q: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        out = mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=scale, mask=mask, sinks=sinks
        )
        (B, Hq, T, Dv), H = out.shape, keys.shape[1]
        project = output_projection(self.watcher.layer, Hq * Dv)
        attended = project(out.transpose(0, 2, 1, 3).reshape(B, T, -1))
        assert self.watcher.residual is not None
        norm = mx.square((self.watcher.residual + attended).astype(mx.float32)).sum(axis=-1)
        G = Hq // H
        grams = mx.stack([head_gram(project, Hq, Dv, h * G, G) for h in range(H)])
        grouped = q.astype(mx.float32).reshape(B, H, G, T, -1) * scale
        full = out.astype(mx.float32).reshape(B, H, G, T, Dv)
        losses = self._losses(grouped, keys, values, full, grams, norm)
        of_order = losses.reshape(H, len(ORDERS), -1)
        self.curves.losses.append(cast(list[list[list[float]]], of_order.tolist()))
        self.watcher.step()
        return out

    def _losses(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        full: mx.array,
        grams: mx.array,
        norm: mx.array,
    ) -> mx.array:
        """`[H, R]`: the mean over all tokens of each setting's error."""
        B, H, G, T, D = q.shape
        budgets = mx.array([*self.curves.grid] * len(ORDERS), mx.int32)
        saturation = mx.repeat(mx.array(ORDERS), len(self.curves.grid))
        shape = (B, H, budgets.size)
        trial = Trial(
            mx.broadcast_to(budgets, shape),
            mx.broadcast_to(saturation, shape),
            [self.rule],
            T,
            (D, values.shape[-1]),
        )
        keys, values = keys.astype(mx.float32), values.astype(mx.float32)
        total = mx.zeros((H, budgets.size))
        for i in range(T):
            N = min(-(-(i + 1) // STRIDE) * STRIDE, T)
            o = trial.step(q[..., i, :], keys[:, :, :N], values[:, :, :N], i + 1)
            d = (full[:, :, None, :, i] - o).reshape(*shape, -1)
            error = ((d @ grams) * d).sum(axis=-1) / mx.maximum(norm[:, i], 1e-12)[:, None, None]
            total = total + error.sum(axis=0)
            mx.eval(total, trial.state)
        return total / (B * T)


def own_curves(
    model: nn.Module,
    passes: mx.array,
    *,
    rule: Rule = SALIENT,
    grid: Sequence[int] = GRID,
    progress: Progress | None = None,
) -> Curves:
    """Measure every head of a model by running the policy.

    Args:
        model: An mlx-lm model with grouped-query attention that mlx_h2o can route.
        passes: Token ids `[B, T]`; T should be as long as the context that will be asked for.
        rule: The policy.
        grid: Numbers of slots; those from T on are left out, and T itself is added.
        progress: Told after each layer.
    """
    B, T = passes.shape
    curves = Curves((*(b for b in grid if b < T), T))
    layers = len(layer_kinds(model))

    def step() -> None:
        if progress:
            progress(len(curves.losses), layers)

    watcher = Watcher(curves.grid, step=step)
    routing.install()
    caches = [
        replaced(entry, lambda: _Trying(curves, rule, watcher))
        for entry in mlx_lm_cache.make_prompt_cache(model)
    ]
    with watched(model, watcher):
        mx.eval(model(passes, cache=caches))
    return curves
