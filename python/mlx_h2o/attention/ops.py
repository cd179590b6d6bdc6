"""Attention that returns its scores: the public ops.

They check their arguments and call the backend of the computing device; `backends/reference.py` is
the definition with which every other backend is compared.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import mlx.core as mx

from mlx_h2o.attention.backends import reference
from mlx_h2o.attention.backends.choice import backend
from mlx_h2o.attention.backends.operands import Options, Ranges, Seed
from mlx_h2o.slots import softmax
from mlx_h2o.slots.packed import AnyRows, JoinedRows, PackedRows
from mlx_h2o.slots.softmax import Mask

FLOAT_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def scaled_dot_product_attention(
    q: mx.array, k: AnyRows, v: AnyRows, **options: Unpack[Options]
) -> mx.array:
    """Softmax attention `[B, Hq, L, Dv]`; arguments as in the op with scores."""
    out: mx.array = _computing(k, options).attention(q, k, v, **_checked(q, k, v, options))
    return out


def scaled_dot_product_attention_with_scores(
    q: mx.array,
    k: AnyRows,
    v: AnyRows,
    *,
    scale: float,
    mask: Mask = None,
    sinks: mx.array | None = None,
    seed: Seed | None = None,
    ranges: Ranges | None = None,
    softcap: float = 0.0,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Softmax attention, its logits and their log-sum-exp.

    Args:
        q: Queries `[B, Hq, L, D]`.
        k: Keys `[B, Hk, N, D]`; Hq is a multiple of Hk (GQA). Flat with `ranges`: `[B, S, D]`. They
            may be packed.
        v: Values `[B, Hk, N, Dv]`; Dv may differ from D. Flat with `ranges`: `[B, S, Dv]`. They may
            be packed.
        scale: Factor on q.k, usually `D ** -0.5`.
        mask: None, `"causal"` (the last query attends to all N keys), a boolean array (True is
            visible) or an additive array, broadcastable to `[B, Hq, L, N]`. No array with `ranges`.
        sinks: One logit per query head `[Hq]` of an extra softmax column without a value
            (gpt-oss).
        seed: One more column, with a value: logits `[B, Hq, L]` and values `[B, Hk, Dv]`, float32
            (the remainder's).
        ranges: (first slot, number of slots) of each KV head, so that heads may differ in N.
        softcap: c of logits capped softly, c tanh(logits / c) before the mask (Gemma 2), which only
            the reference backend supports; 0 for no cap.
        stream: The stream or device to compute on.

    Returns:
        out `[B, Hq, L, Dv]` in q's dtype; scores `[B, Hq, L, N]` float32, pre-softmax, minus
        infinity where masked (with `ranges` `[B, Hq / Hk, L, S]`, minus infinity where a slot
        belongs to no head); lse `[B, Hq, L]` float32 over all columns, minus infinity in rows that
        attend to no key (whose out is zero).

    Raises:
        ValueError: Shapes, dtypes or the mask do not fit together.
    """
    options: Options = {
        "scale": scale,
        "mask": mask,
        "sinks": sinks,
        "seed": seed,
        "ranges": ranges,
        "softcap": softcap,
    }
    own = _checked(q, k, v, options)
    with on(stream):
        out, scores, lse = _computing(k, options).attention_with_scores(q, k, v, **own)
    return out, scores, lse


def scaled_dot_product_attention_with_mass(
    q: mx.array, k: AnyRows, v: AnyRows, **options: Unpack[Options]
) -> tuple[mx.array, mx.array, mx.array]:
    """Softmax attention and the mass that each key received, without `[L, N]` scores.

    Arguments as in `scaled_dot_product_attention_with_scores`.

    Returns:
        out `[B, Hq, L, Dv]` in q's dtype; mass `[B, Hk, N]` float32 (see `attention_mass`; with
        `ranges` `[B, S]`, zero where a slot belongs to no head); lse `[B, Hq, L]`.
    """
    own = _checked(q, k, v, options)
    out, mass, lse = _computing(k, options).attention_with_mass(q, k, v, **own)
    return out, mass, lse


def scaled_dot_product_attention_quantized_with_scores(
    q: mx.array,
    k_w: mx.array,
    k_s: mx.array,
    k_b: mx.array,
    v_w: mx.array,
    v_s: mx.array,
    v_b: mx.array,
    *,
    scale: float,
    k_bits: int,
    v_bits: int,
    group_size: int,
    mask: Mask = None,
    sinks: mx.array | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """`scaled_dot_product_attention_with_scores` of packed keys and values.

    Args:
        q: Queries `[B, Hq, L, D]`.
        k_w: Words of the keys `[B, Hk, N, D * k_bits / 32]` uint32, in the format of `mx.quantize`.
        k_s: The keys' scales `[B, Hk, N, D / group_size]`, in a floating dtype.
        k_b: The keys' biases, of the same shape and dtype.
        v_w: Words of the values `[B, Hk, N, Dv * v_bits / 32]` uint32.
        v_s: The values' scales `[B, Hk, N, Dv / group_size]`, in a floating dtype.
        v_b: The values' biases, of the same shape and dtype.
        scale: Factor on q.k.
        k_bits: Bits of keys: 2, 3, 4, 5, 6 or 8.
        v_bits: Bits of values: 2, 3, 4, 5, 6 or 8.
        group_size: 32, 64 or 128.
        mask: None, "causal", or an array that broadcasts to `[B, Hq, L, N]`: bool (True where a
            query sees a key) or a float to be added to the logits.
        sinks: One logit `[Hq]` for each query head, of a column without a value; or None.
        stream: The stream or device to compute on.

    Returns:
        out `[B, Hq, L, Dv]` in q's dtype; scores `[B, Hq, L, N]` float32 (logits: scaled, masked);
        lse `[B, Hq, L]` float32, the log of the sum of their exponentials and the sinks'.

    Raises:
        ValueError: Shapes, dtypes, widths or the mask do not fit together.
    """
    return scaled_dot_product_attention_with_scores(
        q,
        PackedRows(k_w, k_s, k_b, k_bits, group_size),
        PackedRows(v_w, v_s, v_b, v_bits, group_size),
        scale=scale,
        mask=mask,
        sinks=sinks,
        stream=stream,
    )


def attention_mass(scores: mx.array, lse: mx.array, n_kv_heads: int) -> mx.array:
    """The attention that each key received (docs/how-it-works/index.md, Words: mass).

    Args:
        scores: Logits `[B, Hq, L, N]`, float32.
        lse: Their log-sum-exp `[B, Hq, L]`. If it covers more columns than `scores` has (attention
            sinks, the remainder), the mass is smaller, as it should be.
        n_kv_heads: The number of KV heads Hk.

    Returns:
        `[B, Hk, N]` float32: sum over queries, mean over the G query heads of each KV head, of
        exp(score - lse). Over N it sums to L, minus the mass of other columns.

    Raises:
        ValueError: Hq is not a multiple of n_kv_heads, or lse does not match scores.
    """
    if scores.ndim != 4 or lse.shape != scores.shape[:3]:
        raise ValueError(
            f"scores must be [B, Hq, L, N] and lse [B, Hq, L]; got {scores.shape} and {lse.shape}."
        )
    if n_kv_heads < 1 or scores.shape[1] % n_kv_heads:
        raise ValueError(
            f"{scores.shape[1]} query heads cannot be grouped over {n_kv_heads} KV heads."
        )
    return softmax.attention_mass(scores, lse, n_kv_heads)


def _checked(q: mx.array, k: AnyRows, v: AnyRows, options: Options) -> Options:
    """The options for a backend, without a softcap of 0, which kernels do not know.

    Raises:
        ValueError: The operands do not fit together, or the softcap is negative or not finite.
    """
    softcap = options.get("softcap", 0.0)
    if not (0 <= softcap < float("inf")):
        raise ValueError(f"softcap must be 0 (none) or a positive number; got {softcap!r}.")
    given = (options.get("mask"), options.get("sinks"), options.get("seed"), options.get("ranges"))
    check_attention(q, k, v, *given)
    own = options.copy()
    if not softcap:
        own.pop("softcap", None)
    return own


def _computing(k: AnyRows, options: Options) -> Any:
    """The backend that attends to rows like these on the default device."""
    computing = reference if options.get("softcap") else backend()
    if not isinstance(k, JoinedRows):
        return computing
    from mlx_h2o.attention.backends.joined import Joined  # for rows of several kinds

    return Joined(computing)


def on(stream: mx.Stream | mx.Device | None) -> AbstractContextManager[object]:
    """A context in which new arrays are computed on a stream; None leaves the current one."""
    return nullcontext() if stream is None else mx.stream(stream)


def check_attention(
    q: mx.array,
    k: AnyRows,
    v: AnyRows,
    mask: Mask,
    sinks: mx.array | None,
    seed: Seed | None = None,
    ranges: Ranges | None = None,
) -> None:
    """Raise ValueError unless the operands of an attention fit together.

    Args:
        q: `[B, Hq, L, D]`.
        k: `[B, Hk, N, D]`, or flat `[B, S, D]` with ranges.
        v: `[B, Hk, N, Dv]`, or flat `[B, S, Dv]` with ranges.
        mask: None, "causal" or an array.
        sinks: Attention-sink logits `[Hq]`.
        seed: Logits and values of one more column.
        ranges: First slot and number of slots of each KV head.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        rank, axes = 4, "[batch, heads, tokens, width]"
        if ranges is not None and name != "q":
            rank, axes = 3, "[batch, slots, width] with ranges"
        if x.ndim != rank:
            raise ValueError(f"{name} must be {axes}; got {x.shape}.")
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} must be float32, float16 or bfloat16; got {x.dtype}.")
    lengths = [[p.shape[2] for p in x.parts] if isinstance(x, JoinedRows) else None for x in (k, v)]
    if lengths[0] != lengths[1] or (ranges is not None and lengths[0]):
        raise ValueError("Joined keys need joined values, and no ranges.")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k {k.shape} and v {v.shape} must agree in batch, heads and tokens.")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[-1]:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in batch and width.")
    B, Hq, L, _ = q.shape
    Hk = k.shape[1] if ranges is None else len(ranges)
    if Hk == 0 or Hq % Hk:
        raise ValueError(f"{Hq} query heads are no multiple of {Hk} KV heads.")
    if ranges is not None:
        for start, length in ranges:
            if start < 0 or length < 0 or start + length > k.shape[1]:
                raise ValueError(
                    f"The range of {length} slots from {start} leaves the {k.shape[1]} there are."
                )
    if isinstance(mask, mx.array) and ranges is not None:
        raise ValueError("Heads with ranges of their own take no array mask.")
    fewest = k.shape[-2] if ranges is None else min(length for _, length in ranges)
    _check_mask(mask, (B, Hq, L, k.shape[-2]), fewest)
    if sinks is not None and sinks.shape != (Hq,):
        raise ValueError(f"sinks must be [{Hq}], one per query head; got {sinks.shape}.")
    if seed is not None and (seed[0].shape, seed[1].shape) != ((B, Hq, L), (B, Hk, v.shape[-1])):
        raise ValueError(
            f"A seed is logits [{B}, {Hq}, {L}] and values [{B}, {Hk}, {v.shape[-1]}]; got "
            f"{seed[0].shape} and {seed[1].shape}."
        )


def _check_mask(mask: Mask, whole: tuple[int, int, int, int], fewest: int) -> None:
    """Raise ValueError for a mask that does not fit logits of the shape `whole`.

    Args:
        mask: None, "causal" or an array.
        whole: `(B, Hq, L, N)`.
        fewest: Slots of the KV head with the fewest.
    """
    if isinstance(mask, mx.array):
        if mask.dtype not in (mx.bool_, *FLOAT_DTYPES):
            raise ValueError(f"An array mask must be boolean or floating; got {mask.dtype}.")
        if mask.ndim > 4 or any(
            size not in (1, full) for size, full in zip(mask.shape[::-1], whole[::-1], strict=False)
        ):
            raise ValueError(f"The mask {mask.shape} does not broadcast to {whole}.")
    elif mask is not None and mask != "causal":
        raise ValueError(f'mask must be None, "causal" or an array; got {mask!r}.')
    if isinstance(mask, str) and fewest < whole[2]:
        raise ValueError(
            f"A causal mask needs at least as many keys as queries; got {fewest} keys for "
            f"{whole[2]} queries."
        )
