"""Kernels prove themselves before they are used: broken ones are caught, and nothing changes."""

import json
import os
import subprocess
import warnings

import mlx.core as mx
import numpy as np
import pytest
from broken import BROKEN, gpu_of

from mlx_h2o import H2OKVCache, describe, make_policy, make_prompt_cache
from mlx_h2o.attention.backends import choice, reference
from mlx_h2o.attention.backends.gpu_decoder import GPUDecoder
from mlx_h2o.attention.backends.verification import compared, verdicts
from mlx_h2o.attention.backends.verification.compared import Error, Pair, Tolerance
from mlx_h2o.attention.ops import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_scores,
)
from mlx_h2o.cli import main
from mlx_h2o.doctor import examination, variants
from tiny_models import greedy_tokens, prompt_tokens, tiny_model

HELD = Error(0.5, "output differs by little")


@pytest.fixture(autouse=True)
def once(monkeypatch):
    monkeypatch.setenv("MLX_H2O_VERIFY", "once")


@pytest.fixture
def on_gpu(monkeypatch):
    """Has everything computed as on a machine whose default device is this GPU."""

    def choose(gpu):
        monkeypatch.setattr(choice, "gpu", lambda: None if choice._reference_only else gpu)
        monkeypatch.setattr(choice, "cpu", lambda: None)
        monkeypatch.setattr("mlx_h2o.attention.ops.backend", lambda: choice.gpu() or reference)
        return gpu

    return choose


@pytest.fixture
def model():
    return tiny_model("qwen3", head_dim=32)


def conversation(model, **store):
    """Greedy tokens, in more slots than a threadgroup reads in one go, and the caches."""
    cache = make_prompt_cache(model, budgets=[[40, 560]] * 2, policy="h2o", **store)
    return greedy_tokens(model, cache, prompt_tokens(570), 12, chunk=570), cache


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_not_used(name, on_gpu, model, tmp_path):
    """It is caught, told once with the command, and the conversation is the definition's."""
    changes, why = BROKEN[name]
    with choice.only_reference():
        expected, _ = conversation(model)
    gpu = on_gpu(gpu_of(tmp_path, changes))
    with pytest.warns(RuntimeWarning, match="mlx_h2o doctor") as told:
        tokens, caches = conversation(model)
    assert tokens == expected
    assert len(told) == 1
    assert all(cache.layer.memory.decoder is None for cache in caches)
    fused = [verdict for verdict in gpu.verdicts.refused if "fused" in verdict.variant]
    assert [why in verdict.why for verdict in fused] == [True]
    line = str(describe(caches)).splitlines()[-1]
    assert "kernels NOT used" in line
    assert "mlx_h2o doctor" in line


@pytest.mark.parametrize("name", [name for name in BROKEN if "best" not in name])
def test_a_broken_kernel_of_attention_is_not_used_by_operations(name, on_gpu, tmp_path):
    changes, why = BROKEN[name]
    gpu = on_gpu(gpu_of(tmp_path, changes))
    q, k, v = (mx.random.normal((1, heads, 1 if heads > 2 else 600, 64)) for heads in (4, 2, 2))
    with pytest.warns(RuntimeWarning, match="with scores of float32"):
        ours = scaled_dot_product_attention_with_scores(q, k, v, scale=0.125)
    assert why in gpu.verdicts.refused[0].why
    for mine, theirs in zip(
        ours, reference.attention_with_scores(q, k, v, scale=0.125), strict=True
    ):
        assert mx.array_equal(mine, theirs)


def test_doctor_asks_anew_and_keeps_the_verdict(on_gpu, monkeypatch, tmp_path, capsys):
    """Its exit code is 1 while a kernel is broken, and 0 once it is mended."""
    sound = list(variants.attention_variants())
    chosen = next(v for v in sound if v.queries == 1 and v.widths == (64, 64))
    check = variants.Check(str(chosen), lambda: variants._attention(chosen))
    monkeypatch.setattr(examination, "every_check", lambda: [check])
    command = ["doctor", "--parts", "kernels"]
    broken = on_gpu(gpu_of(tmp_path, BROKEN["a wrong scale"][0]))
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "on applegpu_g13g; checked once" in said
    assert f"FAILED: kernel variants beside the definition: {chosen}: " in said
    assert [verdict.variant for verdict in broken.verdicts.refused] == [str(chosen)]
    on_gpu(gpu_of(tmp_path))
    assert main(command) == 0


def test_what_is_not_broken_is_used(on_gpu, model, tmp_path):
    on_gpu(gpu_of(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens, caches = conversation(model)
    assert all(isinstance(cache.layer.memory.decoder, GPUDecoder) for cache in caches)
    assert "NOT used" not in str(describe(caches))
    with choice.only_reference():
        assert tokens == conversation(model)[0]


def test_only_what_is_broken_is_left_out(on_gpu, tmp_path):
    """A fused step whose update is broken leaves attention to its kernel."""
    gpu = on_gpu(gpu_of(tmp_path, BROKEN["the best goes first"][0]))
    cache = H2OKVCache(budgets=[16, 24], policy=make_policy("h2o"))
    k = mx.random.normal((1, 2, 1, 64))
    cache.attend(k, *cache.update_and_fetch(k, k), scale=0.125)
    with pytest.warns(RuntimeWarning, match="a fused step"):
        mx.eval(cache.attend(k, *cache.update_and_fetch(k, k), scale=0.125))
    held = {verdict.variant.partition(" of ")[0]: verdict.held for verdict in gpu.verdicts.all}
    assert held == {"a fused step": False, "attention with mass": True}


def counting(found=HELD):
    """A check that counts its runs."""

    def check():
        check.runs += 1
        return found

    check.runs = 0
    return check


def usable(folder, check, changes=None, variant="a variant", name="applegpu_g13g"):
    """As a new process would find it."""
    gpu = gpu_of(folder, changes, name)
    found = gpu.verdicts.usable(variant, ("attention_vector",), check)
    assert gpu.verdicts.usable(variant, ("attention_vector",), check) == found
    return found


def test_a_verdict_is_kept_for_its_device_text_and_variant(tmp_path):
    check = counting()
    assert all(usable(tmp_path, check) for _ in range(3))
    assert check.runs == 1
    assert usable(tmp_path, check, BROKEN["a wrong scale"][0])
    assert usable(tmp_path, check, variant="another")
    assert usable(tmp_path, check, name="applegpu_g14g")
    assert check.runs == 4


def test_a_verdict_is_kept_for_its_system_and_mlx(tmp_path, monkeypatch):
    check = counting()
    for name, value in (("version", lambda _: "9.9"), ("_system", lambda: "another")):
        usable(tmp_path, check)
        monkeypatch.setattr(verdicts, name, value)
    usable(tmp_path, check)
    assert check.runs == 3


def test_a_bad_verdict_is_kept_too(tmp_path):
    check = counting(Error(3.0, "output differs by much"))
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="output differs by much"):
            assert not usable(tmp_path, check)
    assert check.runs == 1
    refused = gpu_of(tmp_path).verdicts.refused
    assert [(verdict.variant, verdict.error) for verdict in refused] == [("a variant", 3.0)]
    assert gpu_of(tmp_path, name="another").verdicts.refused == []


def test_when_kernels_are_checked(tmp_path, monkeypatch):
    bad = counting(Error(3.0, "output differs by much"))
    monkeypatch.setenv("MLX_H2O_VERIFY", "never")
    assert usable(tmp_path, bad)
    assert bad.runs == 0
    monkeypatch.setenv("MLX_H2O_VERIFY", "always")
    check = counting()
    assert usable(tmp_path, check)
    assert usable(tmp_path, check)
    assert check.runs == 2
    monkeypatch.setenv("MLX_H2O_VERIFY", "sometimes")
    message = "MLX_H2O_VERIFY must be one of always, once, never; got 'sometimes'"
    with pytest.raises(ValueError, match=message):
        usable(tmp_path, check)


def test_a_kernel_that_took_a_process_down_is_not_tried_again(tmp_path):
    """A check that is broken off, or runs in another process, is."""
    check = counting()
    usable(tmp_path, check)
    (path,) = tmp_path.glob("*.json")
    ended = subprocess.Popen(["true"])
    ended.wait()
    kept = {"variant": "a variant", "kernels": ["attention_vector"], "checking": ended.pid}
    path.write_text(json.dumps(kept))
    with pytest.warns(RuntimeWarning, match="a process ended while it was checked"):
        assert not usable(tmp_path, check)
    assert check.runs == 1
    path.write_text(json.dumps(kept | {"checking": os.getppid()}))
    assert usable(tmp_path, check)
    assert check.runs == 2

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        usable(tmp_path, interrupted, variant="another")
    assert usable(tmp_path, check, variant="another")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"held": 1}', '{"checking": "x"}'])
def test_a_damaged_file_is_no_verdict(text, tmp_path):
    check = counting()
    usable(tmp_path, check)
    next(tmp_path.glob("*.json")).write_text(text)
    assert usable(tmp_path, check)
    assert check.runs == 2


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    check = counting()
    assert usable(tmp_path / "file" / "verdicts", check)
    assert usable(tmp_path / "file" / "verdicts", check)
    assert check.runs == 2


def test_a_check_leaves_the_user_alone(on_gpu, tmp_path):
    """It draws no random numbers and evaluates nothing that waits to be evaluated."""
    gpu = on_gpu(gpu_of(tmp_path))
    large = mx.random.normal((64, 1024, 1024))
    numbers = [np.array(state) for state in mx.random.state]
    before = mx.get_active_memory()
    q, k, v = (mx.zeros((1, heads, 8, 32)) for heads in (4, 2, 2))
    scaled_dot_product_attention_with_scores(q, k, v, scale=1.0)
    assert len(gpu.verdicts.all) == 1
    assert mx.get_active_memory() - before < large.nbytes / 4
    assert all(map(np.array_equal, numbers, mx.random.state))
    assert mx.default_device() == mx.Device(mx.cpu)


def test_within_a_transformation_nothing_is_decided(on_gpu, tmp_path):
    gpu = on_gpu(gpu_of(tmp_path))
    q, k, v = (mx.random.normal((1, 2, 40, 32)) for _ in range(3))

    def attend(q):
        return scaled_dot_product_attention_with_scores(q, k, v, scale=0.2)[0]

    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2)
    assert mx.allclose(mx.compile(attend)(q[:, :, :8]), expected[:, :, :8], atol=1e-5)
    assert gpu.verdicts.all == []


def test_plain_rows_need_no_verdict(on_gpu, tmp_path):
    """Over them MLX's own attention is used."""
    gpu = on_gpu(gpu_of(tmp_path))
    q = mx.zeros((1, 2, 4, 32))
    scaled_dot_product_attention(q, q, q, scale=1.0)
    assert gpu.verdicts.all == []


@pytest.mark.parametrize(
    ("found", "expected", "size"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.4], [1.0, 2.0], 0.4 / 0.3),
        ([1.0, -np.inf], [1.0, -np.inf], 0.0),
        ([1.0, np.inf], [1.0, -np.inf], np.inf),
        ([1.0, 2.0], [1.0, -np.inf], np.inf),
        ([np.nan, 2.0], [np.nan, 2.0], np.inf),
        ([[1.0, 2.0]], [1.0, 2.0], np.inf),
    ],
)
def test_errors_in_units_of_what_is_tolerated(found, expected, size):
    pair = Pair(mx.array(found), mx.array(expected), Tolerance(0.1, 0.1))
    error = compared.error("output", pair)
    assert error.size == pytest.approx(size)
    assert error.held == (size <= 1)


SOUND = mx.fast.scaled_dot_product_attention


def two_passes_are_wrong(q, k, v, **options):
    """As on the M3 Max of mlx#4022: from 1,024 keys what few queries get is nothing."""
    out = SOUND(q, k, v, **options)
    return mx.zeros_like(out) if q.shape[2] <= 8 and k.shape[2] >= 1024 else out


def every_sequence_is_the_first(q, k, v, **options):
    """As in MLX 0.32.2 (mlx#4431): eight query heads share a KV head, over many keys."""
    if q.shape[2] == 1 and q.shape[1] == 8 * k.shape[1] and k.shape[2] >= 8192:
        k, v = (mx.broadcast_to(rows[:1], rows.shape) for rows in (k, v))
    return SOUND(q, k, v, **options)


def few_queries(batch, group, keys, width):
    shapes = (batch, group, 1, width), *[(batch, 1, keys, width)] * 2
    return [mx.random.normal(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("fault", "shape"),
    [
        (two_passes_are_wrong, (1, 4, 1040, 48)),
        (two_passes_are_wrong, (1, 4, 1040, 64)),
        (every_sequence_is_the_first, (2, 8, 8200, 48)),
    ],
)
def test_mlx_attention_that_is_wrong_is_not_used(fault, shape, on_gpu, monkeypatch, tmp_path):
    """Our kernel does its work where there is one (64 wide), the definition elsewhere."""
    q, k, v = few_queries(*shape)
    expected = reference.attention_with_scores(q, k, v, scale=0.125)[0]
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fault)
    gpu = on_gpu(gpu_of(tmp_path))
    with pytest.warns(RuntimeWarning, match="MLX's attention of float32 over many keys"):
        found = scaled_dot_product_attention(q, k, v, scale=0.125)
    assert compared.error("output", Pair(found, expected, compared.OUT[mx.float32])).held
    used = {verdict.variant[:13]: verdict.held for verdict in gpu.verdicts.all}
    ours = {"attention of ": True} if shape[3] == 64 else {}
    assert used == {"MLX's attenti": False, **ours}


def test_mlx_attention_that_is_right_is_used(on_gpu, tmp_path):
    gpu = on_gpu(gpu_of(tmp_path))
    for shape in ((1, 4, 1000, 64), (1, 4, 1040, 64), (2, 8, 8200, 64)):
        q, k, v = few_queries(*shape)
        ours = scaled_dot_product_attention(q, k, v, scale=0.125)
        assert mx.array_equal(ours, SOUND(q, k, v, scale=0.125))
    assert [verdict.held for verdict in gpu.verdicts.all] == [True, True]
