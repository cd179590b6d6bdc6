"""Models of mlx-vlm: bounded by its own functions, with images in the prompt."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed here")

from mlx_vlm.models.cache import KVCache
from mlx_vlm.models.cache import make_prompt_cache as vlm_prompt_cache

import mlx_h2o
from mlx_h2o import H2OKVCache
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.loaded import logits_of
from tiny_models import prompt_tokens
from vlm_images import (
    CROSS,
    GRIDS,
    MROPE,
    QWEN,
    TOKENS_OF_IMAGE,
    generated,
    prompt_with_images,
    seeing,
)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [CROSS, *MROPE])
def test_tokens_after_images_are_those_of_the_plain_cache_until_memory_is_full(name):
    model = seeing(name)
    expected = generated(model, 30, 12)
    assert expected != generated(model, 30, 12, seed=6), "the image makes no difference"
    assert generated(model, 30, 12, mlx_h2o.make_prompt_cache(model, max_size=200)) == expected
    mlx_h2o.install(max_size=200)
    assert generated(model, 30, 12) == expected


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [CROSS, *MROPE])
def test_install_bounds_what_mlx_vlms_generator_makes(name, monkeypatch):
    model, size, made = seeing(name), 40, []
    mlx_h2o.install(max_size=size)
    from mlx_vlm.models import cache as module

    make = module.make_prompt_cache
    monkeypatch.setattr(
        module, "make_prompt_cache", lambda *a, **k: made.append(make(*a, **k)) or made[-1]
    )
    assert len(generated(model, 90, 30)) == 30
    in_tokens = 0 if name == CROSS else 2 * (TOKENS_OF_IMAGE + 1)
    bounded = [entry for _, entry in entries(made[0]) if isinstance(entry, H2OKVCache)]
    others = {type(entry).__name__ for _, entry in entries(made[0])} - {"H2OKVCache"}
    assert bounded
    assert others <= {"ArraysCache", "RotatingKVCache"}
    for entry in bounded:
        assert entry.size() <= size
        assert entry.offset == 90 + in_tokens + 30
        assert entry.evicted > 0


def test_a_layer_that_attends_to_the_image_alone_keeps_no_tokens():
    model = seeing(CROSS)
    cache = mlx_h2o.make_prompt_cache(model, max_size=24)
    generated(model, 60, 20, cache)
    memory = mlx_h2o.describe(cache).memory
    assert memory.startswith("2 of 3 layers bounded (1 with cross-attention), ")
    assert " at most, " in memory


@pytest.mark.few(3)
@pytest.mark.parametrize("name", QWEN)
def test_tokens_after_a_video_are_those_of_the_plain_cache_until_memory_is_full(name):
    model, frames = seeing(name), [[2, 4, 6]]
    expected = generated(model, 30, 12, images=frames, video=True)
    roomy = mlx_h2o.make_prompt_cache(model, max_size=200)
    assert generated(model, 30, 12, roomy, images=frames, video=True) == expected
    small = mlx_h2o.make_prompt_cache(model, max_size=24)
    assert len(generated(model, 30, 12, small, images=frames, video=True)) == 12
    assert small[-1].evicted > 0


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [CROSS, *MROPE])
def test_a_request_leaves_nothing_to_the_next_one(name):
    """Other images, of other sizes: models note positions in themselves."""
    model, large = seeing(name), [[1, 8, 6]]

    def answer(images: list[list[int]], seed: int) -> list[int]:
        cache = mlx_h2o.make_prompt_cache(model, max_size=24)
        tokens = generated(model, 60, 12, cache, images, seed=seed)
        assert any(getattr(entry, "evicted", 0) for _, entry in entries(cache))
        return tokens

    first, second = answer(GRIDS, 5), answer(large, 6)
    model = seeing(name)
    assert answer(large, 6) == second
    assert answer(GRIDS, 5) == first


@pytest.mark.slow
def test_eight_images_of_a_thousand_tokens_take_an_eighth_of_the_bytes():
    """Of mlx-vlm's own caches, whose likeliest tokens are the same until the memory is full."""
    model, chunk = seeing("qwen2_vl"), 128
    tokens, pixels, grids = prompt_with_images(90, [[1, 50, 80]] * 8)
    seen = model.get_input_embeddings(tokens, pixels, image_grid_thw=grids)
    mx.eval(seen.inputs_embeds)

    def read(cache: list[Any]) -> Iterator[list[int]]:
        for first in range(0, tokens.shape[1], chunk):
            rows = slice(first, first + chunk)
            out = model.language_model(
                tokens[:, rows], seen.inputs_embeds[:, rows], cache=cache,
                position_ids=seen.position_ids[..., rows], rope_deltas=seen.rope_deltas,
            )  # fmt: skip
            yield out.logits[0].argmax(-1).tolist()

    plain = vlm_prompt_cache(model.language_model)
    expected = list(read(plain))
    whole = sum(entry.keys[..., : entry.offset, :].nbytes * 2 for entry in plain)
    cache = mlx_h2o.make_prompt_cache(model, max_bytes=whole // 8, bits=16)
    full = 0
    for i, got in enumerate(read(cache)):
        memory = mlx_h2o.describe(cache)
        assert sum(entry.nbytes for entry in cache) == memory.nbytes <= memory.most <= whole // 8
        if not any(entry.evicted for entry in cache):
            assert got == expected[i]
            full = cache[0].offset
    assert full >= 7 * chunk
    assert all(entry.evicted > 0 and entry.offset == tokens.shape[1] for entry in cache)
    print(f"{tokens.shape[1]:,} tokens: {whole:,} bytes, bounded {memory.nbytes:,}; full at {full}")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MROPE)
def test_mrope_positions_go_on_after_evictions(name, monkeypatch):
    """Positions are those that the plain cache gives, in all three axes."""
    model, seen = seeing(name), []
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
    assert small[-1].evicted > 0
    for expected, got in zip(plain, seen, strict=True):
        assert mx.array_equal(expected, got)


def test_packed_rows_are_near_the_plain_caches():
    model = seeing("qwen2_vl")
    tokens = mx.array([prompt_tokens(40)])
    expected = logits_of(model, tokens, vlm_prompt_cache(model.language_model))
    packed = mlx_h2o.make_prompt_cache(model, max_size=100, bits=8, group_size=32)
    got = logits_of(model, tokens, packed)
    assert (mx.abs(got - expected).max() / mx.abs(expected).max()).item() < 0.05


def test_making_caches_leaves_what_a_model_notes_of_positions():
    model = seeing("qwen2_vl")
    generated(model, 30, 2)
    before = model.language_model._rope_deltas.item()
    assert before != 0
    mlx_h2o.make_prompt_cache(model, max_size=24)
    assert model.language_model._rope_deltas.item() == before


def test_without_install_mlx_vlm_makes_its_own():
    model = seeing("qwen2_vl")
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
