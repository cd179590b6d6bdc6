"""What of a list of caches is told in five lines, and what in all."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

import mlx_h2o
from mlx_h2o._byte_size import size_text
from mlx_h2o.caches.peak import PeakMemory
from mlx_h2o.cli import main
from mlx_h2o.hosts.loaded import logits_of
from model_coverage import coverage_model
from tiny_models import prompt_tokens

DESCRIBE = ["describe", "--model", "builtin:recall-4m"]


def test_a_description_prints_five_lines_at_most_and_tells_each_layer():
    caches = [mlx_h2o.H2OKVCache(24 + 8 * (i % 2)) for i in range(30)]
    caches += [mlx_h2o.H2OKVCache(24, policy="h2o"), RotatingKVCache(64), RotatingKVCache(32)]
    caches += [KVCache(), KVCache()]
    described = mlx_h2o.describe(caches)
    assert len(described) == 35
    lines = str(described).splitlines()
    assert len(lines) <= 5
    assert lines[0] == (
        "31 of 35 layers bounded (1 with a sliding window of 64 tokens, 1 with a sliding window of "
        "32 tokens, 2 with a KVCache that may grow), no bound for all, 0 bytes now"
    )
    assert lines[1].startswith("layers 0 to 29: H2OKVCache, 24 to 32 slots a KV head")
    assert lines[-2] == "2 other layers of 2 kinds"
    assert lines[-1].startswith("NOT bounded: layers 33 to 34: ")
    assert str(described[31]).startswith("layer 31: RotatingKVCache, bounded: ")


def test_the_command_tells_a_summary_or_all(capsys):
    assert main([*DESCRIBE, "--kv-memory", "25%"]) == 0
    summary = capsys.readouterr().out.splitlines()
    assert summary[0].startswith("4 of 4 layers bounded, ")
    assert summary[0].endswith(" MB at most, 4.1 kB now")
    assert summary[1].startswith("layers 0 to 3: H2OKVCache, ")
    assert summary[2].startswith("chosen by the profile: ")
    assert len(summary) == 3
    assert main([*DESCRIBE, "--kv-memory", "25%", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main([*DESCRIBE, "--json"]) == 0
    assert [layer["bounded"] for layer in json.loads(capsys.readouterr().out)] == [True] * 4


def vlm(name: str) -> nn.Module:
    """The language model of a module of mlx-vlm."""
    pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed here")
    from vlm_models import vlm_model

    return vlm_model(name)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("of", "name"),
    [
        *[(coverage_model, name) for name in ("llama", "gemma3_text", "qwen3_next")],
        *[(vlm, name) for name in ("qwen2_vl", "gemma3", "qwen3_5", "llama4", "zaya1_vl")],
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_line_about_memory_says_what_is_measured(of, name, batch):
    """Windows, chunks and states beside ours count too, and every sequence of a batch."""
    model = of(name)
    cache, reading = mlx_h2o.make_prompt_cache(model, 24), PeakMemory()
    mx.eval(logits_of(model, mx.array([prompt_tokens(90)] * batch), cache))
    mx.eval([entry.state for entry in cache])
    described = mlx_h2o.describe(cache, reading.most)
    nbytes = sum(entry.nbytes for entry in cache)
    assert f"{size_text(nbytes)} now, peak while reading" in described.memory
    assert described.peak >= nbytes
    most = described.most
    for token in range(40):
        logits_of(model, mx.array([[token]] * batch), cache)
        mx.eval([entry.state for entry in cache])
        if token > 8:  # a window is cut at the steps after its prompt
            assert 0.9 * most < sum(entry.nbytes for entry in cache) <= most


def test_a_batch_of_sequences_is_bounded(embedded):
    cache = mlx_h2o.make_prompt_cache(embedded[0], 48)
    merged = [type(entry).merge([entry, entry]) for entry in cache]
    described = mlx_h2o.describe(merged)
    assert all(layer.bounded for layer in described)
    assert described.most == 2 * mlx_h2o.describe(cache).most


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (999_600, "1.0 MB"),
     (7_654_321, "7.7 MB"), (99_960_000, "100 MB"), (10**16, "10000 TB")],
)  # fmt: skip
def test_sizes_are_written_as_people_read_them(nbytes, text):
    assert size_text(nbytes) == text
