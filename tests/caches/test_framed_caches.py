"""Caches whose packed keys lie in a frame: alike by kernels and reference, and as without one."""

import copy
import pickle
from contextlib import nullcontext
from functools import cached_property

import mlx.core as mx
import numpy as np
import pytest

from arrays import numpy_of
from mlx_h2o import (
    H2OKVCache,
    describe,
    load_prompt_cache,
    make_policy,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.calibration.scaling_build import frames_of
from mlx_h2o.slots.key_scaling import Frame
from tiny_models import TinyLayer, tiny_model

WIDTH = 64
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


class LayerWithOffsets(TinyLayer):
    """Two channels of every key are far off and hardly move."""

    @cached_property
    def tokens(self) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = super().tokens
        channels = mx.arange(WIDTH)
        return q, (k + 20 * (channels == 3) - 9 * (channels == 40)).astype(self.dtype), v


def layer(**settings) -> LayerWithOffsets:
    return LayerWithOffsets(heads=2, group=2, key_width=WIDTH, value_width=32, **settings)


LAYER = layer()
FRAME = Frame.of(LAYER.tokens[1])


def fed(layer: TinyLayer, cache: H2OKVCache) -> list[mx.array]:
    return [layer.feed(cache, count, chunk) for count, chunk in ((50, 25), (90, 1), (30, 30))]


@pytest.mark.few(5)
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", ["distinct", "h2o", "keydiff", "streaming"])
@pytest.mark.parametrize("budgets", [[32, 32], [24, 40]], ids=["uniform", "ragged"])
@pytest.mark.parametrize(
    "packing",
    [{"bits": 6}, {"k_bits": 4}, {"bits": 4, "recent_bits": 8}, {"k_bits": 5, "recent_bits": 16}],
    ids=str,
)
def test_fused_steps_do_what_the_reference_does(packing, budgets, policy, dtype):
    """Kept rows bit for bit, results within rounding."""
    tokens = layer(dtype=dtype, batch=2)
    caches, outs = [], []
    for context in (nullcontext(), only_reference()):
        with context:
            caches.append(
                H2OKVCache(
                    budgets=budgets,
                    policy=make_policy(policy, recent=6),
                    group_size=32,
                    frame=FRAME,
                    **packing,
                )
            )
            outs.append(fed(tokens, caches[-1]))
    got, expected = (cache.arrays() for cache in caches)
    same = mx.array_equal(got["slots.positions"], expected["slots.positions"])
    assert same or dtype == mx.bfloat16  # whose roundings may decide between two equal tokens
    for a, b in zip(*outs, strict=True):
        if same:
            # One step of bfloat16 is 2^-8 of a number, or its double.
            atol, rtol = (2e-5, 1e-7) if dtype == mx.float32 else (2e-2, 1e-2)
            np.testing.assert_allclose(numpy_of(a), numpy_of(b), atol=atol, rtol=rtol)
        else:
            assert np.abs(numpy_of(a) - numpy_of(b)).mean() < 1e-2
    for name, array in expected.items():
        if same and array.dtype == mx.uint32:
            assert mx.array_equal(got[name], array), name


@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "reference"])
def test_a_frame_that_does_nothing_changes_nothing(reference):
    frame = Frame(mx.zeros((2, WIDTH)), mx.ones((2, WIDTH)))
    with only_reference() if reference else nullcontext():
        framed = H2OKVCache(32, bits=4, group_size=32, frame=frame)
        plain = H2OKVCache(32, bits=4, group_size=32)
        for a, b in zip(fed(LAYER, framed), fed(LAYER, plain), strict=True):
            assert mx.array_equal(a, b)
    for name, array in plain.arrays().items():
        assert mx.array_equal(framed.arrays()[name], array), name


@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "reference"])
@pytest.mark.parametrize("remainder", [False, True])
@pytest.mark.parametrize("recent_bits", [None, 16])
def test_what_comes_out_is_what_dense_keys_give(recent_bits, remainder, reference):
    """8 bits in the frame are as good as dense; plain 8 bits are not, beside such offsets."""
    streaming = make_policy("streaming", recent=6)
    settings = {"budgets": [40, 40], "policy": streaming, "remainder": remainder}
    bits = {"k_bits": 8, "group_size": 32, "recent_bits": recent_bits}
    with only_reference() if reference else nullcontext():
        dense = fed(LAYER, H2OKVCache(**settings))
        framed = fed(LAYER, H2OKVCache(**settings, **bits, frame=FRAME))
        plain = fed(LAYER, H2OKVCache(**settings, **bits))

    def error(outs: list[mx.array]) -> float:
        return max(mx.abs(a - b).max().item() for a, b in zip(outs, dense, strict=True))

    assert error(framed) < 0.08
    assert error(framed) < 0.5 * error(plain)


def test_beside_attention_sinks_a_frame_has_no_centre():
    sinks = mx.array([0.5, -1, 2, 0])
    scaled = Frame(mx.zeros((2, WIDTH)), FRAME.scale)
    for frame in (scaled, FRAME):
        cache = H2OKVCache(32, k_bits=8, group_size=32, frame=frame)
        q, k, v = LAYER.at(0, 8)
        keys, values = cache.update_and_fetch(k, v)
        if frame is FRAME:
            with pytest.raises(ValueError, match="centre of zeros"):
                cache.attend(q, keys, values, scale=0.1, mask="causal", sinks=sinks)
            continue
        out = cache.attend(q, keys, values, scale=0.1, mask="causal", sinks=sinks)
        expected = mx.fast.scaled_dot_product_attention(
            q, k, v, scale=0.1, mask="causal", sinks=sinks
        )
        assert mx.allclose(out, expected, atol=0.1)  # without sinks the first row is off by 1


# -- what goes along with a cache ------------------------------------------------------------------


def test_a_frame_goes_along_and_is_counted(tmp_path):
    cache = H2OKVCache(32, bits=6, group_size=32, frame=FRAME)
    assert cache.nbytes == FRAME.nbytes == 2 * 2 * WIDTH * 4
    LAYER.feed(cache, 60, 20)
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays().values())
    save_prompt_cache(tmp_path / "cache.safetensors", [cache])
    travelled = [
        *load_prompt_cache(tmp_path / "cache.safetensors"),
        copy.deepcopy(cache),
        pickle.loads(pickle.dumps(cache)),
        H2OKVCache.from_state(cache.state),
    ]
    expected = LAYER.feed(cache, 30)
    for other in travelled:
        assert other.frame == FRAME
        assert mx.array_equal(LAYER.feed(other, 30), expected)
    assert "in a frame" in repr(cache)
    assert "in a frame" in str(describe([cache])[0])


def test_a_frame_goes_along_before_the_first_token(tmp_path):
    cache = H2OKVCache(32, bits=6, group_size=32, frame=FRAME)
    save_prompt_cache(tmp_path / "cache.safetensors", [cache])
    (loaded,) = load_prompt_cache(tmp_path / "cache.safetensors")
    assert loaded.frame == FRAME
    assert mx.array_equal(LAYER.feed(loaded, 9, 9), LAYER.feed(cache, 9, 9))


@pytest.mark.parametrize("reference", [False, True], ids=["kernels", "reference"])
def test_a_draft_enters_the_frame_once(reference):
    """A chunk within `undo` goes token by token."""
    outs = []
    with only_reference() if reference else nullcontext():
        for chunk in (4, 1):
            cache = H2OKVCache(24, bits=6, group_size=32, frame=FRAME, undo=4)
            LAYER.feed(cache, 60, 20)
            outs.append(LAYER.feed(cache, 12, chunk))
    assert mx.allclose(*outs, atol=1e-5)


def test_steps_are_taken_back_in_the_frame():
    with_undo = H2OKVCache(24, bits=6, group_size=32, frame=FRAME, undo=4)
    LAYER.feed(with_undo, 60, 20)
    before = {name: mx.array(array) for name, array in with_undo.arrays().items()}
    mx.eval(before)
    LAYER.feed(with_undo, 3)
    with_undo.trim(3)
    for name, array in before.items():
        if name != "victims":
            assert mx.array_equal(with_undo.arrays()[name], array), name


def test_bytes_are_kept_with_a_frame_in_them():
    sizes = []
    for frame in (None, FRAME):
        cache = H2OKVCache(max_bytes=20_000, bits=6, group_size=32, frame=frame)
        LAYER.feed(cache, 200, 100)
        assert cache.nbytes <= 20_000
        sizes.append(cache.size())
    assert sizes[0] > sizes[1] > 0.9 * sizes[0]


@pytest.mark.parametrize(
    "damage",
    [
        {"frame.scale": None},
        {"frame.scale": mx.zeros((2, WIDTH))},
        {"frame.centre": mx.full((2, WIDTH), mx.nan)},
        {"frame.centre": mx.zeros((2, WIDTH), mx.float16)},
        {"frame.centre": mx.zeros((3, WIDTH)), "frame.scale": mx.ones((3, WIDTH))},
    ],
    ids=range(5),
)
def test_a_damaged_frame_is_refused(damage):
    cache = H2OKVCache(32, bits=6, group_size=32, frame=FRAME)
    LAYER.feed(cache, 40, 20)
    arrays, text = cache.state
    changed = {name: array for name, array in {**arrays, **damage}.items() if array is not None}
    with pytest.raises(ValueError, match="frame"):
        H2OKVCache.from_state((changed, text))


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("centre", "scale", "text"),
    [
        (mx.zeros((2, 4)), mx.ones((2, 5)), "key width"),
        (mx.zeros(4), mx.ones(4), "key width"),
        (mx.full((2, 4), mx.inf), mx.ones((2, 4)), "finite"),
        (mx.zeros((2, 4)), mx.zeros((2, 4)), "above 0"),
        (mx.zeros((2, 4)), mx.full((2, 4), mx.nan), "finite"),
    ],
)
def test_a_frame_that_is_none_is_refused(centre, scale, text):
    with pytest.raises(ValueError, match=text):
        Frame(centre, scale)


def test_settings_that_do_not_go_with_a_frame_are_refused():
    with pytest.raises(ValueError, match="packed keys"):
        H2OKVCache(32, v_bits=8, frame=FRAME)
    with pytest.raises(ValueError, match="must be a Frame"):
        H2OKVCache(32, bits=8, frame=FRAME.arrays)
    with pytest.raises(ValueError, match="frame is for"):
        LAYER.feed(H2OKVCache(32, bits=8, group_size=32, frame=Frame.of(mx.ones((1, 3, 2, 64)))), 2)
    model = tiny_model("llama", head_dim=32)
    frames = frames_of(model, mx.arange(20)[None])
    for given, text in (
        (frames[:1], "has 1 entries"),
        ("static", "frames must be"),
        ([*frames[:-1], 3], "frames must be"),
    ):
        with pytest.raises(ValueError, match=text):
            make_prompt_cache(model, 32, bits=8, group_size=32, frames=given)
    with pytest.raises(ValueError, match="packed keys"):
        make_prompt_cache(model, 32, frames=frames)


def test_layers_with_attention_sinks_get_frames_without_a_centre():
    model = tiny_model("gpt_oss", head_dim=32)
    tokens = mx.random.randint(0, 100, (1, 30), key=mx.random.key(2))
    frames = frames_of(model, tokens)
    assert [frame is None for frame in frames] == [True, False, True, False]
    assert not any(frame.moves for frame in frames if frame)
    assert all(frame.moves for frame in frames_of(tiny_model("llama"), tokens))
    caches = make_prompt_cache(model, 24, bits=8, group_size=32, frames=frames)
    assert mx.allclose(model(tokens[:, :20], cache=caches), model(tokens[:, :20]), atol=0.3)
    with pytest.raises(ValueError, match="RotatingKVCache"):
        make_prompt_cache(model, 24, bits=8, group_size=32, frames=frames[1:] + frames[:1])


def test_a_models_caches_get_their_frames():
    model = tiny_model("llama", head_dim=32)
    tokens = mx.random.randint(0, 100, (1, 40), key=mx.random.key(1))
    frames = frames_of(model, tokens)
    caches = make_prompt_cache(model, 24, bits=8, group_size=32, frames=frames)
    assert [cache.frame for cache in caches] == frames
    full = model(tokens[:, :20])
    assert mx.allclose(model(tokens[:, :20], cache=caches), full, atol=0.1)
    for none in (None, False, "none", [None] * len(frames)):
        for cache in make_prompt_cache(model, 24, bits=8, group_size=32, frames=none):
            assert cache.frame is None
    budget = 60_000
    caches = make_prompt_cache(model, max_bytes=budget, bits=8, group_size=32, frames=frames)
    model(tokens, cache=caches)
    assert sum(cache.nbytes for cache in caches) <= budget
