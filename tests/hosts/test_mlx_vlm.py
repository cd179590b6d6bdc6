"""Models of mlx-vlm: bounded by its own functions, with images in the prompt."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed here")

from mlx_vlm.generate.ar import generate_step
from mlx_vlm.models.cache import KVCache
from mlx_vlm.models.cache import make_prompt_cache as vlm_prompt_cache

import mlx_h2o
from mlx_h2o import H2OKVCache
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.loaded import logits_of
from tiny_models import prompt_tokens, with_random_weights

IMAGE, IMAGE_START = 120, 122
# Two images of 4 x 6 patches; 2 x 2 of them are one token.
GRIDS, TOKENS_OF_IMAGE = [[1, 4, 6], [1, 4, 6]], 6
TEXT = {
    "model_type": "qwen2_vl",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
}
VISION = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 128, "depth": 1, "num_heads": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "out_hidden_size": 128,
        "depth": 1,
        "num_heads": 2,
        "intermediate_size": 48,
        "fullatt_block_indexes": [0],
    },
}


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    mlx_h2o.uninstall()


def vlm(name: str) -> Any:
    """A tiny model that sees images."""
    module = importlib.import_module(f"mlx_vlm.models.{name}")
    mx.random.seed(0)
    text = module.TextConfig.from_dict({**TEXT, "model_type": name})
    model = module.Model(
        module.ModelConfig(
            text_config=text,
            vision_config=module.VisionConfig.from_dict({"model_type": name, **VISION[name]}),
            model_type=name,
            vocab_size=TEXT["vocab_size"],
            image_token_id=IMAGE,
            video_token_id=121,
            vision_start_token_id=IMAGE_START,
        )
    )
    return with_random_weights(model)


def prompt_with_images(text: int, grids: list[list[int]]) -> tuple[mx.array, mx.array, mx.array]:
    """Token ids `[1, T]` with images between equal parts of a text, their pixels, and grids."""
    words = [token % 100 for token in prompt_tokens(text)]
    patches = [t * h * w for t, h, w in grids]
    part = text // (len(grids) + 1)
    tokens = words[:part]
    for i, count in enumerate(patches, 1):
        after = words[i * part : (i + 1) * part if i < len(grids) else None]
        tokens += [IMAGE_START, *[IMAGE] * (count // 4), *after]
    pixels = mx.random.normal((sum(patches), 3 * 2 * 14 * 14), key=mx.random.key(5))
    return mx.array([tokens]), pixels, mx.array(grids)


def generated(
    model: Any,
    text: int,
    count: int,
    cache: list[Any] | None = None,
    images: list[list[int]] = GRIDS,
    chunk: int = 16,
) -> list[int]:
    """Tokens after a prompt with images, by mlx-vlm's own generator."""
    tokens, pixels, grids = prompt_with_images(text, images)
    steps = generate_step(
        tokens,
        model,
        pixels,
        None,
        max_tokens=count,
        temperature=0.0,
        prompt_cache=cache,
        image_grid_thw=grids,
        prefill_step_size=chunk,
    )
    return [token for token, _ in steps]


@pytest.mark.parametrize("name", list(VISION))
def test_tokens_after_images_are_those_of_the_plain_cache_until_memory_is_full(name):
    model = vlm(name)
    expected = generated(model, 30, 12)
    assert generated(model, 30, 12, mlx_h2o.make_prompt_cache(model, max_size=200)) == expected
    mlx_h2o.install(max_size=200)
    assert generated(model, 30, 12) == expected


@pytest.mark.parametrize("name", list(VISION))
def test_install_bounds_what_mlx_vlms_generator_makes(name, monkeypatch):
    model, size, made = vlm(name), 40, []
    mlx_h2o.install(max_size=size)
    from mlx_vlm.models import cache as module

    make = module.make_prompt_cache
    monkeypatch.setattr(
        module, "make_prompt_cache", lambda *a, **k: made.append(make(*a, **k)) or made[-1]
    )
    assert len(generated(model, 90, 30)) == 30
    for _, entry in entries(made[0]):
        assert isinstance(entry, H2OKVCache)
        assert entry.size() <= size
        assert entry.offset == 90 + 2 * (TOKENS_OF_IMAGE + 1) + 30
        assert entry.evicted > 0


@pytest.mark.slow
def test_eight_images_of_a_thousand_tokens_take_an_eighth_of_the_bytes():
    """Of what mlx-vlm's own caches take for them."""
    model, images = vlm("qwen2_vl"), [[1, 50, 80]] * 8
    plain = vlm_prompt_cache(model.language_model)
    expected = generated(model, 90, 4, plain, images, chunk=512)
    whole = sum(entry.keys.nbytes + entry.values.nbytes for entry in plain)
    tokens = plain[0].offset
    cache = mlx_h2o.make_prompt_cache(model, max_bytes="12.5%", context=tokens, profile="never")
    assert len(generated(model, 90, 4, cache, images, chunk=512)) == len(expected)
    assert all(entry.evicted > 0 and entry.offset == tokens for entry in cache)
    assert sum(entry.nbytes for entry in cache) <= whole / 8


@pytest.mark.parametrize("name", list(VISION))
def test_mrope_positions_go_on_after_evictions(name, monkeypatch):
    """Positions are those that the plain cache gives, in all three axes."""
    model, seen = vlm(name), []
    inner = type(model.language_model.model)
    call = inner.__call__

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["position_ids"])
        return call(self, *args, **kwargs)

    monkeypatch.setattr(inner, "__call__", recording)
    generated(model, 90, 6, vlm_prompt_cache(model.language_model))
    plain, seen = seen, []
    small = mlx_h2o.make_prompt_cache(model, max_size=24)
    seen.clear()
    generated(model, 90, 6, small)
    assert small[0].evicted > 0
    for expected, got in zip(plain, seen, strict=True):
        assert mx.array_equal(expected, got)


def test_packed_rows_are_near_the_plain_caches():
    model = vlm("qwen2_vl")
    tokens = mx.array([prompt_tokens(40)])
    expected = logits_of(model, tokens, vlm_prompt_cache(model.language_model))
    packed = mlx_h2o.make_prompt_cache(model, max_size=100, bits=8, group_size=32)
    got = logits_of(model, tokens, packed)
    assert (mx.abs(got - expected).max() / mx.abs(expected).max()).item() < 0.05


def test_making_caches_leaves_what_a_model_notes_of_positions():
    model = vlm("qwen2_vl")
    generated(model, 30, 2)
    before = model.language_model._rope_deltas.item()
    assert before != 0
    mlx_h2o.make_prompt_cache(model, max_size=24)
    assert model.language_model._rope_deltas.item() == before


def test_without_install_mlx_vlm_makes_its_own():
    model = vlm("qwen2_vl")
    mlx_h2o.install(max_size=24)
    assert {type(entry) for entry in vlm_prompt_cache(model.language_model)} != {KVCache}
    mlx_h2o.uninstall()
    assert {type(entry) for entry in vlm_prompt_cache(model.language_model)} == {KVCache}


LATE = """
import sys
import mlx_h2o
mlx_h2o.install(max_size=24)
assert "mlx_vlm" not in sys.modules, "mlx-vlm was imported without need"
import mlx_vlm.models.llama as llama
from mlx_vlm.models.cache import make_prompt_cache
config = llama.ModelConfig.from_dict(dict(model_type="llama", hidden_size=32, num_hidden_layers=1,
    intermediate_size=32, num_attention_heads=2, rms_norm_eps=1e-6, vocab_size=64))
cache = make_prompt_cache(llama.Model(config).language_model)
assert isinstance(cache[0], mlx_h2o.H2OKVCache), cache
"""


def test_mlx_vlm_may_be_imported_after_install():
    subprocess.run([sys.executable, "-c", LATE], check=True)
