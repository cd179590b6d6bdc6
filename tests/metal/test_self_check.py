"""Kernels prove themselves before they are used: broken ones are caught, and nothing changes."""

import warnings

import mlx.core as mx
import numpy as np
import pytest
from broken import BROKEN, harness_gpu

from mlx_h2o import H2OKVCache, describe, make_policy, make_prompt_cache
from mlx_h2o.attention.backends import choice, reference
from mlx_h2o.attention.backends.gpu_decoder import GPUDecoder
from mlx_h2o.attention.backends.self_check import OUT, Error, Pair, SelfCheck, Tolerance, error
from mlx_h2o.attention.ops import (
    scaled_dot_product_attention,
    scaled_dot_product_attention_with_scores,
)
from mlx_h2o.cli import main
from mlx_h2o.doctor import examination, variants
from tiny_models import greedy_tokens, prompt_tokens, tiny_model

SMALL = Error(0.5, "output differs by little")
SECTION = examination.Section("nothing", [{"a": 1}])


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
def test_a_broken_kernel_is_not_used(name, on_gpu, model):
    """It is caught, told once with the command, and the conversation is the definition's."""
    changes, why = BROKEN[name]
    with choice.only_reference():
        expected, _ = conversation(model)
    gpu = on_gpu(harness_gpu(changes))
    with pytest.warns(RuntimeWarning, match="mlx_h2o doctor") as told:
        tokens, caches = conversation(model)
    assert tokens == expected
    assert len(told) == 1
    assert all(cache.layer.decoder is None for cache in caches)
    fused = [verdict for verdict in gpu.self_check.refused if "fused" in verdict.variant]
    assert [why in verdict.why for verdict in fused] == [True]
    line = str(describe(caches)).splitlines()[-1]
    assert "kernels NOT used" in line
    assert "mlx_h2o doctor" in line


@pytest.mark.parametrize("name", [name for name in BROKEN if "best" not in name])
def test_a_broken_kernel_of_attention_is_not_used_by_operations(name, on_gpu):
    changes, why = BROKEN[name]
    gpu = on_gpu(harness_gpu(changes))
    q, k, v = (mx.random.normal((1, heads, 1 if heads > 2 else 600, 64)) for heads in (4, 2, 2))
    with pytest.warns(RuntimeWarning, match="with scores of float32"):
        ours = scaled_dot_product_attention_with_scores(q, k, v, scale=0.125)
    assert why in gpu.self_check.refused[0].why
    for mine, theirs in zip(
        ours, reference.attention_with_scores(q, k, v, scale=0.125), strict=True
    ):
        assert mx.array_equal(mine, theirs)


def test_doctor_checks_again_and_remembers_the_verdict(on_gpu, monkeypatch, capsys):
    """Its exit code is 1 while a kernel is broken, and 0 once it is mended."""
    chosen = next(
        check
        for check in variants.every_check()
        if getattr(check.variant, "queries", 0) == 1 and check.variant.widths == (64, 64)
    )
    monkeypatch.setattr(examination, "every_check", lambda: [chosen])
    for part in ("conversation", "memory"):
        monkeypatch.setattr(examination, f"{part}_section", lambda *_: SECTION)
    broken = on_gpu(harness_gpu(BROKEN["a wrong scale"][0]))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "on applegpu_g13g; checked once" in printed
    assert f"FAILED: kernel variants beside the definition: {chosen.variant}: " in printed
    assert [verdict.variant for verdict in broken.self_check.refused] == [str(chosen.variant)]
    on_gpu(harness_gpu())
    assert main(["doctor"]) == 0


def test_what_is_not_broken_is_used(on_gpu, model):
    on_gpu(harness_gpu())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens, caches = conversation(model)
    assert all(isinstance(cache.layer.decoder, GPUDecoder) for cache in caches)
    assert "NOT used" not in str(describe(caches))
    with choice.only_reference():
        assert tokens == conversation(model)[0]


def test_only_what_is_broken_is_left_out(on_gpu):
    """A fused step whose update is broken leaves attention to its kernel."""
    gpu = on_gpu(harness_gpu(BROKEN["the best goes first"][0]))
    cache = H2OKVCache(budgets=[16, 24], policy=make_policy("h2o"))
    k = mx.random.normal((1, 2, 1, 64))
    cache.attend(k, *cache.update_and_fetch(k, k), scale=0.125)
    with pytest.warns(RuntimeWarning, match="a fused step"):
        mx.eval(cache.attend(k, *cache.update_and_fetch(k, k), scale=0.125))
    usable = {v.variant.partition(" of ")[0]: v.usable for v in gpu.self_check.verdicts}
    assert usable == {"a fused step": False, "attention with mass": True}


def counting(found=SMALL):
    """A check that counts its runs."""

    def check():
        check.runs += 1
        return found

    check.runs = 0
    return check


def test_a_variant_is_checked_once_a_process():
    check, checks = counting(), SelfCheck(lambda: "a GPU")
    assert all(checks.usable("a variant", check) for _ in range(3))
    assert check.runs == 1
    assert checks.usable("another", check)
    assert check.runs == 2
    assert [verdict.variant for verdict in checks.verdicts] == ["a variant", "another"]


def test_a_refused_variant_is_not_checked_again():
    check, checks = counting(Error(3.0, "output differs by much")), SelfCheck(lambda: "a GPU")
    with pytest.warns(RuntimeWarning, match=r"\(a GPU\): a variant: output differs by much"):
        assert not checks.usable("a variant", check)
    with warnings.catch_warnings():  # one warning a process
        warnings.simplefilter("error")
        assert not checks.usable("a variant", check)
        assert not checks.usable("another", check)
    assert check.runs == 2
    assert [(verdict.variant, verdict.error) for verdict in checks.refused] == [
        ("a variant", 3.0),
        ("another", 3.0),
    ]


def test_when_kernels_are_checked(monkeypatch):
    bad = counting(Error(3.0, "output differs by much"))
    monkeypatch.setenv("MLX_H2O_VERIFY", "never")
    assert SelfCheck(lambda: "a GPU").usable("a variant", bad)
    assert bad.runs == 0
    for value in ("sometimes", "always"):
        monkeypatch.setenv("MLX_H2O_VERIFY", value)
        message = f"MLX_H2O_VERIFY must be once or never; got '{value}'"
        with pytest.raises(ValueError, match=message):
            SelfCheck(lambda: "a GPU").usable("a variant", bad)


def test_an_interrupted_check_gives_no_verdict():
    def interrupted():
        raise KeyboardInterrupt

    check, checks = counting(), SelfCheck(lambda: "a GPU")
    with pytest.raises(KeyboardInterrupt):
        checks.usable("a variant", interrupted)
    assert checks.verdicts == []
    assert checks.usable("a variant", check)
    assert check.runs == 1


def test_a_check_leaves_the_user_alone(on_gpu):
    """It draws no random numbers and evaluates nothing that waits to be evaluated."""
    gpu = on_gpu(harness_gpu())
    large = mx.random.normal((64, 1024, 1024))
    numbers = [np.array(state) for state in mx.random.state]
    before = mx.get_active_memory()
    q, k, v = (mx.zeros((1, heads, 8, 32)) for heads in (4, 2, 2))
    scaled_dot_product_attention_with_scores(q, k, v, scale=1.0)
    assert len(gpu.self_check.verdicts) == 1
    assert mx.get_active_memory() - before < large.nbytes / 4
    assert all(map(np.array_equal, numbers, mx.random.state))
    assert mx.default_device() == mx.Device(mx.cpu)


def test_within_a_transformation_nothing_is_decided(on_gpu):
    gpu = on_gpu(harness_gpu())
    q, k, v = (mx.random.normal((1, 2, 40, 32)) for _ in range(3))

    def attend(q):
        return scaled_dot_product_attention_with_scores(q, k, v, scale=0.2)[0]

    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2)
    assert mx.allclose(mx.compile(attend)(q[:, :, :8]), expected[:, :, :8], atol=1e-5)
    assert gpu.self_check.verdicts == []


def test_plain_rows_need_no_verdict(on_gpu):
    """Over them MLX's own attention is used."""
    gpu = on_gpu(harness_gpu())
    q = mx.zeros((1, 2, 4, 32))
    scaled_dot_product_attention(q, q, q, scale=1.0)
    assert gpu.self_check.verdicts == []


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
    largest = error("output", pair)
    assert largest.size == pytest.approx(size)
    assert largest.tolerable == (size <= 1)


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
def test_mlx_attention_that_is_wrong_is_not_used(fault, shape, on_gpu, monkeypatch):
    """Our kernel does its work where there is one (64 wide), the definition elsewhere."""
    q, k, v = few_queries(*shape)
    expected = reference.attention_with_scores(q, k, v, scale=0.125)[0]
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fault)
    gpu = on_gpu(harness_gpu())
    with pytest.warns(RuntimeWarning, match="MLX's attention of float32"):
        found = scaled_dot_product_attention(q, k, v, scale=0.125)
    assert error("output", Pair(found, expected, OUT[mx.float32])).tolerable
    used = {verdict.variant[:13]: verdict.usable for verdict in gpu.self_check.verdicts}
    ours = {"attention of ": True} if shape[3] == 64 else {}
    assert used == {"MLX's attenti": False, **ours}


def test_mlx_attention_that_is_right_is_used(on_gpu):
    gpu = on_gpu(harness_gpu())
    for shape in ((1, 4, 1000, 64), (1, 4, 1040, 64), (2, 8, 8200, 64)):
        q, k, v = few_queries(*shape)
        ours = scaled_dot_product_attention(q, k, v, scale=0.125)
        assert mx.array_equal(ours, SOUND(q, k, v, scale=0.125))
    assert [verdict.usable for verdict in gpu.self_check.verdicts] == [True, True]
