"""Folders of mlx-vlm's models: `load` and the commands, for text."""

import io
import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed here")

from mlx.utils import tree_flatten

import mlx_h2o
from mlx_h2o.cli import main
from mlx_h2o.hosts.loaded import host_of
from mlx_h2o.loading.load import CALIBRATION_TEXT, MODELS
from mlx_h2o.loading.vlm_text import TextModel
from tiny_models import prompt_tokens, with_random_weights
from vlm_models import vlm_model, whole_vlm_model

# mlx-lm knows neither.
NAMES = ["dots_ocr", "idefics3"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request, tmp_path_factory) -> Path:
    """A tiny model of random weights, with the embedded model's tokenizer."""
    made = tmp_path_factory.mktemp(request.param)
    for file in (MODELS / "recall-4m").glob("tokenizer*"):
        shutil.copy(file, made)
    model, config = whole_vlm_model(request.param, vocab_size=4096)
    weights = dict(tree_flatten(with_random_weights(model).parameters()))
    mx.save_safetensors(str(made / "model.safetensors"), weights, {"format": "mlx"})
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_a_folder_is_loaded_for_text_and_its_caches_are_bounded(folder):
    model, tokenizer = mlx_h2o.load(str(folder))
    assert host_of(model).name == "mlx-vlm"
    tokens = mx.array([tokenizer.encode(CALIBRATION_TEXT.read_text()[:800])])
    cache = mlx_h2o.make_prompt_cache(model, max_size=48)
    logits = model(tokens, cache=cache)
    assert logits.shape == (1, tokens.shape[1], 4096)
    assert all(entry.size() <= 48 < tokens.shape[1] for entry in cache)


def test_mrope_positions_of_text_are_those_of_its_tokens_whatever_was_read_before():
    model = TextModel(vlm_model("qwen2_vl"))
    tokens = mx.array([prompt_tokens(20)])
    whole = model(tokens, cache=model.make_cache())
    for batch in (3, 1):
        cache, rows = model.make_cache(), mx.repeat(tokens, batch, 0)
        parts = [model(rows[:, :12], cache=cache)]
        model(tokens[:, :5], cache=model.make_cache())  # another conversation in between
        parts.append(model(rows[:, 12:], cache=cache))
        assert mx.allclose(mx.concatenate(parts, 1)[-1], whole[0], atol=1e-4)


# Of the twelve cases these seven have all commands, and both folders.
@pytest.mark.few(7)
@pytest.mark.parametrize(
    "command",
    [
        ["describe"],
        ["generate", "--prompt", "Anne and Toby", "--max-tokens", "4"],
        ["chat", "--max-tokens", "4"],
        ["plan", "--prompt", "300"],
        ["compress", "{text}", "--to", "30%", "--out", "{out}"],
        ["calibrate", "--text", "{text}", "--out", "{out}"],
    ],
    ids=lambda command: command[0],
)
def test_commands_take_such_a_folder(folder, command, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text(CALIBRATION_TEXT.read_text()[:700])
    paths = {"text": text, "out": tmp_path / "out.safetensors"}
    options = [option.format(**paths) for option in command[1:]]
    monkeypatch.setattr("sys.stdin", io.StringIO("Anne went home.\n"))
    assert main([command[0], "--model", str(folder), *options]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_what_neither_library_supports_is_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros(1)})
    assert main(["describe", "--model", str(tmp_path)]) != 0
    error = capsys.readouterr().err.strip()
    assert "nothing not supported" in error
    assert "\n" not in error
