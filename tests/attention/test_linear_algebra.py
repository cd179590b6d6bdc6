"""MLX's matrix products through OpenBLAS: the same numbers, and only where that is sound."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_h2o import _blas
from mlx_h2o.attention.backends import choice

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or choice.cpu() is None,
    reason="only MLX's Linux wheel has the reference BLAS, and only the extension can replace it",
)

# Around the widths of pieces, and what has none.
SIZES = st.sampled_from([0, 1, 2, 3, 7, 8, 9, 16, 63, 64, 65, 191, 192, 193, 400, 700])
# Units of float32's rounding that a sum of k products may lose, with room for another order.
ROUNDINGS = 4


def in_subprocess(program: str, **environment: str) -> str:
    """What a new interpreter prints."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "MLX_H2O_BLAS": "openblas", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not ran.stderr
    return ran.stdout.strip()


@pytest.fixture
def openblas() -> Iterator[None]:
    """Within it OpenBLAS is in use, whatever the run was started with."""
    from mlx_h2o import _ext

    used = _blas.openblas_file()
    assert used is not None, "make installs scipy-openblas32"
    before = _ext.blas_file()
    assert _ext.redirect_blas(str(used), _blas.PREFIX) > 0
    yield
    if before != _ext.blas_file():
        _ext.restore_blas()


def rounding(*arrays: np.ndarray, k: int) -> float:
    """How far a product of k terms may be from the exact one."""
    largest = np.prod([np.abs(a).max(initial=0) for a in arrays])
    return float(ROUNDINGS * np.finfo(np.float32).eps * max(k, 1) ** 0.5 * largest + 1e-30)


def left_right(m: int, n: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((m, k)).astype(np.float32),
        rng.standard_normal((k, n)).astype(np.float32),
    )


@pytest.mark.usefixtures("openblas")
@settings(deadline=None, max_examples=60)
@given(
    m=SIZES, n=SIZES, k=SIZES, trans_a=st.booleans(), trans_b=st.booleans(), seed=st.integers(0, 9)
)
def test_products_are_those_of_numpy(m, n, k, trans_a, trans_b, seed):
    a, b = left_right(m, n, k, seed)
    x = mx.array(np.ascontiguousarray(a.T)).T if trans_a else mx.array(a)
    y = mx.array(np.ascontiguousarray(b.T)).T if trans_b else mx.array(b)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    with mx.stream(mx.cpu):
        np.testing.assert_allclose(np.array(x @ y), expected, rtol=0, atol=rounding(a, b, k=k))
        c = np.full((m, n), 0.5, np.float32)
        added = np.array(mx.addmm(mx.array(c), x, y, alpha=2.0, beta=-3.0))
    np.testing.assert_allclose(
        added, 2 * expected - 1.5, rtol=0, atol=3 * rounding(a, b, k=k) + 1e-6
    )


@pytest.mark.usefixtures("openblas")
@pytest.mark.parametrize(
    "shape", [(1, 1200, 576), (128, 1536, 576), (1030, 64, 130), (400, 400, 400)]
)
def test_threads_change_no_bit(shape):
    from mlx_h2o import _ext

    a, b = map(mx.array, left_right(*shape, seed=1))
    threads, products = _ext.threads(), []
    with mx.stream(mx.cpu):
        for number in (1, 2, 5):
            _ext.set_threads(number)
            products.append(np.array(a @ b))
    _ext.set_threads(threads)
    np.testing.assert_array_equal(products[0], products[1])
    np.testing.assert_array_equal(products[0], products[2])


@pytest.mark.usefixtures("openblas")
def test_lapack_is_replaced_too():
    rng = np.random.default_rng(2)
    a = rng.standard_normal((40, 40)).astype(np.float32)
    s = a @ a.T + 40 * np.eye(40, dtype=np.float32)
    with mx.stream(mx.cpu):
        np.testing.assert_allclose(np.array(mx.linalg.inv(mx.array(s))) @ s, np.eye(40), atol=1e-4)
        low = np.array(mx.linalg.cholesky(mx.array(s)))
        np.testing.assert_allclose(low @ low.T, s, atol=1e-3)
        q, r = map(np.array, mx.linalg.qr(mx.array(a)))
        np.testing.assert_allclose(q @ r, a, atol=1e-4)
        values = np.array(mx.linalg.eigvalsh(mx.array(s)))
        np.testing.assert_allclose(values, np.linalg.eigvalsh(s), rtol=1e-4)
        u, singular, vt = map(np.array, mx.linalg.svd(mx.array(a)))
        np.testing.assert_allclose(u @ np.diag(singular) @ vt, a, atol=1e-4)


SAY = """
import mlx.core
import mlx_h2o
mlx_h2o.use_openblas()
from mlx_h2o._blas import advice, blas
print(blas(), advice(), sep="; ")
"""


def hidden(module: str) -> str:
    """The same where a module cannot be imported."""
    return f"import sys; sys.modules[{module!r}] = None\n{SAY}"


def test_openblas_is_used_unless_told_otherwise():
    name, line = in_subprocess(SAY).split("; ")
    assert name.startswith("OpenBLAS ")
    assert line == "None"
    assert in_subprocess(SAY, MLX_H2O_BLAS="reference") == "reference BLAS; None"


def test_a_built_in_model_is_loaded_with_openblas():
    program = (
        "import mlx_h2o; mlx_h2o.load('builtin:recall-4m'); "
        "from mlx_h2o._blas import blas; print(blas())"
    )
    assert in_subprocess(program, HF_HUB_OFFLINE="1").startswith("OpenBLAS ")


def test_what_is_installed_and_not_used_is_advised():
    program = "import mlx_h2o; from mlx_h2o._blas import advice; print(advice())"
    assert in_subprocess(program).endswith("To use OpenBLAS: mlx_h2o.use_openblas()")


def test_without_the_package_nothing_changes_and_one_line_says_how():
    name, line = in_subprocess(hidden("scipy_openblas32")).split("; ")
    assert name == "reference BLAS"
    assert "pip install scipy-openblas32" in line


def test_without_the_extension_nothing_changes():
    assert in_subprocess(hidden("mlx_h2o._ext")) == "unknown; None"


def test_a_blas_that_was_chosen_stays(tmp_path):
    linked = next(Path(mx.__file__).parent.parent.glob("mlx*.libs/libblas*"))
    chosen = tmp_path / "libchosen.so"
    shutil.copy(linked, chosen)
    folder = f"{linked.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    said = in_subprocess(SAY, LD_PRELOAD=str(chosen), LD_LIBRARY_PATH=folder)
    assert said == "libchosen.so; None"


def test_another_setting_is_refused():
    with pytest.raises(subprocess.CalledProcessError) as failed:
        in_subprocess(SAY, MLX_H2O_BLAS="fast")
    assert "MLX_H2O_BLAS is 'fast'" in failed.value.stderr


@pytest.mark.usefixtures("openblas")
def test_a_library_that_is_no_openblas_changes_nothing():
    from mlx_h2o import _ext

    _ext.restore_blas()
    linked = _ext.blas_file()
    assert _blas.blas() == "reference BLAS"
    for library in ("/nowhere/libopenblas.so", "libm.so.6", linked):
        assert _ext.redirect_blas(library, "") == 0
        assert _ext.blas_file() == linked
