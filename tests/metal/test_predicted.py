"""The bytes that doctor predicts times from are those that the harness counts."""

import mlx.core as mx
import pytest
from harness import recorded

from mlx_h2o.attention.backends import choice, metal
from mlx_h2o.attention.backends.step_launches import plan_array
from mlx_h2o.doctor import arms
from mlx_h2o.doctor.predicted import work_of

OURS = [name for name in (*arms.ATTENTION, *arms.STEPS) if name not in (arms.MLX, arms.WINDOW)]


@pytest.mark.parametrize("name", OURS)
def test_bytes(name, monkeypatch):
    """With one KV head of four, since its bytes are counted slowly; within one of a hundred."""
    for shape, number in (("QUERY_HEADS", 8), ("KV_HEADS", 2)):
        monkeypatch.setattr(arms, shape, number)
        monkeypatch.setattr(f"mlx_h2o.doctor.predicted.{shape}", number)
    monkeypatch.setattr(choice, "gpu", lambda: metal.GPU)
    monkeypatch.setattr("mlx_h2o.attention.ops.backend", lambda: metal.GPU)
    size = arms.Size(2048, mx.float16)
    make = arms.attention if name in arms.ATTENTION else arms.step
    work = make(size, name)
    plan_array.cache_clear()
    with recorded() as launches:
        mx.eval(work())
    counted = sum(counts.device_bytes for counts in launches)
    assert work_of(name, size).bytes == pytest.approx(counted, rel=0.01)
