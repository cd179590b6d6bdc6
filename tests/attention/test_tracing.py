"""mx.compile, mx.grad and mx.vmap: caches refuse them unharmed, the public ops can be compiled."""

from contextlib import nullcontext

import mlx.core as mx
import pytest

from mlx_h2o import H2OKVCache, make_prompt_cache
from mlx_h2o.attention import tracing
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.attention.ops import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_mass,
    scaled_dot_product_attention_with_scores,
)
from tiny_models import TinyLayer, prefill, prompt_tokens, tiny_model

TOKENS = prompt_tokens(60)
TRANSFORMS = {
    "compile": mx.compile,
    "shapeless compile": lambda f: mx.compile(f, shapeless=True),
    "grad": mx.grad,
    "vmap": mx.vmap,
}
# How to find out, with the compiled extension and without.
tracing._placeholder()
FINDERS = [tracing.tracing, tracing._tracing_by_mlx]


@pytest.fixture(params=[False, True], ids=["kernels", "reference"])
def _backend(request):
    with only_reference() if request.param else nullcontext():
        yield


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("decoded", [0, 3], ids=["after a prompt", "while decoding"])
def test_a_model_with_a_bounded_cache_is_not_compiled(decoded):
    """It said nothing at the first call and crashed at the second."""
    model = tiny_model("llama")
    cache, other = (make_prompt_cache(model, max_size=24) for _ in range(2))
    for c in (cache, other):
        prefill(model, c, TOKENS[:40], 20)
        prefill(model, c, TOKENS[40 : 40 + decoded], 1)
    compiled = mx.compile(lambda x: model(x, cache=cache))
    for count in (1, 1, 5):
        with pytest.raises(RuntimeError, match=r"cannot be used within mx\.compile"):
            compiled(mx.array([TOKENS[:count]]))
    assert cache[0].offset == other[0].offset
    for chunk in ([3], [5], TOKENS[50:], [7]):
        tokens = mx.array([chunk])
        assert mx.array_equal(model(tokens, cache=cache), model(tokens, cache=other))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("tracing", FINDERS, ids=["extension", "mlx alone"])
def test_every_transformation_is_found_out(transform, tracing, monkeypatch):
    """What does not depend on the function's argument is recorded too."""
    monkeypatch.setattr("mlx_h2o.attention.tracing.tracing", tracing)
    layer, cache = TinyLayer(), H2OKVCache(24)
    q, k, v = layer.at(0, 1)

    def call(x: mx.array) -> mx.array:
        keys, values = cache.update_and_fetch(k, v)
        return cache.attend(q, keys, values, scale=1.0).sum() + x.sum()

    with pytest.raises(RuntimeError, match=r"mx\.vmap"):
        TRANSFORMS[transform](call)(mx.zeros(1))
    assert cache.empty()
    assert call(mx.zeros(1)).shape == ()  # after them it is itself again

    cache = H2OKVCache(24)
    handed = cache.update_and_fetch(k, v)
    with pytest.raises(RuntimeError, match=r"mx\.vmap"):
        TRANSFORMS[transform](lambda q: cache.attend(q, *handed, scale=1.0).sum())(q)
    cache.attend(q, *handed, scale=1.0)
    assert layer.feed(cache, 30).shape[2] == 30


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize(
    "op",
    [
        scaled_dot_product_attention,
        scaled_dot_product_attention_with_scores,
        scaled_dot_product_attention_with_mass,
    ],
)
def test_attention_can_be_compiled(op):
    q, k, v = TinyLayer(length=9).tokens
    compiled = mx.compile(lambda q, k, v: op(q, k, v, scale=0.2, mask="causal"))
    for x in (q, 2 * q, q):
        got, expected = compiled(x, k, v), op(x, k, v, scale=0.2, mask="causal")
        pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
        assert all(mx.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
