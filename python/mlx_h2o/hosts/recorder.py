"""Recording a model while it reads a text: its blocks' inputs, residuals and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.attention.backends.choice import backend, cpu
from mlx_h2o.attention.call import AttentionCall, Looking
from mlx_h2o.attention.ops import scaled_dot_product_attention
from mlx_h2o.budgets.plan import LayerKind
from mlx_h2o.budgets.profile import SMALLEST_BUDGET
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.cache_lists import replaced
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.hosts.loaded import language_model, logits_of, restored
from mlx_h2o.hosts.refusals import require_boundable
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.loading.identity import architecture

# Tokens of one pass, for a model that does not say which context it was trained on.
USUAL_PASS = 1024
# Fewer tokens show nothing about heads.
LEAST_TOKENS = 4 * SMALLEST_BUDGET
# Queries attended from at a time: bounds the [Hq, block, T] logits.
QUERY_BLOCK = 128


@dataclass
class Watcher:
    """The block that runs now, and its input; None between blocks."""

    layer: nn.Module | None = None
    residual: mx.array | None = None


class LookingCache(Looking):
    """A cache that holds nothing: it sees one pass over a whole text, layer by layer."""

    offset = 0
    #: Whether `look` reads a call's softcap.
    knows_softcap = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The rows unchanged."""
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> Any:
        """The mask, as in mlx-lm's own cache."""
        return mlx_lm_cache.KVCache().make_mask(
            N, return_array=return_array, window_size=window_size
        )


@contextmanager
def watched(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """Let the watcher see the input of every block.

    Each block gets, for the time being, a subclass of its own class whose call tells the
    watcher first. So it does not matter in which lists a model keeps its blocks, or whether
    `model.layers` is one of them or made anew on every access (mlx-lm's pipelined models), and
    other models of the same class are not affected.

    Raises:
        ValueError: The model does not list its blocks.
    """
    classes = {id(block): (block, type(block)) for block in _blocks(model)}
    subclasses = {of: _telling(of, watcher) for _, of in classes.values()}
    try:
        for block, of in classes.values():
            block.__class__ = subclasses[of]
        yield
    finally:
        for block, of in classes.values():
            block.__class__ = of


def _blocks(model: nn.Module) -> list[nn.Module]:
    """A model's blocks, without the None entries on a rank of a pipeline."""
    model = language_model(model)
    blocks = [b for b in getattr(model, "layers", ()) if isinstance(b, nn.Module)]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} does not list its blocks in `layers`, as models of mlx-lm do, "
            'so nothing can be measured in it; use budgets="uniform".'
        )
    return blocks


def _telling(block: type[nn.Module], watcher: Watcher) -> type[nn.Module]:
    """A subclass of a block's class whose call tells the watcher first."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The input comes first, whatever a model calls it.
        x = _quick_to_compute(next(iter((*args, *kwargs.values()))))
        if args:
            args = (x, *args[1:])
        else:
            kwargs[next(iter(kwargs))] = x
        watcher.layer, watcher.residual = self, x
        try:
            return block.__call__(self, *args, **kwargs)
        finally:  # attention outside of every block belongs to no block
            watcher.layer = watcher.residual = None

    members = {"__call__": __call__, "__module__": block.__module__}
    return type(block.__name__, (block,), members)


def _quick_to_compute(x: mx.array) -> mx.array:
    """A block's input in the dtype in which the device computes fastest.

    MLX's CPU backend multiplies 16-bit matrices some 15 times as slowly as float32 ones, and a
    float32 input makes float32 products of them all.
    """
    if x.dtype in (mx.float16, mx.bfloat16) and mx.default_device().type == mx.DeviceType.cpu:
        return x.astype(mx.float32)
    return x


def looked_through(
    model: nn.Module, tokens: mx.array, watcher: Watcher, make: Callable[[int], LookingCache]
) -> mx.array:
    """One pass over a text, with a looking cache in the place of each plain one.

    Args:
        model: An mlx-lm model.
        tokens: `[B, T]`.
        watcher: Sees the blocks.
        make: Makes the cache in the place of the i-th plain one.

    Returns:
        Logits `[B, T, vocabulary]`, which nothing has computed yet.
    """
    made = 0

    def one() -> LookingCache:
        nonlocal made
        made += 1
        return make(made - 1)

    caches = [replaced(entry, one) for entry in stock_caches(model)]
    with watched(model, watcher), restored(model):
        return logits_of(model, tokens, caches)


def full_attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None,
    softcap: float = 0.0,
) -> mx.array:
    """Causal attention `[B, Hq, T, Dv]` in blocks of queries, evaluated.

    Args:
        q: `[B, Hq, T, D]`.
        keys: `[B, H, T, D]`.
        values: `[B, H, T, Dv]`.
        scale: Factor on q.k.
        sinks: Attention-sink logits `[Hq]`.
        softcap: The soft cap c of the logits, or 0.
    """
    blocks = []
    for start in range(0, q.shape[2], QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, q.shape[2])
        rows = q[:, :, start:end], keys[:, :, :end], values[:, :, :end]
        block = block_attention(*rows, scale=scale, mask="causal", sinks=sinks, softcap=softcap)
        mx.eval(block)
        blocks.append(block)
    return mx.concatenate(blocks, axis=2)


def block_attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: str | mx.array,
    sinks: mx.array | None,
    softcap: float,
) -> mx.array:
    """Attention of a block of queries `[B, Hq, n, D]`.

    MLX computes it, except for soft-capped logits and on the CPU, where this library's kernel
    takes a quarter of the time over 2048 tokens.

    Args:
        q: `[B, Hq, n, D]`.
        keys: `[B, H, T, D]`.
        values: `[B, H, T, Dv]`.
        scale: Factor on q.k.
        mask: The mask over the block's queries and all keys, as MLX takes it.
        sinks: Attention-sink logits `[Hq]`.
        softcap: The soft cap c of the logits, or 0.
    """
    rows = q, keys, values
    if softcap or backend() is cpu():
        return scaled_dot_product_attention(
            *rows, scale=scale, mask=mask, sinks=sinks, softcap=softcap
        )
    return mx.fast.scaled_dot_product_attention(*rows, scale=scale, mask=mask, sinks=sinks)


# mlx-lm's names of the output projection, and parts of its names of the module that attends
# (falcon_h1's "mamba" has an out_proj of its own beside it).
PROJECTIONS = ("o_proj", "out_proj", "wo", "dense", "c_proj", "attn_resid")
ATTENDING = ("att", "mixer")


def output_projection(layer: nn.Module | None, width: int) -> Callable[[mx.array], mx.array]:
    """The layer's W_o: the linear map of an attention module that takes all heads' outputs.

    Args:
        layer: A transformer block.
        width: Hq * Dv.

    Raises:
        ValueError: The layer has no output projection that is known.
    """
    for name, module in layer.named_modules() if layer is not None else ():
        *path, last = name.split(".")
        attends = any(word in part for word in ATTENDING for part in path)
        if last in PROJECTIONS and attends and "weight" in module:
            takes = module.weight.shape[-1]
            if "scales" in module:  # quantized: packed columns
                takes = module.scales.shape[-1] * module.group_size
            if takes == width:
                return module  # type: ignore[no-any-return]
    raise ValueError(
        "No output projection was found in the model's attention, so heads cannot be weighed; "
        'use budgets="uniform".'
    )


class _Weighable(LookingCache):
    """A looking cache that only checks that its layer's heads can be weighed, computing nothing."""

    knows_softcap = True

    def __init__(self, watcher: Watcher):
        self.watcher = watcher

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        B, Hq, L, _ = call.q.shape
        output_projection(self.watcher.layer, Hq * values.shape[-1])
        return mx.zeros((B, Hq, L, values.shape[-1]), call.q.dtype)


def require_weighable(model: nn.Module) -> None:
    """Raise ValueError if the heads of some layer cannot be weighed.

    One token is sent through the model lazily, so that nothing is computed.
    """
    routing.install()
    watcher = Watcher()
    looked_through(model, mx.array([[0]]), watcher, lambda _: _Weighable(watcher))


def head_gram(
    project: Callable[[mx.array], mx.array], heads: int, width: int, first: int, count: int
) -> mx.array:
    """W^T W `[count * width, count * width]` of W_o's columns for heads first to first + count.

    Args:
        project: The layer's output projection.
        heads: Query heads.
        width: The width of a head's output, Dv.
        first: The first head.
        count: How many heads.
    """
    rows = mx.zeros((count * width, heads * width))
    rows[:, first * width : (first + count) * width] = mx.eye(count * width)
    columns = (project(rows) - project(mx.zeros((1, heads * width)))).astype(mx.float32)
    return columns @ columns.T


@dataclass
class HeadWeights:
    """The cost of an error in a KV head's output to its layer, relative to the residual.

    Attributes:
        grams: W^T W of each KV head's columns of W_o, `[H, G * Dv, G * Dv]`.
        norm: Squared length of the residual after attention, `[B, T]`.
    """

    grams: mx.array
    norm: mx.array

    @classmethod
    def of(cls, watcher: Watcher, out: mx.array, heads: int) -> HeadWeights:
        """The weights of the block that runs now.

        Args:
            watcher: The watcher that sees the block.
            out: The full attention's output `[B, Hq, T, Dv]`.
            heads: H.
        """
        B, Hq, T, Dv = out.shape
        project, group = output_projection(watcher.layer, Hq * Dv), Hq // heads
        attended = project(out.transpose(0, 2, 1, 3).reshape(B, T, -1))
        assert watcher.residual is not None
        norm = mx.square((watcher.residual + attended).astype(mx.float32)).sum(axis=-1)
        grams = [head_gram(project, Hq, Dv, h * group, group) for h in range(heads)]
        return cls(mx.stack(grams), mx.maximum(norm, 1e-12))

    def errors(self, difference: mx.array, start: int) -> mx.array:
        """||W_o d||^2 / ||residual||^2, the mean over a batch.

        Args:
            difference: The errors d of R settings, `[B, R, Hq, n, Dv]`.
            start: Position of the first of the n queries.

        Returns:
            `[H, R, n]`.
        """
        B, R, Hq, n, Dv = difference.shape
        H = self.grams.shape[0]
        d = difference.astype(mx.float32).reshape(B, R, H, Hq // H, n, Dv)
        d = d.transpose(2, 0, 1, 4, 3, 5).reshape(H, B * R * n, -1)
        # ||W d||^2 = d (W^T W) d: the head's Gram matrix makes every setting cheap.
        squares = ((d @ self.grams) * d).sum(axis=-1).reshape(H, B, R, n)
        norm = self.norm[:, None, start : start + n]
        return mx.maximum(squares / norm, 0).mean(axis=1)


def trained_context(model: nn.Module, otherwise: int = USUAL_PASS) -> int:
    """The context that the model was trained on, in tokens; beyond it heads behave differently.

    Args:
        model: An mlx-lm model.
        otherwise: The result for a model that does not say.
    """
    model = language_model(model)
    config = getattr(model, "args", None) or getattr(model, "config", None)
    context = getattr(config, "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else otherwise


def windows_of(tokens: Sequence[int], length: int) -> list[mx.array]:
    """Cut a text into passes `[1, length]`; a short rest is dropped unless it is the whole text.

    Raises:
        ValueError: The text is too short.
    """
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(
            f"{len(tokens)} tokens are too few to calibrate on; give at least a page of text."
        )
    length = min(length, len(tokens))
    whole = len(tokens) // length
    return [mx.array([tokens[i * length : (i + 1) * length]]) for i in range(whole)]


def profiled_kinds(model: nn.Module) -> list[LayerKind]:
    """How the model uses its caches; raises if a profile would not be used.

    Raises:
        NothingToBound: None of its caches grows.
        ValueError: The model cannot be bounded, or all its heads need one budget.
    """
    name, kinds = architecture(model), layer_kinds(model)
    require_boundable(name, kinds, stock_caches(model))
    if reason := one_budget_because(kinds):
        raise ValueError(
            f"{name} {reason}, so all its heads need one budget, and a profile would not be used. "
            "It is bounded without one: make_prompt_cache gives every head the same number of "
            "slots."
        )
    return kinds


def one_budget_because(kinds: Sequence[LayerKind]) -> str:
    """Why all heads of a model with such caches need one budget; empty if they do not."""
    if any(not kind.routed for kind in kinds):
        return "attends by itself, with one mask for all heads of a layer"
    if any(kind.derived for kind in kinds):
        return "attends to keys that are made of the cached rows, with one mask for all heads"
    if any(kind.sharers > 1 for kind in kinds):
        return "has layers that share keys and values"
    return ""
