"""Models that compute attention by themselves, and how they ask a cache for it instead.

Most of mlx-lm's models attend to the rows of their cache through one function, which `routing`
replaces. Some have a function of their own, so that a cache never sees their queries, or change the
rows first, so that it cannot tell what they are. The table here lists such modules: while attention
is routed, their `__call__` is replaced by one that computes the same and lets a cache attend if it
can; any other cache goes to mlx-lm's own code, untouched. A module is replaced only if its source
is the one that was read when its entry was written. Otherwise it attends as before: by itself, so
that policies look at keys only, or to rows that the cache does not know.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_h2o.attention.ops import scaled_dot_product_attention
from mlx_h2o.slots.softmax import Mask

Call = Callable[..., Any]


@dataclass(frozen=True)
class OwnAttention:
    """A class of mlx-lm that computes attention by itself.

    Attributes:
        digest: Digest of the source of its `__call__` (`digest_of`).
        with_cache: The same computation with the same arguments, in which the cache attends.
    """

    digest: str
    with_cache: Call


def _gemma2(self: Any, x: mx.array, mask: Mask = None, cache: Any = None) -> Any:
    """Gemma 2: logits are soft-capped, which MLX's own attention cannot do."""
    q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    q, k = _heads(q, self.n_heads), _heads(k, self.n_kv_heads)
    q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
    k, v = cache.update_and_fetch(k, _heads(v, self.n_kv_heads))
    cap = float(self.attn_logit_softcapping)
    return self.o_proj(_joined(attend(cache, q, k, v, self.scale, mask, cap)))


def _phi3small(self: Any, x: mx.array, mask: Mask = None, cache: Any = None) -> Any:
    """Phi-3-small: every other layer sees near blocks of places, and every n-th far one."""
    B, L, _ = x.shape
    qkv = self.query_key_value(x).reshape(B, L, -1, self.n_q_per_kv + 2, self.head_dim)
    q = qkv[..., :-2, :].flatten(-3, -2).transpose(0, 2, 1, 3)
    k, v = (qkv[..., part, :].transpose(0, 2, 1, 3) for part in (-2, -1))
    first = cache.offset
    q, k = self.rope(q, offset=first), self.rope(k, offset=first)
    k, v = cache.update_and_fetch(k, v)
    if self.block_sparse:
        if not hasattr(cache, "places"):
            raise ValueError(
                "phi3small sees blocks of places, which caches of mlx_h2o.make_prompt_cache know "
                "alone."
            )
        # As in mlx-lm, a boolean mask is added, too.
        visible = blocks_seen(self, cache.places(), first, L)
        bias = mask.astype(q.dtype) if isinstance(mask, mx.array) else mx.zeros((), q.dtype)
        mask = mx.where(visible, bias, mx.array(-mx.inf, q.dtype))
    return self.dense(_joined(attend(cache, q, k, v, self.scale, mask)))


def blocks_seen(self: Any, places: mx.array, first: int, L: int) -> mx.array:
    """The rows that each query of a block-sparse layer sees, `[B, Hq, L, N]`.

    As in mlx-lm, the last query is taken to be the last of its block.

    Args:
        self: The layer's attention module.
        places: Positions of the rows, `[B, H, N]`.
        first: The first query's position.
        L: The number of queries.
    """
    size, total = self.blocksparse_block_size, first + L
    own = (mx.arange(first, total) + -total % size) // size
    of_rows = mx.repeat(places // size, self.n_q_per_kv, axis=1)[:, :, None]
    heads = mx.arange(1, self.n_heads + 1)[:, None, None]
    strided = (of_rows + heads) % self.blocksparse_vert_stride == 0
    ahead = own[:, None] - of_rows
    visible: mx.array = (ahead >= 0) & ((ahead < self.blocksparse_num_local_blocks) | strided)
    return visible


def _plamo(
    self: Any, hidden_states: mx.array, attention_mask: Mask = None, cache: Any = None
) -> Any:
    """PLaMo: query head i has KV head i mod H; heads are handed over in groups, and put back."""
    x, H = hidden_states, self.k_num_heads
    q, k, v = _heads(self.q_proj(x), self.q_num_heads), self.k_proj(x), self.v_proj(x)
    q = self.rotary_emb(q, offset=cache.offset)
    k = self.rotary_emb(_heads(k, H), offset=cache.offset)
    k, v = cache.update_and_fetch(k, _heads(v, H))
    out = attend(cache, _regrouped(q, H), k, v, self.scale, attention_mask)
    return self.o_proj(_joined(_regrouped(out, out.shape[1] // H)))


def _plamo2(self: Any, hidden_states: mx.array, mask: Mask = None, cache: Any = None) -> Any:
    """PLaMo 2: plain attention, without mlx-lm's function."""
    ends = [self.q_proj_dim, self.q_proj_dim + self.k_proj_dim]
    q, k, v = mx.split(self.qkv_proj(hidden_states), ends, axis=-1)
    q, k = _heads(q, self.q_num_heads), _heads(k, self.k_num_heads)
    q = mx.fast.rms_norm(q, weight=None, eps=1e-6) * self.q_weight[:, None]
    k = mx.fast.rms_norm(k, weight=None, eps=1e-6) * self.k_weight[:, None]
    q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
    k, v = cache.update_and_fetch(k, _heads(v, self.v_num_heads))
    return self.o_proj(_joined(attend(cache, q, k, v, self.scale, mask)))


def _stablelm(self: Any, x: mx.array, mask: Mask = None, cache: Any = None) -> Any:
    """StableLM: attention casts queries and keys to float32; ours has float32 logits anyway."""
    B, L, _ = x.shape
    q = self.q_proj(x).reshape(B, L, self.num_heads, -1)
    k = self.k_proj(x).reshape(B, L, self.num_key_value_heads, -1)
    if self.qk_layernorm:
        q, k = self.q_layernorm(q), self.k_layernorm(k)
    q, k = (self.rope(rows.transpose(0, 2, 1, 3), offset=cache.offset) for rows in (q, k))
    k, v = cache.update_and_fetch(k, _heads(self.v_proj(x), self.num_key_value_heads))
    return self.o_proj(_joined(attend(cache, q, k, v, self.head_dim**-0.5, mask)))


#: The replacements by module; each module's class is called `Attention`.
TABLE = {
    "mlx_lm.models.gemma2": OwnAttention(
        "2fc0e1b3741487c4c910ad00b1f6cbb4589f6ff5d290ef6bd33de446de614d8c", _gemma2
    ),
    "mlx_lm.models.phi3small": OwnAttention(
        "1f5ec5aedc7e2ef79c62cab0bad55840b32f949e66f416f8f54e3125f5004703", _phi3small
    ),
    "mlx_lm.models.plamo": OwnAttention(
        "788147755065f924dfe27bb11ec7cba7acfd411fd5d93e3737a734a6ba853f5a", _plamo
    ),
    "mlx_lm.models.plamo2": OwnAttention(
        "10b1e5bbd4d8a1c8f6a880d3c6845feca2230f27186f836bb8ee3c6e7ccef51d", _plamo2
    ),
    "mlx_lm.models.stablelm": OwnAttention(
        "ec0795f798d63a9642f5e9d84b1653d93b07b225e1380d1b8f8d069ac0187148", _stablelm
    ),
}

# The classes' own `__call__` methods, which are replaced now.
_replaced: dict[type, Call] = {}


def install() -> None:
    """Let every class of the table with a known source ask caches that can attend."""
    for module, own in TABLE.items():
        try:
            attention = importlib.import_module(module).Attention
        except (ImportError, AttributeError):  # another version of the library
            continue
        if attention not in _replaced and digest_of(attention.__call__) == own.digest:
            _replaced[attention] = attention.__call__
            attention.__call__ = _through_cache(attention.__call__, own.with_cache)


def uninstall() -> None:
    """Put mlx-lm's own code back."""
    while _replaced:
        attention, original = _replaced.popitem()
        attention.__call__ = original  # type: ignore[method-assign]


def warn_if_changed(module: str) -> None:
    """Warn if a module is in the table, but its source is another than the known one."""
    if module in TABLE and not any(replacement.__module__ == module for replacement in _replaced):
        warnings.warn(
            f"The attention of {module} is another than mlx-h2o knows, so its caches see less of "
            "it, or only keys (mlx_h2o.describe shows which). Use an mlx-h2o made for this mlx-lm.",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.cache
def digest_of(call: Call) -> str:
    """SHA-256 of a function's source without its white space; empty if there is no source."""
    try:
        source = inspect.getsource(call)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(" ".join(source.split()).encode()).hexdigest()


def attend(
    cache: Any,
    q: mx.array,
    keys: Any,
    values: Any,
    scale: float,
    mask: Mask,
    softcap: float = 0.0,
) -> mx.array:
    """The cache's attention; if it cannot attend, attention over the rows that it returned.

    Args:
        cache: The layer's cache.
        q: `[B, Hq, L, D]`.
        keys: The keys that `update_and_fetch` returned.
        values: The values that `update_and_fetch` returned.
        scale: Factor on q.k.
        mask: As in `scaled_dot_product_attention`.
        softcap: The soft cap c of the logits, or 0.

    Returns:
        `[B, Hq, L, Dv]`.

    Raises:
        ValueError: The cache does not support soft-capping.
    """
    if not getattr(cache, "attending", False):
        if not isinstance(keys, mx.array):
            raise ValueError("mlx-lm's own packed caches do not serve a model that caps logits.")
        return scaled_dot_product_attention(
            q, keys, values, scale=scale, mask=mask, softcap=softcap
        )
    if softcap and not getattr(cache, "knows_softcap", True):
        raise ValueError(
            "This model soft-caps the logits of its attention, which this measurement does not "
            "support: caches, `calibrate` and `evaluate` do."
        )
    capped = {"softcap": softcap} if softcap else {}
    out: mx.array = cache.attend(q, keys, values, scale=scale, mask=mask, sinks=None, **capped)
    return out


def _through_cache(original: Call, with_cache: Call) -> Call:
    """A module's `__call__` that asks caches that can attend."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", args[2] if len(args) > 2 else None)  # after x and mask
        do = with_cache if getattr(cache, "attending", False) else original
        return do(self, *args, **kwargs)

    return call


def _heads(x: mx.array, heads: int) -> mx.array:
    """`[B, L, heads * D]` as `[B, heads, L, D]`."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _regrouped(x: mx.array, groups: int) -> mx.array:
    """Heads `[B, heads, L, D]` with every groups-th side by side; `heads // groups` undoes it."""
    B, heads, L, D = x.shape
    return x.reshape(B, -1, groups, L, D).swapaxes(1, 2).reshape(B, heads, L, D)


def _joined(x: mx.array) -> mx.array:
    """`[B, heads, L, D]` as `[B, L, heads * D]`."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)
