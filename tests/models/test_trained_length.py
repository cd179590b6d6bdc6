"""Conversations that are longer than what their model was trained for: said where people look."""

import re
import warnings

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_h2o
from mlx_h2o.caches.base import PastTraining
from mlx_h2o.caches.conversation import past_training
from mlx_h2o.chat.dialogue import Dialogue
from mlx_h2o.cli import main
from mlx_h2o.loading.load import EMBEDDED_MODEL
from mlx_h2o.serve.app import PAST_TRAINING
from serving import serving

TRAINED = 2048
ROLLING = {"positions": "rolling", "remainder": False}
LONG = " ".join(["The house stood on the cliff."] * 300)


@pytest.mark.parametrize(("tokens", "settings", "said"), [
    (TRAINED, {}, False), (TRAINED + 1, {}, True), (TRAINED + 1, ROLLING, False),
])  # fmt: skip
def test_it_is_said_from_the_first_token_beyond(embedded, tokens, settings, said):
    model, _ = embedded
    cache = mlx_h2o.make_prompt_cache(model, 64, **settings)
    model(mx.ones((1, tokens), mx.int32), cache=cache)
    found = past_training(model, cache)
    assert (found is not None) == said
    if found is not None:
        assert found.startswith("2,049 tokens are more than the 2,048 ")


def test_what_is_not_bounded_or_not_told_is_left_alone(embedded):
    model, _ = embedded
    plain = stock_prompt_cache(model)
    model(mx.ones((1, TRAINED + 1), mx.int32), cache=plain)
    assert past_training(model, plain) is None
    cache = mlx_h2o.make_prompt_cache(model, 64)
    model(mx.ones((1, TRAINED + 1), mx.int32), cache=cache)
    trained = model.args.max_position_embeddings
    try:
        model.args.max_position_embeddings = None
        assert past_training(model, cache) is None
    finally:
        model.args.max_position_embeddings = trained


@pytest.mark.parametrize("positions", ["absolute", "rolling"])
def test_generate(positions, capsys):
    options = ["--model", EMBEDDED_MODEL, "--prompt", LONG, "--max-kv-size", "64", "-m", "3"]
    assert main(["generate", *options, "--positions", positions]) == 0
    told = capsys.readouterr().err
    assert ("the model was trained for" in told) == (positions == "absolute")


def test_python_is_warned_once_and_told_by_description_and_plan(embedded):
    model, _ = embedded
    cache = mlx_h2o.make_prompt_cache(model, 64)
    model(mx.ones((1, TRAINED), mx.int32), cache=cache)
    assert "trained for" not in str(mlx_h2o.describe(cache))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            model(mx.ones((1, 1), mx.int32), cache=cache)
    (one,) = warned
    assert one.category is PastTraining
    assert re.match('2,049 tokens .* positions="rolling"', str(one.message))
    assert "2,051 tokens are more than the 2,048" in str(mlx_h2o.describe(cache))
    long = mlx_h2o.make_prompt_cache(model, max_bytes="10%", context=9000)
    assert "9,000 tokens are more" in str(mlx_h2o.describe(long))
    assert "3,000 tokens are more" in str(mlx_h2o.plan(model, max_size=64, prompt=3000))
    rolls = mlx_h2o.make_prompt_cache(model, 64, positions="rolling", context=9000)
    assert "trained for" not in str(mlx_h2o.describe(rolls))


def test_what_does_not_go_together_is_refused(capsys):
    options = ["generate", "--model", EMBEDDED_MODEL, "--prompt", "x", "--positions"]
    assert main([*options, "rolling", "--kv-bits", "8"]) != 0
    assert "--positions" in (told := capsys.readouterr().err)
    assert "omit bits" in told
    with pytest.raises(SystemExit):
        main([*options, "relative"])
    assert "absolute, rolling" in capsys.readouterr().err


def test_a_chat_tells(embedded):
    model, tokenizer = embedded
    dialogue = Dialogue(model, tokenizer, lambda: mlx_h2o.make_prompt_cache(model, 64))
    list(dialogue.reply("Who is there?", 3))
    assert dialogue.past_training() is None
    list(dialogue.reply(LONG, 3))
    assert re.match(r"2,\d{3} tokens", dialogue.past_training() or "")
    dialogue.clear()
    assert dialogue.past_training() is None


def test_the_server_tells_once(caplog):
    """In the log; in a header of each answer, streams too; not where a request's positions roll."""
    body = {"model": "default_model", "prompt": LONG, "max_tokens": 2}
    with serving(long_prompts=True) as running:
        create = running.client.completions.with_raw_response.create
        rolling = create(**body, extra_body={"mlx_h2o": ROLLING})
        assert PAST_TRAINING not in rolling.headers
        assert "trained for" not in caplog.text
        for stream in (False, True):
            assert "rolling" in create(**body, stream=stream).headers[PAST_TRAINING]
    assert caplog.text.count("--positions rolling") == 1
