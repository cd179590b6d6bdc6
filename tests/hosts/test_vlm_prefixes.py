"""mlx-vlm's prefix cache (APC) over bounded caches."""

from typing import Any

import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed here")

from mlx_vlm.apc import APCManager, DiskBlockStore
from mlx_vlm.generate import BatchGenerator, stream_generate
from mlx_vlm.utils import load
from test_vlm_generation import NAMES, SIZE, Tokenizer, batched

import mlx_h2o
from mlx_h2o.hosts.cache_lists import entries
from tiny_models import prompt_tokens
from vlm_folder import write_vlm_folder
from vlm_models import vlm_model

CHUNK, ANSWER = 16, 8
# 14 tokens of an image, and letters: all but the last fill chunks.
FIRST = "<|vision_start|><|image_pad|><|vision_end|>" + "The quick brown fox. " * 3 + "x" * 20
NEXT = FIRST + "It jumps over the lazy dog."


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> tuple[Any, Any, str]:
    """A tiny model that sees images, its processor, and an image's file."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("qwen2_vl")
    write_vlm_folder(folder)
    image = str(folder / "image.png")
    Image.radial_gradient("L").convert("RGB").resize((112, 84)).save(image)
    return (*load(str(folder)), image)


def answered(seeing: Any, prompt: str, **options: Any) -> tuple[list[int], int]:
    """The tokens of an answer, and the prompt's tokens that were known."""
    model, processor, image = seeing
    options |= {"max_tokens": ANSWER, "temperature": 0.0, "prefill_step_size": CHUNK}
    parts = list(stream_generate(model, processor, prompt, image=[image], **options))
    return parts[-1].token_ids, parts[-1].cached_tokens


@pytest.mark.parametrize("size", [400, SIZE])
def test_an_answer_after_a_known_prefix_is_that_of_a_fresh_cache(seeing, size):
    """While memory suffices it is that of mlx-vlm's own caches, without APC."""
    plain = answered(seeing, NEXT)[0]
    mlx_h2o.install(max_size=size)
    fresh = answered(seeing, NEXT)[0]
    assert size == SIZE or fresh == plain
    manager = APCManager(num_blocks=8)
    assert answered(seeing, FIRST, apc_manager=manager)[1] == 0
    tokens, known = answered(seeing, NEXT, apc_manager=manager)
    assert tokens == fresh
    assert known > 90
    assert known % CHUNK == 0  # else a fresh cache would read the prompt in other pieces
    for kept in manager._exact_cache.values():
        assert all(entry.size() <= size for _, entry in entries(kept.prompt_cache))


# M-RoPE needs the positions that the server gives: tests/hosts/test_vlm_server.py.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen2_vl"])
def test_batches_with_known_prefixes_and_new_ones(name):
    """They give the tokens that mlx-vlm's own caches give with APC, while memory suffices."""
    first = prompt_tokens(65, seed=1)
    prompts = [first + prompt_tokens(9, seed=3), prompt_tokens(48, seed=2)]
    answers = {}
    for size in (None, 200, SIZE):
        manager = APCManager(num_blocks=8)
        batched(vlm_model(name), [first], size, apc_manager=manager)
        answers[size] = batched(vlm_model(name), prompts, size, apc_manager=manager)
        assert manager.stats.hits == 1
    assert answers[200] == answers[None]
    assert list(map(len, answers[SIZE])) == list(map(len, answers[None]))


def test_a_disk_tier_and_a_prompt_cache_of_ones_own_are_refused(tmp_path):
    model = vlm_model("mixtral")
    own = {"prompt_cache": mlx_h2o.make_prompt_cache(model, max_size=SIZE)}
    with pytest.raises(ValueError, match="instead of a bounded prompt_cache"):
        stream_generate(model, Tokenizer(), "text", apc_manager=APCManager(num_blocks=4), **own)
    mlx_h2o.install(max_size=SIZE)
    disk = DiskBlockStore(tmp_path, namespace="test")
    with pytest.raises(ValueError, match="set APC_DISK_ENABLED=0"):
        BatchGenerator(model, Tokenizer(), apc_manager=APCManager(num_blocks=4, disk=disk))
    disk.close()
