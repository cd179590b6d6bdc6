"""The C API: golden vectors through a C program, its installation, its examples; sanitized."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "golden"
# Rebuilt only when sources change.
BUILD = ROOT / "build" / "c_api"
GROUPS = ("attention", "quantized", "remainder", "accumulate", "selection", "trajectory")


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        | environment,
        text=True,
        capture_output=True,
    )


def succeed(*command: object, **environment: str) -> str:
    done = run(*command, **environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def built(name: str, *options: str) -> Path:
    folder = BUILD / name
    python = f"-DPython_EXECUTABLE={sys.executable}"
    succeed("cmake", "-G", "Ninja", "-S", ROOT / "c_api", "-B", folder, python, *options)
    succeed("cmake", "--build", folder)
    return folder


@pytest.fixture(scope="module")
def sanitized() -> Path:
    return built("sanitized", "-DMLX_H2O_SANITIZE=ON")


def replay(folder: Path, golden: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return run(folder / "tests" / "replay", golden, *options)


def replay_damaged(folder: Path, golden: Path) -> subprocess.CompletedProcess[str]:
    """Where it ends early, and leaves memory to the system."""
    replayer = folder / "tests" / "replay"
    return run(replayer, golden, "--group", "remainder", ASAN_OPTIONS="detect_leaks=0")


@pytest.mark.parametrize(
    "options", [("--steps", "10000"), ("--plain", "--every", "7")], ids=["kernels", "plain"]
)
def test_every_golden_vector_is_replayed(sanitized: Path, options: tuple[str, ...]) -> None:
    """Kept positions exactly, outputs within tolerance, no bad access, no leak, flat memory."""
    done = replay(sanitized, GOLDEN, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    for group in GROUPS:
        assert any(line.startswith(group) for line in done.stdout.splitlines()), done.stdout
    assert ("10000 steps" in done.stdout) == ("--steps" in options)


def a_number_more(arrays: dict[str, mx.array], name: str) -> None:
    flat = arrays[name].flatten()
    off = flat + (mx.arange(flat.size) == flat.size - 1).astype(flat.dtype)
    arrays[name] = off.reshape(arrays[name].shape)


PERTURBED = {
    "attention": "float32-4of2-causal-v32-L3/out.out",
    "quantized": "k4v4-g64-none-float32/in.k_w",
    "remainder": "rows-4/out.keys",
    "accumulate": "ema-L6-G1/out.scores",
    "selection": "victims-keydiff-head-3-of-16/out.victims",
    "trajectory": "distinct-uniform-dense/out.kept",
}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


@pytest.mark.parametrize("group", PERTURBED)
def test_a_perturbed_golden_vector_fails(sanitized: Path, copied: Path, group: str) -> None:
    """One number of one array."""
    path = str(copied / f"{group}.safetensors")
    arrays, metadata = mx.load(path, return_metadata=True)
    name = PERTURBED[group]
    if name not in arrays:
        name = next(key for key in arrays if key.startswith(name.partition("-")[0]))
    a_number_more(arrays, name)
    mx.save_safetensors(path, arrays, metadata)
    # Of the conversations, which take seconds, the first alone.
    every = ("--every", 1000) if group == "trajectory" else ()
    done = replay(sanitized, copied, "--group", group, *every)
    assert done.returncode == 1, done.stdout + done.stderr
    assert name.partition("/")[0] in done.stderr


def test_damaged_golden_files_are_refused(sanitized: Path, copied: Path) -> None:
    def text(change: Callable[[str], str]) -> None:
        path = copied / "cases.txt"
        path.write_text(change((GOLDEN / "cases.txt").read_text()))

    for change in (
        lambda text: text.replace("mlx-h2o golden 1", "mlx-h2o golden 2", 1),
        lambda text: text[:-20],
        lambda text: text.replace("\ncase remainder", "\ncase unheard", 1),
        lambda text: text.replace("\nrows ", "\ncrows ", 1),
    ):
        text(change)
        assert replay_damaged(sanitized, copied).returncode == 2
    # A parameter that it does not know might change everything: it must not be ignored.
    text(lambda text: text.replace("\nrows ", "\nnovelty 1\nrows ", 1))
    assert replay_damaged(sanitized, copied).returncode == 1
    text(lambda text: text)
    path = copied / "remainder.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert replay_damaged(sanitized, copied).returncode == 2
    path.unlink()
    assert replay_damaged(sanitized, copied).returncode == 2


CONSUMER = """
#include <mlx_h2o.h>
#include <stdio.h>
int main(void) {
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  puts(mlx_h2o_version());
  return mlx_h2o_policy_named(&policy, "distinct") || mlx_h2o_policy_free(policy);
}
"""

PROJECT = """
cmake_minimum_required(VERSION 3.26)
project(consumer LANGUAGES C CXX)
find_package(mlx_h2o REQUIRED)
add_executable(consumer consumer.c)
target_link_libraries(consumer PRIVATE mlx_h2o::mlx_h2o)
"""


def test_it_installs_for_cmake_and_pkg_config(tmp_path: Path) -> None:
    """A program built outside, each way, runs; the example decodes in bounded memory."""
    prefix = tmp_path / "prefix"
    folder = built("release", f"-DCMAKE_INSTALL_PREFIX={prefix}", "-DMLX_H2O_C_TESTS=OFF")
    succeed("cmake", "--install", folder)
    (tmp_path / "consumer.c").write_text(CONSUMER)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    out = tmp_path / "out"
    succeed("cmake", "-G", "Ninja", "-S", tmp_path, "-B", out, f"-DCMAKE_PREFIX_PATH={prefix}")
    succeed("cmake", "--build", out)
    version = succeed(out / "consumer").strip()
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()

    [described] = prefix.rglob("mlx_h2o.pc")
    flags = described.read_text()
    prefix_line = next(line for line in flags.splitlines() if line.startswith("prefix="))
    assert prefix_line == f"prefix={prefix}"
    library = described.parents[1]
    words = [f"-I{prefix}/include", f"-L{library}", "-lmlx_h2o", "-lmlxc", f"-Wl,-rpath,{library}"]
    succeed("cc", tmp_path / "consumer.c", "-o", tmp_path / "by_flags", *words)
    assert succeed(tmp_path / "by_flags").strip() == version

    lines = succeed(folder / "examples" / "decode", 2000).splitlines()
    assert (
        lines[0].split(":")[1].split("held in")[1].split()[0]
        == (lines[-1].split(":")[1].split("held in")[1].split()[0])
    )
