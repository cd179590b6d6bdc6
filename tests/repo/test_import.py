"""`import mlx_h2o` changes nothing in the process, takes little, and gives every public name."""

import ast
import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_h2o
from mlx_h2o import _blas

ROOT = Path(__file__).parents[2]
#: Beyond mlx itself. It takes milliseconds; a machine that does other work may take this long.
MOST_SECONDS = 0.5


def printed(program: str) -> str:
    """What a new interpreter prints."""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


def test_signal_handlers_and_mlx_lms_functions_stay():
    # Said before, since a process in the background may have begun with Ctrl-C ignored.
    program = """
import signal, sys
sys.argv[0] = "mlx_h2o"  # the name of the command, too
kinds = signal.SIGINT, signal.SIGTERM
signal.signal(signal.SIGINT, signal.default_int_handler)
before = [signal.getsignal(kind) for kind in kinds]
from mlx_lm.models import base, cache
functions = base.scaled_dot_product_attention, cache.make_prompt_cache
import mlx_h2o
mlx_h2o.make_prompt_cache, mlx_h2o.install
print((base.scaled_dot_product_attention, cache.make_prompt_cache) == functions)
import mlx_h2o.cli
print([signal.getsignal(kind) for kind in kinds] == before)
"""
    assert printed(program).split() == ["True", "True"]


@pytest.mark.skipif(not _blas.openblas_file(), reason="there is no other BLAS to bring in")
def test_mlx_keeps_its_own_products():
    program = "import mlx_h2o, mlx_h2o.cli.generate; mlx_h2o.install; print(mlx_h2o._blas.blas())"
    assert printed(program) == "reference BLAS"


def test_it_takes_little():
    seconds = runpy.run_path(str(ROOT / "tools/import_time.py"))["seconds"]
    assert seconds("", "import mlx_h2o") < MOST_SECONDS


def test_every_public_name_is_there_and_type_checkers_see_the_same():
    tree = ast.parse(Path(mlx_h2o.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(mlx_h2o.__all__) == sorted(seen)
    for name, module in seen.items():
        assert getattr(mlx_h2o, name) is getattr(importlib.import_module(module), name)
    assert sorted(dir(mlx_h2o)) == sorted([*mlx_h2o.__all__, "__version__"])


TYPED = """
import mlx_h2o

print(mlx_h2o.describe(mlx_h2o.load_prompt_cache("file")))
cache, metadata = mlx_h2o.load_prompt_cache("file", return_metadata=True)
text: str = metadata["text"]
mlx_h2o.resize(cache, max_bytes="25%")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "checker",
    ["mypy --strict", f"basedpyright --level error --pythonpath {sys.executable}"],
    ids=["mypy", "pyright"],
)
def test_type_checkers_know_what_a_file_gives(checker, tmp_path):
    """`.ci/run` installs the second, which is large."""
    name, *options = checker.split()
    pytest.importorskip(name, reason=f"{name} is not installed")
    (tmp_path / "typed.py").write_text(TYPED)
    command = [sys.executable, "-m", name, *options, str(tmp_path / "typed.py")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_a_name_that_there_is_not():
    with pytest.raises(AttributeError, match="module 'mlx_h2o' has no attribute 'make_cache'"):
        mlx_h2o.make_cache  # noqa: B018
