"""A layer's tokens for tests of files of rows: drawn by a seed, and taken in by a cache."""

import mlx.core as mx

from mlx_h2o import H2OKVCache
from mlx_h2o.slots.key_scaling import Frame

HEADS, QUERIES, WIDTH, SCALE = 2, 4, 64, 0.125


def rows_of(count, seed, dtype=mx.float32):
    """Queries `[1, QUERIES, count, WIDTH]`, and keys and values of HEADS heads."""
    shape = (1, HEADS, count, WIDTH)
    keys = mx.random.split(mx.random.key(seed), 2)
    k, v = (mx.random.normal(shape, dtype, key=key) for key in keys)
    q = mx.random.normal((1, QUERIES, count, WIDTH), dtype, key=mx.random.key(seed + 10**6))
    return q, k, v


def attended(cache, q, k, v):
    """The output of a step or a chunk."""
    mask = None if k.shape[2] == 1 else "causal"
    out = cache.attend(q, *cache.update_and_fetch(k, v), scale=SCALE, mask=mask)
    mx.eval(out)
    return out


def cache_of(spill, frame=False, **options):
    """A cache of 48 slots a head, unless budgets say otherwise."""
    if frame:
        options["frame"] = Frame.of(rows_of(200, 99)[1])
    size = {} if "budgets" in options else {"max_size": 48}
    return H2OKVCache(spill=spill, **{**size, **options})
