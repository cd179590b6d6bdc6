"""The measuring cache forgets what the real one forgets."""

import mlx.core as mx
import pytest

from mlx_h2o import H2OKVCache, install
from research.simulation import (
    DISTINCT,
    H2O,
    SALIENT,
    SILENT,
    Setting,
    SimulatedCache,
    in_half,
)
from tiny_models import tiny_model

TOKENS, BUDGET = 90, 32


def logits_of(model, caches, tokens):
    outs = [model(tokens[:, i : i + 1], cache=caches) for i in range(tokens.shape[1])]
    return mx.concatenate(outs, axis=1)


@pytest.mark.parametrize(
    ("policy", "rule", "saturation"),
    [("salient", SALIENT, 4.0), ("distinct", DISTINCT, 4.0), ("h2o", H2O, SILENT)],
)
def test_it_forgets_what_the_cache_forgets(policy, rule, saturation):
    install()
    model = tiny_model("llama")
    tokens = mx.random.randint(0, 100, (2, TOKENS), key=mx.random.key(1))
    real = [
        H2OKVCache(budgets=[BUDGET] * 2, policy=policy, remainder=saturation != SILENT)
        for _ in model.layers
    ]
    expected = logits_of(model, real, tokens)
    full, limited = Setting("full"), Setting("x", [[BUDGET] * 2] * 2, saturation, rule)
    caches = [SimulatedCache([full, limited], i, TOKENS) for i in range(2)]
    got = logits_of(model, caches, mx.concatenate([tokens, tokens]))
    plain = model(tokens)
    assert mx.abs(got[:2] - plain).max().item() < 1e-3
    assert mx.abs(got[2:] - expected).max().item() < 1e-3
    assert mx.abs(plain - expected).max().item() > 0.1  # it did forget


def test_scores_in_half_precision_are_near_and_when_dithered_right_on_average():
    scores = mx.exp(mx.random.uniform(-12, 8, (1000,)))
    logs = mx.log(scores)
    near = mx.abs(mx.log(in_half(scores, False)) - logs)
    # Half a step of a number below 16 whose fraction has 10 bits.
    assert near.max().item() <= 2.0**-8 + 1e-5
    assert mx.array_equal(in_half(in_half(scores, False), False), in_half(scores, False))
    many = mx.stack([mx.log(in_half(scores, True)) for _ in range(256)])
    assert mx.abs(many - logs).max().item() <= 2.0**-7 + 1e-5
    assert mx.abs(many.mean(axis=0) - logs).max().item() < 2e-3
    assert in_half(mx.zeros(3), True).tolist() == [0, 0, 0]
