"""Steps of the GPU's kernels are taken back, and leave no trace."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import H2OKVCache, make_policy
from mlx_h2o.attention.backends import choice
from mlx_h2o.attention.backends.gpu import METAL
from mlx_h2o.attention.backends.gpu_decoder import GPUDecoder

B, HK, G, D, DV = 2, 2, 2, 64, 32
PACKED = {"bits": 4, "group_size": 32}


@pytest.fixture(autouse=True)
def _on_device(monkeypatch):
    monkeypatch.setattr(choice, "gpu", lambda: METAL)
    monkeypatch.setattr(choice, "cpu", lambda: None)


def rows(seed, L=1):
    rng = np.random.default_rng(seed)
    shapes = [(B, HK * G, L, D), (B, HK, L, D), (B, HK, L, DV)]
    q, k, v = (mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    return 1.5 * q, k + 0.5, v


def attend(cache, tokens):
    q, k, v = tokens
    return cache.attend(q, *cache.update_and_fetch(k, v), scale=D**-0.5)


def arrays(cache):
    """Everything in use, by name."""
    found = {f"remainder.{name}": array for name, array in cache.remainder.arrays.items()}
    for i, run in enumerate(cache.store.runs):
        found |= {f"{name} of run {i}": view for name, view in cache.store.views(run).items()}
        if run.victims:
            victims = cache.layer.victims[:, run.first : run.last, -run.victims :]
            found[f"victims of run {i}"] = victims
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("policy", "settings", "budgets", "store"),
    [
        ("distinct", {}, [24, 24], {}),
        ("distinct", {"unit": "layer"}, [24, 24], PACKED),
        ("distinct", {"evict_every": 3}, [6 + 14, 30], PACKED),
        ("salient", {}, [24, 30], PACKED),
        ("h2o", {"value_weighted": True}, [20, 28], {}),
        ("ema-logits", {"evict_every": 4}, [20, 28], {"k_bits": 8}),
        ("streaming", {}, [3, 3], {}),
        ("keydiff", {}, [12, 30], {}),
    ],
)
def test_steps_taken_back_leave_no_trace(policy, settings, budgets, store):
    """Some are taken back while the steps are still queued, some from a head that still grows."""
    made = {"policy": make_policy(policy, **settings), "budgets": budgets, **store}
    if policy == "streaming":
        made["policy"] = make_policy(policy, sink=1)
    cache, twin = (H2OKVCache(undo=4, **made) for _ in range(2))
    for c in (cache, twin):
        attend(c, rows(0, min(budgets) - 2))
    step = 0
    for kept, gone in ((1, 2), (2, 4), (3, 1), (1, 3), (4, 2), (2, 2)):
        for _ in range(kept):
            step += 1
            outs = [attend(c, rows(step)) for c in (cache, twin)]
        for i in range(gone):
            out = attend(cache, rows(100 * step + i))
        assert isinstance(cache.layer.decoder, GPUDecoder | None)
        if gone % 2:
            mx.eval(out)
        assert cache.trim(gone) == gone
        mx.eval(outs)
        assert mx.array_equal(*outs)
        ours, theirs = arrays(cache), arrays(twin)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not mx.array_equal(ours[name], theirs[name])] == []
    assert cache.evicted > 0
    assert isinstance(_decoding_after(cache), GPUDecoder)


def _decoding_after(cache):
    attend(cache, rows(7))
    return cache.layer.decoder


def test_bytes_hold_with_the_journal():
    cache = H2OKVCache(max_bytes=100_000, undo=5)
    attend(cache, rows(0, 90))
    for step in range(8):
        mx.eval(attend(cache, rows(step)))
        assert isinstance(cache.layer.decoder, GPUDecoder)
        assert cache.nbytes <= 100_000
    assert cache.nbytes > 80_000
