"""A gradient moves kept rows: predictions come nearer the full cache's, in the same bytes."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_h2o
from mlx_h2o.compression import distillation
from mlx_h2o.compression.distillation import (
    CONTINUATIONS,
    LESSON,
    LearningCache,
    RowsOfLayer,
    lessons,
    rounded,
)
from mlx_h2o.compression.second_reading import looking_caches
from mlx_h2o.loading.load import SAMPLE_TEXT
from tiny_models import Characters, tiny_model


@pytest.fixture(scope="module")
def prompt():
    return mx.random.randint(0, 100, (1, 70), key=mx.random.key(4))


@pytest.mark.parametrize(("bits", "size"), [(16, "60%"), (4, "30%")])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_rows_that_did_not_move_are_attended_to_as_those_of_a_cache(family, bits, size, prompt):
    """With frames, capped logits, attention sinks and a remainder; causally within the lesson."""
    model = tiny_model(family, head_dim=64)
    cache = mlx_h2o.compress_prompt(model, Characters(), prompt, size, room=20, bits=bits)
    bounded = [entry for entry in cache if isinstance(entry, mlx_h2o.H2OKVCache)]
    assert all(entry.evicted for entry in bounded)
    kept = [RowsOfLayer(entry.layer) for entry in bounded]
    learning = [LearningCache(of, rounded(of.layer, of.rows), 70) for of in kept]
    tokens = mx.arange(5, 17)[None]
    got = model(tokens, cache=looking_caches(cache, learning))
    assert mx.allclose(got, model(tokens, cache=cache), atol=2e-3)


def test_predictions_come_nearer_in_the_same_bytes_and_slots():
    """On words that were no lesson: a chunk of the text that follows."""
    model, tokenizer = mlx_h2o.load("builtin:recall-4m")
    tokens = mx.array([tokenizer.encode(SAMPLE_TEXT.read_text())[:280]])
    prompt, following = tokens[:, :256], tokens[:, 256:]
    full = stock_prompt_cache(model)
    model(prompt, cache=full)
    wanted = mx.softmax(model(following, cache=full).astype(mx.float32), axis=-1)
    apart, sizes, positions = [], [], []
    for steps in (0, 8):
        cache = mlx_h2o.compress_prompt(model, tokenizer, prompt, "8%", room=32, steps=steps)
        sizes.append([entry.nbytes for entry in cache])
        positions.append(
            [np.array(entry.slots(run).positions) for entry in cache for run in entry.store.runs]
        )
        logits = model(following, cache=cache).astype(mx.float32)
        logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        apart.append((wanted * (mx.log(wanted) - logs)).sum(axis=-1).mean().item())
    assert sizes[0] == sizes[1]
    for before, after in zip(*positions, strict=True):
        assert np.array_equal(before, after)
    assert apart[1] < 0.98 * apart[0]


def test_a_saved_cache_answers_as_before(prompt, tmp_path):
    model = tiny_model("llama")
    cache = mlx_h2o.compress_prompt(model, Characters(), prompt, "60%", steps=2)
    mlx_h2o.save_prompt_cache(tmp_path / "moved.safetensors", cache)
    again = mlx_h2o.load_prompt_cache(tmp_path / "moved.safetensors")
    for token in range(4):
        ids = mx.array([[token]])
        assert mx.allclose(model(ids, cache=cache), model(ids, cache=again), atol=1e-5)


def test_lessons_repeat_the_whole_prompt_and_go_on_from_it(prompt):
    """In turn, so that a few steps see both kinds; the caches stay as they were."""
    model, told = tiny_model("llama"), []
    cache = stock_prompt_cache(model)
    long = mx.concatenate([prompt] * 5, axis=1)
    model(long, cache=cache)
    made = lessons(model, Characters(), long, cache, told.append)
    repeated = [one.tokens[0, one.first + 1 :].tolist() for one in made if one.first]
    assert [token for part in repeated for token in part] == long[0].tolist()
    written = [one.tokens for one in made if not one.first]
    assert len(written) == CONTINUATIONS
    assert all(one.shape == (1, LESSON) for one in written)
    assert len({tuple(one[0].tolist()) for one in written}) == CONTINUATIONS
    assert sum(told) == distillation.tokens_of_work(1) - LESSON
    assert cache[0].offset == 350
    assert [bool(one.first) for one in made][:2] == [True, False]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_what_the_steps_tell_is_their_work(family, prompt):
    """Also beside the model's windows and recurrent states."""
    told = []
    model = tiny_model(family)
    mlx_h2o.compress_prompt(model, Characters(), prompt, "70%", steps=3, tell=told.append)
    assert sum(told) == 2 * 70 + distillation.tokens_of_work(3)
    assert distillation.tokens_of_work(0) == 0


class WithoutGradient:
    """A model's output head behind an operation that MLX cannot differentiate."""

    def __init__(self, head):
        self.head = head

    def __call__(self, x):
        no_gradient = mx.linalg.svd(x[0], compute_uv=False, stream=mx.cpu)
        return self.head(x) + 0 * no_gradient.sum()


def test_a_model_without_gradients_is_refused(prompt):
    model = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head = WithoutGradient(model.lm_head)
    with pytest.raises(ValueError, match=r"without a gradient.*leave steps at 0"):
        mlx_h2o.compress_prompt(model, Characters(), prompt, "60%", steps=1)


def test_several_prompts_and_a_file_of_rows_are_refused(prompt, tmp_path):
    model = tiny_model("llama")
    two = mx.concatenate([prompt, prompt])
    with pytest.raises(ValueError, match="one prompt"):
        mlx_h2o.compress_prompt(model, Characters(), two, "60%", steps=1)
    with pytest.raises(ValueError, match="without spill"):
        mlx_h2o.compress_prompt(model, Characters(), prompt, 10**6, steps=1, spill=tmp_path)


@pytest.mark.parametrize("steps", [-1, 1.5, True, distillation.MOST_STEPS + 1, 10**30])
def test_numbers_of_steps_are_checked(steps, prompt):
    with pytest.raises(ValueError, match="steps"):
        mlx_h2o.compress_prompt(tiny_model("llama"), Characters(), prompt, "60%", steps=steps)
