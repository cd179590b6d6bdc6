"""mlx-vlm's own batches: bounded; and what is refused by name."""

from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed here")

from mlx_vlm.generate import BatchGenerator, diffusion, generate_step, stream_generate
from mlx_vlm.generate.diffusion import stream_diffusion_generate_from_kwargs
from mlx_vlm.generate.dispatch import _prefix_cache_trim_amount
from mlx_vlm.models.cache import make_prompt_cache as vlm_prompt_cache

import mlx_h2o
from mlx_h2o.caches.batch import BatchH2OKVCache
from mlx_h2o.hosts.cache_lists import entries
from tiny_models import prompt_tokens
from vlm_images import seeing
from vlm_models import vlm_model

SIZE = 24
# A plain model, one with sliding windows beside ours, M-RoPE, and states beside ours.
NAMES = ["mixtral", "gemma3_text", "qwen2_vl", "qwen3_next"]


class Tokenizer:
    """What mlx-vlm's generators need of a tokenizer that never ends a text."""

    def __init__(self) -> None:
        self.tokenizer = self
        self.stopping_criteria = self

    def __call__(self, token: int) -> bool:
        return False

    def add_eos_token_ids(self, ids: Any) -> None:
        pass


def batched(
    model: Any, prompts: list[list[int]], size: int | None, **options: Any
) -> list[list[int]]:
    """The tokens after each prompt in mlx-vlm's batches; none of their caches exceeds the size."""
    if size is not None:
        mlx_h2o.install(max_size=size)
    generator = BatchGenerator(model, Tokenizer(), prefill_step_size=16, **options)
    embed = model.model.embed_tokens
    # The server gives APC a hash of the images.
    hashed = {"_apc_semantic_hash": 1} if options else {}
    kwargs = [{"inputs_embeds": embed(mx.array([prompt])), **hashed} for prompt in prompts]
    # One after the other leaves.
    counts = [12 - 2 * i for i in range(len(prompts))]
    tokens = {uid: list[int]() for uid in generator.insert(prompts, counts, kwargs)}
    while sum(map(len, tokens.values())) < sum(counts):
        for answer in generator.next()[1]:
            tokens[answer.uid].append(answer.token)
        for _, entry in entries(generator._generation_batch.prompt_cache):
            if size is not None:
                assert type(entry).__name__ not in ("BatchKVCache", "KVCache")
                assert isinstance(entry, BatchH2OKVCache) <= (entry.size() <= size)
    return list(tokens.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [(50, 21, 34), (40,)])
def test_batches_are_bounded_and_give_the_plain_tokens_while_there_is_room(name, lengths):
    model = vlm_model(name)
    prompts = [prompt_tokens(n, seed=n) for n in lengths]
    plain = batched(model, prompts, None)
    assert batched(model, prompts, 200) == plain
    assert list(map(len, batched(model, prompts, SIZE))) == list(map(len, plain))


def test_a_sequence_that_joins_a_batch_gives_the_tokens_that_it_gives_alone():
    model = vlm_model("mixtral")
    prompts = [prompt_tokens(n, seed=n) for n in (50, 34)]
    alone = [batched(model, [prompt], SIZE)[0][:6] for prompt in prompts]
    generator = BatchGenerator(model, Tokenizer(), prefill_step_size=16)
    embed, tokens = model.model.embed_tokens, list[list[int]]()
    for prompt in prompts:
        generator.insert([prompt], 9, [{"inputs_embeds": embed(mx.array([prompt]))}])
        tokens.append([])
        while len(tokens[-1]) < 2:
            for answer in generator.next()[1]:
                tokens[answer.uid].append(answer.token)
    while min(map(len, tokens)) < 6:
        for answer in generator.next()[1]:
            tokens[answer.uid].append(answer.token)
    assert [row[:6] for row in tokens] == alone


def test_kv_bits_are_refused_before_anything_is_computed():
    model, reason = seeing("qwen2_vl"), "kv_bits cannot pack a bounded cache"
    own = {"prompt_cache": mlx_h2o.make_prompt_cache(model, max_size=SIZE)}
    mlx_h2o.install(max_size=SIZE)
    with pytest.raises(ValueError, match=reason):
        BatchGenerator(model.language_model, Tokenizer(), kv_bits=4)
    for caches in ({}, own):
        with pytest.raises(ValueError, match=reason):
            stream_generate(model, Tokenizer(), "text", kv_bits=4, **caches)
        with pytest.raises(ValueError, match=reason):
            generate_step(mx.array([[1]]), model, None, None, kv_bits=4, **caches)


def test_text_diffusion_is_refused_while_caches_are_to_be_bounded():
    stream_diffusion_generate_from_kwargs(None, *[None] * 6, {})  # an iterator that never begins
    mlx_h2o.install(max_size=SIZE)
    with pytest.raises(ValueError, match="diffusion of text"):
        diffusion.stream_diffusion_generate_from_kwargs(None, *[None] * 6, {})


@pytest.mark.parametrize(("undo", "expected"), [(0, None), (4, 2)])
def test_a_conversation_goes_back_only_as_far_as_it_can(undo, expected):
    """mlx-vlm's `PromptCacheState`: it reads the prompt again where None."""
    model = vlm_model("mixtral")
    cache = mlx_h2o.make_prompt_cache(model, max_size=SIZE, undo=undo)
    model(mx.array([prompt_tokens(60)]), cache=cache)
    for token in (1, 2, 3):
        mx.eval(model(mx.array([[token]]), cache=cache).logits)
    assert _prefix_cache_trim_amount(cache, 63) == 0
    assert _prefix_cache_trim_amount(cache, 61) == expected
    assert _prefix_cache_trim_amount(cache, 20) is None
    assert _prefix_cache_trim_amount(vlm_prompt_cache(model), 0) == 0


def test_caches_that_cannot_be_batched_are_refused():
    model = vlm_model("stablelm")
    mlx_h2o.install(max_size=SIZE)
    with pytest.raises(ValueError, match="cannot be batched: generate one sequence"):
        batched(model, [prompt_tokens(9), prompt_tokens(5)], SIZE)
