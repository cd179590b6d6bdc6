"""`generate --image`: mlx-vlm's own tokens while there is room, and bounded memory beyond."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed here")

from mlx_vlm import generate, load
from mlx_vlm.prompt_utils import apply_chat_template
from PIL import Image

from mlx_h2o.cli import main
from mlx_h2o.loading.load import EMBEDDED_MODEL, MODELS
from vlm_folder import write_vlm_folder

PROMPT, COUNT = "What is in the two pictures?", 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Qwen2-VL, and two images."""
    made = tmp_path_factory.mktemp("qwen2_vl")
    write_vlm_folder(made)
    for name, seed in (("a.png", 0), ("b.png", 1)):
        pixels = np.random.default_rng(seed).integers(0, 256, (112, 84, 3), np.uint8)
        Image.fromarray(pixels).save(made / name)
    return made


def asked(folder: Path, *options: str) -> list[str]:
    images = [option for name in ("a.png", "b.png") for option in ("--image", str(folder / name))]
    given = ["--model", str(folder), "--prompt", PROMPT, "--max-tokens", str(COUNT), *options]
    return ["generate", *given, *images]


def report(capsys: Any, arguments: list[str]) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_the_text_is_mlx_vlms_while_there_is_room(folder, capsys):
    ours = report(capsys, asked(folder, "--max-kv-size", "300"))
    model, processor = load(str(folder))
    text = apply_chat_template(processor, model.config, PROMPT, num_images=2)
    images = [str(folder / name) for name in ("a.png", "b.png")]
    own = generate(model, processor, text, image=images, max_tokens=COUNT, temperature=0.0)
    assert ours["text"] == own.text
    assert ours["prompt_tokens"] == own.prompt_tokens > len(PROMPT) + 2 * 4
    assert ours["evicted_tokens"] == 0


def test_memory_is_bounded_beyond_and_the_report_says_what_is_measured(folder, capsys):
    small = report(capsys, asked(folder, "--max-kv-size", "32"))
    assert small["generation_tokens"] == COUNT
    assert small["context_tokens"] == small["prompt_tokens"] + COUNT
    assert small["evicted_tokens"] > 0
    assert small["kv_bytes"] == sum(layer["nbytes"] for layer in small["layers"])
    assert small["memory"].startswith("2 of 2 layers bounded, ")
    assert "at most" in small["memory"]
    assert "peak while reading" in small["memory"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image", "nowhere.png"], "there is no file nowhere.png"),
        (["--pin", "two"], "--pin cannot be used with --image"),
        (["--reading", "twice"], "--reading twice cannot be used with --image"),
        (["--save-prompt-cache", "cache"], "--save-prompt-cache cannot be used with --image"),
    ],
)
def test_what_images_exclude_is_refused(folder, options, message, capsys):
    assert main(asked(folder, *options)) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (str(MODELS / "recall-4m"), "sees no images"),
        (EMBEDDED_MODEL, f"needs a model of mlx-vlm, and {EMBEDDED_MODEL} is none"),
    ],
)
def test_a_model_that_sees_no_images_is_refused(folder, model, message, capsys):
    assert main(asked(folder, "--model", model)) != 0
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
