"""Without its extension the package works, says once why it is slow, and gives the same results."""

import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

import mlx_h2o
from mlx_h2o import H2OKVCache, _ext, scaled_dot_product_attention_with_scores
from mlx_h2o.attention import backends
from mlx_h2o.attention.backends import choice, cpu, reference
from tiny_models import TinyLayer


def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mlx_h2o, "_ext", raising=False)
    monkeypatch.setitem(sys.modules, "mlx_h2o._ext", None)


def of_another_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ext, "built_for_mlx", "0.1.2")


def of_another_nanobind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no call understands MLX's arrays."""

    def stranger(*args: object, **kwargs: object) -> None:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(_ext, "Stored", stranger)


BROKEN = {
    missing: "the extension mlx_h2o._ext cannot be loaded",
    of_another_mlx: "the extension was built for MLX 0.1.2",
    of_another_nanobind: "the extension and MLX were built with different nanobinds",
}


@pytest.fixture
def fresh_choice(monkeypatch) -> Iterator[None]:
    """As if the kernels had not been asked for yet."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    choice.cpu.cache_clear()
    monkeypatch.delitem(sys.modules, "mlx_h2o.attention.backends.cpu")
    monkeypatch.delattr(backends, "cpu")
    yield
    choice.cpu.cache_clear()
    mx.set_default_device(before)


def a_conversation() -> list[np.ndarray]:
    """Attention, and a bounded cache that decodes."""
    layer = TinyLayer()
    q, k, v = layer.at(0, 30)
    results = scaled_dot_product_attention_with_scores(q, k, v, scale=0.3, mask="causal")
    cache = H2OKVCache(budgets=[24, 33])
    outs = [layer.feed(cache, 30, chunk=30), layer.feed(cache, 30)]
    kept = cache.arrays()["slots.positions"]
    return [np.array(x) for x in (*results, *outs, kept)]


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_without_the_kernels_everything_works_and_says_once_why(breaks, monkeypatch, request):
    expected = a_conversation()
    request.getfixturevalue("fresh_choice")
    breaks(monkeypatch)
    with pytest.warns(RuntimeWarning, match=BROKEN[breaks]) as said:
        results = a_conversation()
    assert len(said) == 1
    # It tells what to do, and points at the caller rather than at itself.
    assert "install a C++20 compiler" in str(said[0].message)
    assert choice.backend() is reference
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a_conversation()
    for got, like in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, like, rtol=2e-5, atol=2e-5)


# Every command, in a process whose extension cannot be imported.
ROOT = Path(__file__).parents[2]
COMMAND = """
import sys
sys.modules["mlx_h2o._ext"] = None
import importlib
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            "mlx_h2o.cli generate --model builtin:recall-4m --prompt Once -m 2 --max-kv-size 64",
            0,
            "",
        ),
        ("benchmarks.__main__ --quick", 2, "CPU kernels"),
    ],
    ids=["generate", "benchmarks"],
)
def test_commands_run_without_the_kernels(arguments, code, says):
    command = [sys.executable, "-c", COMMAND, *arguments.split()]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == code, run.stderr
    assert says in run.stderr
    assert "Traceback" not in run.stderr


def test_with_the_kernels_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice.cpu.cache_clear()
        assert choice.cpu() is cpu


def test_the_reference_computes_where_the_device_has_no_kernels(monkeypatch):
    monkeypatch.setattr(choice, "gpu", lambda: None)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert choice.backend() is reference


def same_functions(module: ModuleType) -> set[str]:
    return {"attention", "attention_with_scores", "attention_with_mass"} & set(vars(module))


def test_every_backend_has_the_same_forms():
    assert same_functions(cpu) == same_functions(reference) != set()


# What a user of a wheel sees, in a process that knows of no other mlx_h2o.
USE = """
import warnings, mlx.core as mx, mlx_h2o
warnings.simplefilter("always")
assert mlx_h2o.__file__.startswith({wheel!r}), mlx_h2o.__file__
q = k = v = mx.ones((1, 1, 1, 8))
out = mlx_h2o.scaled_dot_product_attention_with_scores(q, k, v, scale=1.0)[0]
assert mx.allclose(out, v)
"""


def test_a_wheel_is_built_and_works_where_there_is_no_compiler(tmp_path):
    """(The build's own requirements come from the extra `dev`: nothing is loaded.)"""
    root = Path(__file__).parents[2]
    nowhere = {"CXX": "/nonexistent", "CC": "/nonexistent"}
    options = ["--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path]
    options += ["--config-settings", f"build-dir={tmp_path / 'build'}"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", root, *options],
        env=os.environ | nowhere,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "unpacked")
    assert "mlx_h2o/attention/backends/reference.py" in names
    assert not [name for name in names if name.endswith((".so", ".dylib", ".pyd"))]
    # Without site, whose .pth files would find this checkout first.
    packages = [str(tmp_path / "unpacked"), *(p for p in sys.path if "site-packages" in p)]
    run = subprocess.run(
        [sys.executable, "-S", "-c", USE.format(wheel=str(tmp_path))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(packages)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "cannot be loaded" in run.stderr
