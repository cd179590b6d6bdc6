"""`mlx_h2o generate`: text, report, saving and resuming, on the built-in model."""

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import stream_generate

import mlx_h2o
from mlx_h2o._byte_size import size_text
from mlx_h2o.cli import generate, main
from mlx_h2o.compression import reading
from mlx_h2o.loading.fingerprint import fingerprint, model_metadata
from mlx_h2o.loading.load import SAMPLE_TEXT

# Long enough that a cache of 48 evicts while it is read.
PROMPT = " ".join(SAMPLE_TEXT.read_text(encoding="utf-8").split()[:60])
GENERATE = ["generate", "--model", "builtin:recall-4m"]
SMALL = [*GENERATE, "--prompt", PROMPT, *"--max-kv-size 48 --max-tokens 12 --reading once".split()]


def as_json(options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def generated(embedded: tuple[Any, Any], cache: list[Any], prompt: str) -> tuple[str, list[int]]:
    model, tokenizer = embedded
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=12, prompt_cache=cache))
    return "".join(r.text for r in responses), [r.token for r in responses]


def test_text_is_streamed_and_the_report_closes(embedded, capsys):
    assert main(SMALL) == 0
    printed = capsys.readouterr()
    cache = mlx_h2o.make_prompt_cache(embedded[0], 48)
    text, _ = generated(embedded, cache, PROMPT)
    assert printed.out == text + "\n"
    held = sum(entry.nbytes for entry in cache)
    evicted = round(sum(entry.evicted for entry in cache) / len(cache))
    assert evicted > 0
    assert "tokens/s" in printed.err
    assert f"\n{evicted} of {cache[0].offset} tokens evicted" in printed.err
    memory = mlx_h2o.describe(cache).memory
    assert f"{size_text(held)} now" in memory
    assert f"memory: {memory}, peak while reading " in printed.err


def test_rolling_positions_say_once_that_they_turn_the_remainder_off(capsys):
    rolling = [*SMALL, "--positions", "rolling"]
    assert main(rolling) == 0
    assert capsys.readouterr().err.count("remainder") == 1
    assert main([*rolling, "--policy", "salient:remainder=false"]) == 0
    assert "remainder" not in capsys.readouterr().err


def test_json_reports_the_bytes_really_held(tmp_path, embedded, capsys):
    file = tmp_path / "chat"  # no suffix: the name is taken as it is
    found = as_json([*SMALL, "--save-prompt-cache", str(file)], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["chat"]
    cache = mlx_h2o.make_prompt_cache(embedded[0], 48)
    generated(embedded, cache, PROMPT)
    assert found["kv_bytes"] == sum(entry.nbytes for entry in cache)
    # A file has no room that no token uses yet.
    assert found["kv_bytes"] > sum(entry.nbytes for entry in mlx_h2o.load_prompt_cache(file))
    assert found["kv_bytes"] == sum(layer["nbytes"] for layer in found["layers"])
    assert found["generation_tokens"] == len(found["tokens"]) == 12
    assert found["finish_reason"] == "length"
    assert found["context_tokens"] == found["prompt_tokens"] + 12 == cache[0].offset
    assert found["evicted_tokens"] > 0
    assert found["memory"].startswith("4 of 4 layers bounded, ")


def test_a_resumed_run_continues_as_an_uninterrupted_one(tmp_path, embedded, capsys):
    file = str(tmp_path / "chat.safetensors")
    more = " And then Anne said to Toby that"
    cache = mlx_h2o.make_prompt_cache(embedded[0], 48)
    whole = [generated(embedded, cache, prompt) for prompt in (PROMPT, more)]

    both = ["--prompt-cache-file", file, "--save-prompt-cache", file]
    first = as_json([*SMALL, *both], capsys)
    again = [*GENERATE, "--prompt", more, "--max-tokens", "12"]
    second = as_json([*again, *both], capsys)
    assert [(run["text"], run["tokens"]) for run in (first, second)] == whole
    assert second["kv_bytes"] == sum(entry.nbytes for entry in cache)
    assert second["context_tokens"] == cache[0].offset

    resumed = mlx_h2o.load_prompt_cache(file)
    # As a file has it, without room that no token uses yet.
    mlx_h2o.save_prompt_cache(tmp_path / "whole.safetensors", cache)
    uninterrupted = mlx_h2o.load_prompt_cache(tmp_path / "whole.safetensors")
    for ours, theirs in zip(resumed, uninterrupted, strict=True):
        assert ours.config() == theirs.config()
        for name, array in theirs.arrays().items():
            assert (array == ours.arrays()[name]).all(), name


def test_seeds_make_sampling_reproducible(capsys):
    sampled = [*GENERATE, "-p", "Anne and Toby", "-m", "8", "--temp", "1", "--top-p", "0.95"]
    first, same, other = (
        as_json([*sampled, "--seed", seed], capsys)["tokens"] for seed in ("1", "1", "2")
    )
    assert first == same != other


def test_the_prompt_may_come_from_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    piped = as_json([*GENERATE, "-p", "-", "--max-kv-size", "48", "-m", "12"], capsys)
    assert piped["tokens"] == as_json(SMALL, capsys)["tokens"]


def test_chat_templates_are_applied_once_per_turn(embedded):
    _, tokenizer = mlx_h2o.load("builtin:recall-4m")
    tokenizer._tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer.has_chat_template = True

    def prompted(resumed: bool = False, **changes: Any) -> str:
        args = {"prompt": "a\\nb", "system_prompt": None} | changes
        tokens, _ = generate.prompt_tokens(argparse.Namespace(**args), tokenizer, resumed)
        return str(tokenizer.decode(tokens))

    bos = tokenizer.bos_token
    assert prompted() == bos + "[user]a\nb[assistant]"
    assert prompted(resumed=True) == "[user]a\nb[assistant]"
    assert prompted(system_prompt="c") == bos + "[system]c[user]a\nb[assistant]"


def test_interruption_leaves_no_half_written_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "chat.safetensors"
    options = [*SMALL, "--save-prompt-cache", str(file)]
    assert main(options) == 0
    saved = file.read_bytes()

    def halfway(name: Path, *_: Any) -> None:
        Path(name).write_bytes(saved[:100])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(generate, "save_prompt_cache", halfway)
        assert main(options) == 130

    def stopped(*args: Any, **options: Any) -> Any:
        responses = stream_generate(*args, **options)
        yield from (response for _, response in zip(range(3), responses, strict=False))
        raise KeyboardInterrupt

    monkeypatch.setattr(reading, "stream_generate", stopped)
    assert main(options) == 130
    assert capsys.readouterr().err.endswith("stopped\n")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == saved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--temp", "-1"], "must not be negative"),
        (["--top-p", "0"], "--top-p must be above 0"),
        (["--prompt", ""], "The prompt is empty"),
        (["--system-prompt", "Be brief."], "needs the model's chat template"),
        (["--max-kv-size", "6", "--profile", "uniform"], "make --max-kv-size at least 8"),
        (["--model", "builtin:nothing"], "There is no builtin:nothing"),
        (["--save-prompt-cache", "no/such/folder/chat"], "there is no folder"),
    ],
)
def test_bad_options_say_what_to_do(options, message, capsys):
    assert main([*GENERATE, "--prompt", "Anne", *options]) == 2
    assert message in capsys.readouterr().err


def test_two_sizes_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main([*GENERATE, "--max-kv-size", "64", "--kv-memory", "100000"])
    assert stop.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_foreign_prompt_caches_are_refused(tmp_path, embedded, capsys):
    file = tmp_path / "chat.safetensors"
    resume = [*GENERATE, "--prompt", "Anne", "--prompt-cache-file", str(file)]
    file.write_bytes(b"not a cache")
    assert main(resume) == 2
    assert "no readable prompt cache" in capsys.readouterr().err

    cache = mlx_h2o.make_prompt_cache(embedded[0], 48)
    mlx_h2o.save_prompt_cache(file, cache, {"model": "another"})
    assert main(resume) == 2
    assert "was saved with --model another" in capsys.readouterr().err

    # The same name at another place may be another model: its weights decide.
    about = model_metadata("builtin:recall-4m", fingerprint(*embedded))
    mlx_h2o.save_prompt_cache(file, cache, about | {"fingerprint": "0"})
    assert main(resume) == 2
    assert "another model of the name builtin:recall-4m" in capsys.readouterr().err
    mlx_h2o.save_prompt_cache(file, cache, about | {"model": "where it lay before"})
    assert main([*resume, "-m", "2"]) == 0
    capsys.readouterr()

    mlx_h2o.save_prompt_cache(file, cache[:2])
    assert main(resume) == 2
    assert "is of another model" in capsys.readouterr().err
