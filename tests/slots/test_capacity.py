"""Capacities of the rows that MLX's attention gets: cuDNN takes those in multiples of 256."""

import mlx.core as mx
import pytest

from mlx_h2o import H2OKVCache
from mlx_h2o.attention.backends import choice

WIDTH = 64


@pytest.fixture
def capacities(monkeypatch):
    """Of what MLX's attention gets for one query, as MLX's CUDA backend finds them."""
    seen, attend = [], mx.fast.scaled_dot_product_attention

    def watched(q, k, v, **options):
        mx.eval(k, v)
        if q.shape[2] == 1:
            strides = [memoryview(rows).strides for rows in (k, v)]
            seen.append({of_head // of_key for _, of_head, of_key, _ in strides})
        return attend(q, k, v, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(choice, "cpu", lambda: None)
    return seen


def step(cache, length):
    q, k = (mx.random.normal((1, heads, length, WIDTH)) for heads in (4, 2))
    mask = "causal" if length > 1 else None
    mx.eval(cache.attend(q, *cache.update_and_fetch(k, k), scale=0.125, mask=mask))


@pytest.mark.parametrize("policy", ["streaming", "keydiff"])
@pytest.mark.parametrize("size", [768, 700])
def test_growing_caches_have_multiples_of_256_and_full_ones_their_size(policy, size, capacities):
    cache = H2OKVCache(size, policy=policy, remainder=False)
    for length in (250, 10, 255, 300):
        step(cache, length)
        step(cache, 1)
    assert capacities == [{256}, {512}, {size}, {size}]
