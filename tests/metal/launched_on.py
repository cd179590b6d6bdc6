"""What several files of tests give to the kernels."""

import itertools

import mlx.core as mx
import numpy as np

from mlx_h2o.attention.backends import reference
from mlx_h2o.attention.backends.decoder import HeadPlan
from mlx_h2o.attention.backends.step_launches import StepPlan
from mlx_h2o.slots.packed import dense
from mlx_h2o.slots.remainder import Remainder

OFFSET = 900
SINK = 2


def mask_of(kind, shape, dtype):
    """A mask that hides a third, of which one row sees nothing, broadcast over some dimension."""
    if kind in (None, "causal"):
        return kind
    B, Hq, _, L, N, _, _ = shape
    visible = mx.random.uniform(shape=(B, Hq, L, N) if kind == "bool" else (1, 1, L, N)) > 1 / 3
    visible[:, :, L - 1] = visible[:, :, L - 1] & (L > 1)
    if kind == "bool":
        return visible
    return mx.where(visible, mx.random.normal(visible.shape), mx.finfo(dtype).min).astype(dtype)


def assert_close(ours, expected, tolerance, relative=0.0):
    np.testing.assert_allclose(
        np.array(ours.astype(mx.float32)), np.array(expected), atol=tolerance, rtol=relative
    )


def reference_attend(q, k, v, *, remainder=None, **options):
    """out, logits, lse in float32, the remainder joined."""
    q, k, v = (x.astype(mx.float32) for x in (q, dense(k), dense(v)))
    out, logits, lse = reference.attention_with_scores(q, k, v, **options)
    if remainder is not None:
        out, lse = remainder.join(out, lse, remainder.column(q, options["scale"]))
    return out, logits, lse


def assert_attended(ours, expected, dtype, tolerances):
    """Attention is the reference's; `tolerances` are those of the output by dtype."""
    out, logits, lse = expected
    assert ours.out.dtype == dtype
    assert_close(ours.out, out, *tolerances[dtype])
    # Infinities must agree exactly; logits near 0 cannot be right relatively.
    assert_close(ours.logits, logits, 1e-4, 1e-3)
    assert_close(ours.lse, lse, 1e-4, 1e-3)


def evicted(shape, rows=40):
    """A remainder of rows as the kept ones."""
    B, _, Hk, _, _, D, Dv = shape
    empty = Remainder.empty(B, Hk, D, Dv)
    return empty.fold(mx.random.normal((B, Hk, rows, D)), mx.random.normal((B, Hk, rows, Dv)))


def plan_of(lengths, room=3, victim=0, choose=True, evict_every=1, sink=SINK):
    """Heads of these lengths one after another, with unused slots between."""
    starts = itertools.accumulate((length + room for length in lengths), initial=0)
    heads = tuple(
        HeadPlan(start, length, victim, length // 4, 16, choose)
        for start, length in zip(starts, lengths, strict=False)
    )
    return StepPlan(OFFSET, sum(lengths) + room * len(lengths), sink, evict_every, heads)
