"""The measuring cache forgets what the real one forgets."""

import mlx.core as mx
import pytest

from mlx_h2o import H2OKVCache, install
from mlx_h2o.evaluate.simulation import DISTINCT, H2O, SALIENT, SILENT, Setting, SimulatedCache
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
