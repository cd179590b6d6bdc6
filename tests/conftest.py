"""Which build of the extension is tested (the installed one, or MLX_H2O_EXTENSION's), and how
much of the tests is slow."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

# First: it loads the library that the extension is linked against.
import mlx.core as mx
import pytest

from covering import cover
from mlx_h2o._blas import use_openblas

if path := os.environ.get("MLX_H2O_EXTENSION"):
    spec = importlib.util.spec_from_file_location("mlx_h2o._ext", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["mlx_h2o._ext"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["mlx_h2o._ext"])
    # Buffers of exactly the size that was asked for, so that a sanitizer sees reads behind them.
    mx.set_cache_limit(0)


# The tests compute in float32 on the CPU, as the commands do.
use_openblas()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the kernels' number of threads; it is set back."""
    from mlx_h2o import _ext

    before = _ext.threads()
    yield _ext.set_threads
    _ext.set_threads(before)


@pytest.fixture(scope="session")
def embedded() -> tuple[Any, Any]:
    """The model that the package brings, and its tokenizer; no test may change them."""
    from mlx_h2o import load

    model, tokenizer = load("builtin:recall-4m")
    mx.eval(model.parameters())  # also for other threads
    return model, tokenizer


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `pairwise`, all but a cover of their pairs are slow.

    Of one marked `few(n)` all but n of these are.
    """
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        quick = [case for case in cases if not case.get_closest_marker("slow")]
        if cases[0].get_closest_marker("pairwise"):
            covered = cover([values_of(item) for item in cases])
            quick = [case for number, case in enumerate(cases) if number in covered]
        if few := cases[0].get_closest_marker("few"):
            most = min(few.args[0], len(quick))
            quick = [quick[i * len(quick) // most] for i in range(most)]
        for case in cases:
            if case not in quick:
                case.add_marker("slow")


def values_of(item: pytest.Item) -> dict[str, str]:
    """The parameters of a case, each by the part of its name that stands for it."""
    assert isinstance(item, pytest.Function)
    return {name: repr(value) for name, value in item.callspec.params.items()}


@pytest.fixture(autouse=True)
def tests_name_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands' default is a real model, which is fetched: a test names the embedded one."""

    def unnamed() -> str:
        raise AssertionError('name a model: "--model", "builtin:recall-4m"')

    monkeypatch.setattr("mlx_h2o.cli.options.default_model", unnamed)


#: The embedded model's key scaling, which takes seconds: the first test that needs it makes it.
EMBEDDED_FRAMES = "qwen3-c8e65ffb43a7.frames.json"


@pytest.fixture(autouse=True)
def no_profiles_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Profiles that the tests' user keeps must not change what is tested."""
    folder = tmp_path.with_name(f"{tmp_path.name} profiles")
    monkeypatch.setattr("mlx_h2o.budgets.profile_store.kept_folder", lambda: folder)
    made, shared = folder / EMBEDDED_FRAMES, tmp_path.with_name(EMBEDDED_FRAMES)
    if shared.exists():
        folder.mkdir()
        shutil.copy(shared, made)
    yield
    if made.exists() and not shared.exists():
        shutil.copy(made, shared)


@pytest.fixture(autouse=True)
def no_measurements_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor does what the tests' user broke off; tests that are broken off leave nothing there."""
    folder = tmp_path / "unfinished"
    monkeypatch.setattr("mlx_h2o.cli.evaluate.cache_folder", lambda: folder)


@pytest.fixture
def one_operation_at_a_time():
    """MLX waits for what is under way before it takes more memory, on a busy machine as on an idle.

    Without, a machine that is slow to free what is done with peaks by a third higher.
    """
    before = mx.set_memory_limit(1)
    yield
    mx.set_memory_limit(before)
