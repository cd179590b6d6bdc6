"""`python -m benchmarks.memory`: what is weighed, and what is too much."""

from dataclasses import replace

import mlx.core as mx
import pytest

from benchmarks import memory
from benchmarks.memory import ARMS, batch, conversation
from benchmarks.weighing import LOOSE, MIB, Scale, Weight, parser

ARGS = parser().parse_args(["--tokens", "320", "--slots", "128", "--chunk", "64"])


@pytest.mark.parametrize("arm", ["mlx-h2o, 8 bits", "KVCache"])
def test_every_stage_is_weighed_and_nothing_is_too_much(arm, monkeypatch):
    monkeypatch.setattr(memory, "STEPS", 2)
    found = [*conversation(arm, ARGS), *batch(arm, ARGS)]
    assert len(found) == (8 if "mlx-h2o" in arm else 6)
    assert len({held.stage for held in found}) == len(found)
    for held in found:
        assert held.nbytes > MIB / 4
        assert not held.is_too_much
        assert held.active == pytest.approx(held.nbytes, abs=LOOSE)
        assert held.peak >= held.active


def test_a_copy_is_found():
    """What holds 1.1 times what it tells."""
    mx.clear_cache()
    scale = Scale(next(iter(ARMS)))
    rows = mx.zeros((11 * MIB,), mx.uint8)
    mx.eval(rows)
    held = scale.weighed("a copy", 10 * MIB)
    assert held.active == pytest.approx(rows.nbytes, abs=LOOSE / 4)
    assert held.is_too_much
    assert not replace(held, nbytes=11 * MIB).is_too_much
    assert not replace(held, caches="KVCache").is_too_much
    assert Weight(**vars(held)).cells[:5] == ["mlx-h2o", "a copy", "10.0", "11.0", "1.100"]
