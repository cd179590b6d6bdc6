"""The C API: golden vectors through a C program, its installation, its examples; sanitized."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

ROOT = Path(__file__).parents[1]
HOST_GPU = ROOT / "tests" / "host_gpu"
GOLDEN = ROOT / "golden"
# Rebuilt only when sources change.
BUILD = ROOT / "build" / "c_api"
GROUPS = (
    "attention",
    "quantized",
    "remainder",
    "accumulate",
    "selection",
    "trajectory",
    "framed",
    "turns",
    "filling",
)


def run(*command: object, lines: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        input=lines,
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
    # `make test-sanitize` has the kernels of all instruction sets.
    return built("sanitized", "-DMLX_H2O_SANITIZE=ON", "-DMLX_H2O_AVX512=OFF")


# Everything plain where it runs without a GPU: there are no CPU kernels over mlx-c alone.
@pytest.fixture(scope="module")
def over_mlx_c(sanitized: Path) -> Path:
    beside = f"-DMLXC_DIR={sanitized / 'mlx_c'}"
    options = ("-DMLX_H2O_SANITIZE=ON", "-DMLX_H2O_C_EXAMPLES=OFF", beside)
    return built("over_mlx_c", "-DMLX_H2O_OVER_MLX_C=ON", *options)


ENGINES = ("sanitized", "over_mlx_c")


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Path:
    """The library over MLX's C++ API, or over mlx-c alone."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


over_both = pytest.mark.parametrize("engine", ENGINES, indirect=True)


def replay(folder: Path, golden: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return run(folder / "tests" / "replay", golden, *options)


def replay_damaged(folder: Path, golden: Path) -> subprocess.CompletedProcess[str]:
    """Where it ends early, and leaves memory to the system."""
    replayer = folder / "tests" / "replay"
    return run(replayer, golden, "--group", "remainder", ASAN_OPTIONS="detect_leaks=0")


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        pytest.param("sanitized", ("--steps", "10000"), marks=pytest.mark.slow, id="kernels"),
        pytest.param("sanitized", ("--plain", "--every", "7"), marks=pytest.mark.slow, id="plain"),
        pytest.param("sanitized", ("--steps", "300", "--every", "9"), id="sample"),
        pytest.param("over_mlx_c", ("--steps", "300"), marks=pytest.mark.slow, id="mlx-c"),
        pytest.param("over_mlx_c", ("--steps", "100", "--every", "40"), id="mlx-c sample"),
    ],
    indirect=["engine"],
)
def test_every_golden_vector_is_replayed(engine: Path, options: tuple[str, ...]) -> None:
    """Kept positions exactly, outputs within tolerance, no bad access, no leak, flat memory."""
    done = replay(engine, GOLDEN, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    for group in GROUPS:
        assert any(line.startswith(group) for line in done.stdout.splitlines()), done.stdout
    if options[0] == "--steps":
        assert f"{options[1]} steps" in done.stdout


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        *(("sanitized", what) for what in ("undo", "interrupt", "frame", "memory")),
        # 32,768 tokens, two minutes
        pytest.param("sanitized", "positions", marks=pytest.mark.slow),
        # A prompt's memory is the kernels' merit.
        *(("over_mlx_c", what) for what in ("interrupt", "frame")),
        pytest.param("over_mlx_c", "undo", marks=pytest.mark.slow),
    ],
    indirect=["engine"],
)
def test_conversations(engine: Path, what: str) -> None:
    """Bit by bit: drafts taken back, steps that are looked at, frames; a reduced prompt's memory.

    Undo for every kind of policy and store: after any number of tokens of a draft was taken back
    the outputs, positions, scores and statistics are those of plain decoding; more than can be
    taken back is refused; the memory of it is counted and does not grow.
    """
    succeed(engine / "tests" / "conversations", what)


@over_both
def test_wrong_arguments_are_refused(engine: Path) -> None:
    """Each argument of every function, made wrong in every way: an error, and nothing changed."""
    succeed(engine / "tests" / "arguments", "refuse")


@over_both
def test_the_program_evaluates(engine: Path, host_gpu: dict[str, str]) -> None:
    """All that the library evaluates goes through the evaluator of the program, which may fail."""
    succeed(engine / "tests" / "evaluator")
    succeed(engine / "tests" / "evaluator", "gpu", **host_gpu)


@over_both
def test_settings_and_kinds_of_errors(
    engine: Path, host_gpu: dict[str, str], tmp_path: Path
) -> None:
    """All that a cache was made with; kernels for one cache and not for another."""
    succeed(engine / "tests" / "getters")
    told = tmp_path / "launches"
    succeed(engine / "tests" / "getters", "gpu", **host_gpu, HOST_GPU_RECORD=str(told))
    # Three fused steps of the cache with kernels, and one of the other when it may.
    launched = [line.split("_")[2] for line in told.read_text().splitlines()]
    assert launched.count("update") == 4


@over_both
def test_masks_and_rows(engine: Path, host_gpu: dict[str, str], tmp_path: Path) -> None:
    """Masks as arrays; rows, positions and arrays held, which fused steps go on beside."""
    succeed(engine / "tests" / "looking")
    told = tmp_path / "launches"
    succeed(engine / "tests" / "looking", "steps", "fused", **host_gpu, HOST_GPU_RECORD=str(told))
    launched = [line.split("_")[2] for line in told.read_text().splitlines()]
    assert launched.count("update") == 2 * 7  # every step of both conversations


def test_a_compiled_function_is_refused(sanitized: Path) -> None:
    succeed(sanitized / "tests" / "tracing")


@over_both
def test_copies_and_other_slots(engine: Path) -> None:
    """A copy goes on bit by bit as the original would; other slots hold what they may."""
    succeed(engine / "tests" / "copies")


# More by hand: build/c_api/sanitized/tests/arguments fuzz 1000000 7
FUZZED_CALLS = 3000


@over_both
@pytest.mark.parametrize(
    ("calls", "seed"),
    [(FUZZED_CALLS, 1), pytest.param(20 * FUZZED_CALLS, 2, marks=pytest.mark.slow)],
)
def test_random_arguments(engine: Path, calls: int, seed: int) -> None:
    """Sequences of calls, arguments right and wrong: each refused, or right and then run."""
    told = succeed(engine / "tests" / "arguments", "fuzz", calls, seed)
    refused = int(told.split(",")[1].split()[0])
    assert calls // 10 < refused < calls // 2, told


def a_number_more(arrays: dict[str, mx.array], name: str) -> None:
    flat = arrays[name].flatten()
    off = flat + (mx.arange(flat.size) == flat.size - 1).astype(flat.dtype)
    arrays[name] = off.reshape(arrays[name].shape)


@pytest.fixture(scope="module")
def host_gpu(sanitized: Path) -> dict[str, str]:
    """Variables that let a program find an Apple GPU: the host harness (tests/host_gpu)."""
    library = BUILD / "libhost_gpu.so"
    headers = ROOT / "c_api" / "mlx_c" / "include"
    # Bound when called: the shell that starts the program has no mlx-c.
    options = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-Wl,-z,lazy", f"-I{headers}"]
    succeed("cc", *options, HOST_GPU / "host_gpu.c", "-o", library)
    return {
        "LD_PRELOAD": str(library),
        "HOST_GPU_SERVER": f"{sys.executable} {HOST_GPU / 'serve.py'}",
        "HOST_GPU_ARCHITECTURE": "applegpu_g13s",
        "ASAN_OPTIONS": "verify_asan_link_order=0",
    }


ON_HOST_GPU = {
    # Each kind of mask, dtype and of packed rows; groups of query heads; sinks.
    "attention": ("--every", "41"),
    "quantized": ("--every", "7"),
    # Whole conversations: prompts in chunks, then fused steps, which must keep the same tokens.
    "trajectory": (
        *("--case", "distinct-ragged-dense", "--case", "ema-uniform-k8v4"),
        *("--case", "keydiff-ragged-4bit"),
        *("--case", "salient-ragged-dense"),
    ),
    "framed": ("--case", "distinct-4bit"),
    "turns": ("--case", "salient-ragged"),
    "filling": ("--case", "salient-4bit"),
}
# What must have run beside attention.
RUN_BESIDES: dict[str, set[str]] = {
    "attention": {"prompt"},
    "quantized": set(),
    "trajectory": {"prompt", "overwrite", "update", "kept"},
    "framed": {"overwrite", "update"},
    "turns": {"overwrite", "update"},
    "filling": {"overwrite", "update"},
}


# Over mlx-c alone, quickly: a prompt, and fused steps.
QUICK_OVER_MLX_C = ("attention", "turns")


@pytest.mark.parametrize(
    ("engine", "group"),
    [
        *(("sanitized", group) for group in ON_HOST_GPU),
        *(
            pytest.param(
                *("over_mlx_c", group),
                marks=[] if group in QUICK_OVER_MLX_C else pytest.mark.slow,
            )
            for group in ON_HOST_GPU
        ),
    ],
    indirect=["engine"],
)
def test_golden_vectors_by_the_gpu_kernels(
    engine: Path, host_gpu: dict[str, str], tmp_path: Path, group: str
) -> None:
    """The kernels' own text, launched from C, run lane by lane on the host harness."""
    replayer, told = engine / "tests" / "replay", tmp_path / "launches"
    done = run(
        *(replayer, GOLDEN, "--group", group, *ON_HOST_GPU[group]),
        **host_gpu,
        HOST_GPU_RECORD=str(told),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {line.split("_")[2] for line in told.read_text().splitlines()}
    assert kernels >= {"attention"} | RUN_BESIDES[group]


@pytest.mark.slow
@over_both
def test_undo_on_a_gpu(engine: Path, host_gpu: dict[str, str], tmp_path: Path) -> None:
    """Op by op around the attention kernels, on the host harness; no fused step."""
    told = tmp_path / "launches"
    succeed(engine / "tests" / "conversations", "gpu", **host_gpu, HOST_GPU_RECORD=str(told))
    kernels = {line.split("_")[2] for line in told.read_text().splitlines()}
    assert "attention" in kernels
    assert not kernels & {"overwrite", "update"}


@over_both
def test_launches_are_those_of_python(
    engine: Path, host_gpu: dict[str, str], tmp_path: Path
) -> None:
    """Sizes, template arguments, integers and texts, on four GPUs (tools/record_launches.py)."""
    fixture = ROOT / "swift" / "Tests" / "MLXH2OTests" / "Fixtures" / "launches.json"
    recorded = [
        case
        for case in json.loads(fixture.read_text())
        # C takes keys and values packed alike.
        if case["call"]["kind"] == "attention" and case["call"]["k_bits"] == case["call"]["v_bits"]
    ]
    for architecture, cases in itertools.groupby(
        sorted(recorded, key=lambda case: str(case["call"]["architecture"])),
        lambda case: case["call"]["architecture"],
    ):
        chosen = list(cases)
        lines = [
            " ".join(str(int(x) if isinstance(x, bool) else x) for x in list(call.values())[1:-2])
            for call in (case["call"] for case in chosen)
        ]
        told = tmp_path / architecture
        environment = host_gpu | {
            "HOST_GPU_RECORD": str(told),
            "HOST_GPU_RUN": "0",
            "HOST_GPU_ARCHITECTURE": architecture,
        }
        done = run(engine / "tests" / "launches", **environment, lines="\n".join(lines))
        assert done.returncode == 0, done.stderr
        launched = told.read_text().splitlines()
        assert launched == [launch for case in chosen for launch in case["launches"]]


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


@over_both
@pytest.mark.parametrize("group", PERTURBED)
def test_a_perturbed_golden_vector_fails(engine: Path, copied: Path, group: str) -> None:
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
    done = replay(engine, copied, "--group", group, *every)
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


def test_a_prompt_is_compressed(sanitized: Path) -> None:
    """By what is installed alone: sinks and the newest rows stay, rows are in order."""
    lines = succeed(sanitized / "examples" / "compress").splitlines()
    assert len(lines) == 2
    for line in lines:
        kept = [int(word) for word in line.split("keeps")[1].split()]
        assert len(kept) == 64
        assert kept == sorted(set(kept))
        assert kept[:4] == [0, 1, 2, 3]
        assert kept[-1] == 511


@pytest.mark.slow
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
    assert [path.name for path in (prefix / "include").glob("mlx_h2o*")] == ["mlx_h2o.h"]
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
