"""Measuring a profile: what the model loses when one KV head is limited to b slots.

Two measures, both over a text that passes once through the full model:

- `calibrate`: all heads in one pass. For every KV head and every b the output error
  E ||W_o (o - o_b)||^2 / ||residual after attention||^2, with o the head's full attention output
  and o_b what b slots (sinks and a window) and the remainder give.
- `calibrate_exactly`: the yardstick. One pass per head and b, with that head alone limited; the
  loss is the KL divergence of the model's next-token distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o import routing
from mlx_h2o.cache_lists import replaced
from mlx_h2o.layer_kinds import LayerKind, layer_kinds
from mlx_h2o.profile import SMALLEST_BUDGET, Profile, identity_of
from mlx_h2o.remainder import SATURATION
from mlx_h2o.stock import stock_caches

# Slots tried per head, as far as the text is long.
GRID = (SMALLEST_BUDGET, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
SINK = 4
# Tokens of one pass; longer texts are cut into several.
WINDOW = 1024
# Fewer tell nothing.
LEAST_TOKENS = 4 * SMALLEST_BUDGET
# Queries worked on at a time: bounds the [G, block, T] logits to less than a prefill needs.
QUERY_BLOCK = 128

#: Called with (steps done, steps in all).
Progress = Callable[[int, int], None]


class PrefixStatistics:
    """Count, mean and variance of the rows from SINK to any position, for one KV head.

    Args:
        keys: `[T, D]`.
        values: `[T, Dv]`.
    """

    def __init__(self, keys: mx.array, values: mx.array):
        self.keys, self.values = keys.astype(mx.float32), values.astype(mx.float32)
        # Centred, so that the variance is no small difference of large numbers.
        self.centre = self.keys.mean(axis=0)
        centred = self.keys - self.centre
        self._key_sums = prefix_sums(centred)
        self._square_sums = prefix_sums(mx.square(centred))
        self._value_sums = prefix_sums(self.values)

    def upto(self, ends: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Statistics of rows SINK to end - 1, for each of `ends` `[n]`.

        Returns:
            count `[n, 1]`, mean key `[n, D]`, key variance `[n, D]`, mean value `[n, Dv]`.
        """
        ends = mx.maximum(ends, SINK)
        count = (ends - SINK).astype(mx.float32)[:, None]
        share = 1 / mx.maximum(count, 1)
        key, square, value = (
            (sums[ends] - sums[SINK]) * share
            for sums in (self._key_sums, self._square_sums, self._value_sums)
        )
        return count, key + self.centre, mx.maximum(square - mx.square(key), 0), value


def prefix_sums(x: mx.array) -> mx.array:
    """Sums of the first i rows, `[T + 1, D]`."""
    return mx.concatenate([mx.zeros((1, x.shape[1])), mx.cumsum(x, axis=0)])


def limited_attention(
    q: mx.array, rows: PrefixStatistics, start: int, scale: float, budgets: Sequence[int]
) -> Iterator[mx.array]:
    """Attention of one KV head's queries: in full, then with b slots and the remainder.

    Args:
        q: Queries `[G, n, D]` of positions start to start + n - 1.
        rows: The head's keys and values.
        start: Position of the first query.
        scale: Factor on q.k.
        budgets: The b to try.

    Yields:
        `[G, n, Dv]` float32: full attention, then one per b.
    """
    T = start + q.shape[1]
    keys, values = rows.keys[:T], rows.values[:T]
    scaled = q.astype(mx.float32) * scale
    at, of = mx.arange(start, T)[:, None], mx.arange(T)
    logits = mx.where(of <= at, scaled @ keys.T, -mx.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = mx.exp(logits - top)
    full = (weights @ values) / weights.sum(axis=-1, keepdims=True)
    yield full
    for budget in budgets:
        if budget >= T:  # nothing of this block is evicted yet
            yield full
            continue
        # Sinks, then the rows that any query of the block still holds in its window.
        oldest = max(SINK, start - (budget - SINK) + 1)
        window = weights[..., oldest:] * (of[oldest:] > at - (budget - SINK))
        kept = mx.concatenate([weights[..., :SINK], window], axis=-1)
        held = mx.concatenate([values[:SINK], values[oldest:]])
        count, mean, variance, value = rows.upto(at[:, 0] + 1 - (budget - SINK))
        x = 0.5 * (mx.square(scaled) * variance).sum(axis=-1, keepdims=True)
        r = (scaled * mean).sum(axis=-1, keepdims=True) + x * mx.rsqrt(1 + x / SATURATION)
        # The shift keeps both exponentials finite when the remainder outweighs every kept slot.
        shift = mx.maximum(r + mx.log(count) - top, 0)
        column = mx.exp(r + mx.log(count) - top - shift)
        kept = kept * mx.exp(-shift)
        total = kept.sum(axis=-1, keepdims=True) + column
        yield (kept @ held + column * value) / total


@dataclass
class Watcher:
    """What the measuring caches of one pass share."""

    grid: Sequence[int]
    losses: list[list[list[float]]] = field(default_factory=list)
    layer: nn.Module | None = None
    residual: mx.array | None = None
    #: The head to limit in an exact pass: (layer, KV head, slots).
    limited: tuple[int, int, int] | None = None
    step: Callable[[], None] = lambda: None


class _Measuring:
    """A cache that holds nothing: it looks at one pass over a whole text."""

    attending = True
    offset = 0

    def __init__(self, index: int, watcher: Watcher):
        self.index, self.watcher = index, watcher

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
        if self.watcher.limited is None:
            self._measure(q, keys, values, out, scale)
        elif self.watcher.limited[0] == self.index:
            out = self._limit(q, keys, values, out, scale)
        return out

    def _measure(
        self, q: mx.array, keys: mx.array, values: mx.array, out: mx.array, scale: float
    ) -> None:
        """Add this layer's output errors to the watcher's losses."""
        watcher, T = self.watcher, q.shape[2]
        group = q.shape[1] // keys.shape[1]
        project = output_projection(watcher.layer, q.shape[1] * values.shape[-1])
        attended = project(out.transpose(0, 2, 1, 3).reshape(1, T, -1))[0]
        assert watcher.residual is not None
        after = (watcher.residual[0] + attended).astype(mx.float32)
        norm = mx.square(after).sum(axis=-1)
        budgets = [b for b in watcher.grid if b < T]
        while len(watcher.losses) <= self.index:
            watcher.losses.append([[0.0] * len(watcher.grid) for _ in range(keys.shape[1])])
        for head in range(keys.shape[1]):
            rows = PrefixStatistics(keys[0, head], values[0, head])
            # ||W d||^2 = d (W^T W) d: the head's Gram matrix makes every b cheap.
            gram = head_gram(project, q.shape[1], values.shape[-1], head * group, group)
            errors = mx.zeros(len(budgets))
            for start in range(0, T, QUERY_BLOCK):
                queries = q[0, head * group : (head + 1) * group, start : start + QUERY_BLOCK]
                full, *limited = limited_attention(queries, rows, start, scale, budgets)
                block = norm[start : start + QUERY_BLOCK]
                errors = errors + mx.stack([_error(full - o, gram, block) for o in limited])
                mx.eval(errors)
            for i in range(len(budgets)):
                watcher.losses[self.index][head][i] += cast(float, errors[i].item()) / T
            watcher.step()

    def _limit(
        self, q: mx.array, keys: mx.array, values: mx.array, out: mx.array, scale: float
    ) -> mx.array:
        """Replace the limited head's output."""
        assert self.watcher.limited is not None
        _, head, budget = self.watcher.limited
        group = q.shape[1] // keys.shape[1]
        first, last = head * group, (head + 1) * group
        rows = PrefixStatistics(keys[0, head], values[0, head])
        blocks = []
        for start in range(0, q.shape[2], QUERY_BLOCK):
            queries = q[0, first:last, start : start + QUERY_BLOCK]
            _, limited = limited_attention(queries, rows, start, scale, [budget])
            blocks.append(limited)
        limited = mx.concatenate(blocks, axis=1)[None].astype(out.dtype)
        return mx.concatenate([out[:, :first], limited, out[:, last:]], axis=1)


def _error(difference: mx.array, gram: mx.array, norm: mx.array) -> mx.array:
    """Sum over queries of ||W_o d||^2 / norm for one head's output differences `[G, n, Dv]`."""
    d = difference.transpose(1, 0, 2).reshape(difference.shape[1], -1)
    return (((d @ gram) * d).sum(axis=-1) / mx.maximum(norm, 1e-12)).sum()


def output_projection(layer: nn.Module | None, width: int) -> Callable[[mx.array], mx.array]:
    """The layer's W_o: the linear map of an attention module that takes all heads' outputs.

    Args:
        layer: A transformer block.
        width: Hq * Dv.
    """
    names = ("o_proj", "out_proj", "wo", "dense", "c_proj")
    for name, module in layer.named_modules() if layer is not None else ():
        *path, last = name.split(".")
        if last in names and any("att" in part for part in path) and "weight" in module:
            takes = module.weight.shape[-1]
            if "scales" in module:  # quantized: packed columns
                takes = module.scales.shape[-1] * module.group_size
            if takes == width:
                return module  # type: ignore[no-any-return]
    raise ValueError(
        "No output projection was found in the model's attention, so heads cannot be weighed; use "
        '`mlx_h2o calibrate --exact`, or budgets="uniform".'
    )


def head_gram(
    project: Callable[[mx.array], mx.array], heads: int, width: int, first: int, count: int
) -> mx.array:
    """W^T W `[count * width, count * width]` of W_o's columns for heads first to first + count."""
    rows = mx.zeros((count * width, heads * width))
    rows[:, first * width : (first + count) * width] = mx.eye(count * width)
    columns = (project(rows) - project(mx.zeros((1, heads * width)))).astype(mx.float32)
    return columns @ columns.T


class _Watched:
    """Stands in for a transformer block and shows its input to the watcher."""

    def __init__(self, layer: nn.Module, watcher: Watcher):
        self._layer, self._watcher = layer, watcher

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        self._watcher.layer, self._watcher.residual = self._layer, x
        return self._layer(x, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@contextmanager
def watched(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """Let the watcher see the input of every block."""
    layers = model.layers
    originals = list(layers)
    layers[:] = [_Watched(layer, watcher) for layer in originals]
    try:
        yield
    finally:
        layers[:] = originals


def trained_context(model: nn.Module) -> int:
    """Tokens that the model was trained to see; beyond them its heads behave otherwise."""
    context = getattr(getattr(model, "args", None), "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else WINDOW


def windows_of(tokens: Sequence[int], length: int) -> list[mx.array]:
    """Cut a text into passes `[1, length]`; a short rest is left out unless it is all there is.

    Raises:
        ValueError: The text is too short to tell anything.
    """
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(
            f"{len(tokens)} tokens are too few to calibrate on; give at least a page of text."
        )
    length = min(length, len(tokens))
    whole = len(tokens) // length
    return [mx.array([tokens[i * length : (i + 1) * length]]) for i in range(whole)]


def profiled_kinds(model: nn.Module) -> list[LayerKind]:
    """How the model uses its caches, if a profile would be used.

    Raises:
        ValueError: All its heads need one budget.
    """
    kinds = layer_kinds(model)
    if any(not kind.routed or kind.derived for kind in kinds):
        raise ValueError(
            "This model attends by itself or to derived keys: all its heads need one budget, and "
            "a profile would not be used."
        )
    return kinds


def calibrate(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    window: int = WINDOW,
    details: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure all heads of a model in one pass per window.

    Args:
        model: An mlx-lm model.
        tokens: A text; some 3000 tokens suffice.
        window: Tokens of one pass, at most; never more than the model's trained context.
        details: Anything to note in the profile.
        progress: Told after each head.

    Raises:
        ValueError: The text is too short, or the model's heads cannot be weighed.
    """
    kinds = profiled_kinds(model)
    passes = windows_of(tokens, min(window, trained_context(model)))
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, len(passes) * sum(kind.heads for kind in kinds))

    watcher = Watcher(GRID, step=step)
    routing.install()
    for tokens_in in passes:
        with watched(model, watcher):
            mx.eval(model(tokens_in, cache=_measuring_caches(model, watcher)))
    losses = [[[x / len(passes) for x in curve] for curve in layer] for layer in watcher.losses]
    return _profile(model, losses, "output error, one pass", passes, details)


def calibrate_exactly(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    window: int = WINDOW,
    details: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure each head by the KL divergence that limiting it alone makes; arguments as above."""
    kinds = profiled_kinds(model)
    passes = windows_of(tokens, min(window, trained_context(model)))
    routing.install()
    full = []
    for tokens_in in passes:
        watcher = Watcher(GRID, limited=(-1, 0, 0))
        logits = model(tokens_in, cache=_measuring_caches(model, watcher)).astype(mx.float32)
        full.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(full)
    budgets = [b for b in GRID if b < passes[0].shape[1]]
    steps = sum(kind.heads for kind in kinds) * len(budgets)
    done = 0
    losses = []
    for layer, kind in enumerate(kinds):
        losses.append([[0.0] * len(GRID) for _ in range(kind.heads)])
        for head in range(kind.heads):
            for i, budget in enumerate(budgets):
                watcher = Watcher(GRID, limited=(layer, head, budget))
                total = mx.array(0.0)
                for tokens_in, expected in zip(passes, full, strict=True):
                    logits = model(tokens_in, cache=_measuring_caches(model, watcher))
                    logits = logits.astype(mx.float32)
                    got = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
                    total = total + (mx.exp(expected) * (expected - got)).sum(axis=-1).mean()
                    mx.eval(total)
                losses[layer][head][i] = max(cast(float, total.item()) / len(passes), 0.0)
                done += 1
                if progress:
                    progress(done, steps)
    return _profile(model, losses, "KL divergence, one head at a time", passes, details)


def _measuring_caches(model: nn.Module, watcher: Watcher) -> list[Any]:
    count = 0

    def make() -> _Measuring:
        nonlocal count
        count += 1
        return _Measuring(count - 1, watcher)

    return [replaced(entry, make) for entry in stock_caches(model)]


def _profile(
    model: nn.Module,
    losses: list[list[list[float]]],
    method: str,
    passes: list[mx.array],
    details: dict[str, Any] | None,
) -> Profile:
    kinds = layer_kinds(model)
    # Slots beyond the text lose nothing that it could show; curves never rise.
    curves = []
    for layer in losses:
        for curve in layer:
            for i in range(len(curve) - 2, -1, -1):
                curve[i] = max(curve[i], curve[i + 1])
        curves.append(tuple(tuple(float(f"{x:.4g}") for x in curve) for curve in layer))
    identity = identity_of(model, [k.heads for k in kinds], [k.widths.key for k in kinds])
    seen = {"tokens": sum(p.size for p in passes), **(details or {})}
    return Profile(identity, GRID, tuple(curves), method, seen)
