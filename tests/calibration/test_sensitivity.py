"""The heads' sensitivities: how much the model's predictions feel each head's error."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_h2o
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.settings import DEFAULT_POLICY
from mlx_h2o.calibration import calibrate
from mlx_h2o.calibration.sensitivity import Errors, Movable, sensitivities
from mlx_h2o.hosts.recorder import Watcher, full_attention, looked_through
from mlx_h2o.loading.load import CALIBRATION_TEXT
from mlx_h2o.policies import make_policy
from tiny_models import prompt_tokens, tiny_model

POLICY = make_policy(DEFAULT_POLICY)


def log_probabilities(model, window, added):
    x = looked_through(model, window, Watcher(), lambda i: Movable(added[i])).astype(mx.float32)
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def test_nats_are_those_of_each_heads_error_alone():
    """Against the KL divergence with one head's error added, the other heads being full."""
    model, tokenizer = mlx_h2o.load("builtin:recall-4m")
    tokens = tokenizer.encode(CALIBRATION_TEXT.read_text())[:512]
    felt = sensitivities(model, tokens, POLICY, 1)
    window = mx.array([tokens])
    made = Errors(model, window, POLICY)
    nothing = [mx.zeros_like(error) for error in made.errors]
    full = log_probabilities(model, window, nothing)
    alone = []
    for layer, (error, heads) in enumerate(zip(made.errors, made.kv_heads, strict=True)):
        of_head = mx.arange(error.shape[1]) // (error.shape[1] // heads)
        for head in range(heads):
            added = list(nothing)
            added[layer] = mx.where((of_head == head)[:, None, None], error, 0)
            other = log_probabilities(model, window, added)
            alone.append((mx.exp(full) * (full - other)).sum().item())
    ratio = felt * made.losses / np.array(alone)
    assert ((ratio > 0.6) & (ratio < 1.6)).all(), ratio
    # Its losses say that the copying head counts as much as the others, its nats say more.
    assert felt.argmax() == 7
    assert felt[7] > 2 * np.median(felt)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"sinks": mx.array([0.5, -1.0, 2.0, 0.0])}]
)
def test_attention_with_gradients_is_full_attention(options):
    draw = [mx.random.normal((1, H, 40, 16), key=mx.random.key(i)) for i, H in enumerate((4, 2, 2))]
    call = AttentionCall(draw[0], 0.5, "causal", options.get("sinks"), options.get("softcap", 0.0))
    expected = full_attention(*draw, scale=call.scale, sinks=call.sinks, softcap=call.softcap)
    got = Movable(mx.zeros(draw[0].shape)).look(call, *draw[1:])
    assert mx.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_oss"])
def test_families_have_gradients(family):
    """Also those with soft-capped logits, attention sinks and experts."""
    model = tiny_model(family)
    felt = sensitivities(model, prompt_tokens(96), POLICY)
    heads = calibrate.calibrate(model, prompt_tokens(96)).model.kv_heads
    assert felt.shape == (sum(heads),)
    assert np.isfinite(felt).all()
    assert (felt >= 0).all()
    assert felt.max() > 0


class WithoutGradient(nn.Module):
    """An MLP with an operation through which MLX passes no gradient back."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x):
        q, _ = mx.linalg.qr(x[0].astype(mx.float32), stream=mx.cpu)
        return self.inner(x) + 0 * q.sum()


def test_without_gradients_losses_stay_parts_of_the_residual():
    model, tokens = tiny_model("llama"), prompt_tokens(128)
    in_nats = calibrate.calibrate(model, tokens)
    for layer in model.layers:
        layer.mlp = WithoutGradient(layer.mlp)
    assert sensitivities(model, tokens, POLICY) is None
    plain = calibrate.calibrate(model, tokens)
    assert plain.method == calibrate.METHOD
    assert in_nats.method == calibrate.METHOD_IN_NATS


def test_every_loss_of_a_head_is_weighed(monkeypatch):
    model, tokens = tiny_model("llama"), prompt_tokens(256)
    by = np.array([0.5, 1.0, 2.0, 4.0])

    def profile(felt):
        monkeypatch.setattr(calibrate, "sensitivities", lambda *args, **options: felt)
        return calibrate.calibrate(model, tokens, length=256)

    plain, weighed = profile(None), profile(by)
    for bits, losses in plain.measured.packing.items():
        assert np.allclose(weighed.measured.packing[bits], losses * by)
    flat = [[curve for layer in of.losses for curve in layer] for of in (plain, weighed)]
    assert np.allclose(flat[1], np.array(flat[0]) * by[:, None], rtol=2e-3)
