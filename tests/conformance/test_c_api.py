"""The C API: golden vectors through a C program, its installation, its examples."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from covering import STEP
from golden.numbers import bell
from mlx_h2o import H2OKVCache, Spill, load_prompt_cache, save_prompt_cache
from mlx_h2o.caches.kinds import restored
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.models.make import spill_to
from mlx_h2o.policies import make_policy
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.rope import Rope

ROOT = Path(__file__).parents[2]
HOST_GPU = ROOT / "tests" / "host_gpu"
GOLDEN = ROOT / "golden"
# Rebuilt only when sources change.
BUILD = ROOT / "build" / "c_api"
# Groups of golden vectors; those of whole conversations last.
GROUPS = (
    *("attention", "quantized", "remainder", "accumulate", "selection", "twice"),
    *("trajectory", "framed", "turns", "filling", "returning"),
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


def kernels_of(
    engine: Path, host_gpu: dict[str, str], folder: Path, program: str, *options: object
) -> list[str]:
    """Runs a program on the host harness; the names of the kernels that it launched, in order."""
    told = folder / "launches"
    succeed(engine / "tests" / program, *options, **host_gpu, HOST_GPU_RECORD=str(told))
    return [line.split("_")[2] for line in told.read_text().splitlines()]


def built(name: str, *options: str) -> Path:
    folder = BUILD / name
    python = f"-DPython_EXECUTABLE={sys.executable}"
    succeed("cmake", "-G", "Ninja", "-S", ROOT / "c_api", "-B", folder, python, *options)
    succeed("cmake", "--build", folder)
    return folder


def kernels_of_the_extension() -> Path | None:
    """The CPU kernels that its installation compiled, unless their sources have changed since."""
    sources = [ROOT.glob(f"c_api/src/cpu/**/*.{ending}") for ending in ("cpp", "h")]
    newest = max(source.stat().st_mtime for source in itertools.chain(*sources))
    archives = ROOT.glob("build/cp*/cpu/libmlx_h2o_cpu.a")
    return next((a for a in archives if a.stat().st_mtime > newest), None)


# Instrumented builds take twice as long to compile, and `make test` does without.
SANITIZE = STEP == 1
HOW: tuple[str, ...] = ("-DMLX_H2O_SANITIZE=ON",)
if not SANITIZE:
    HOW = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1", "-DMLX_H2O_PRECOMPILED=ON")
    HOW += (f"-DMLX_H2O_CPU_LIBRARY={kernels_of_the_extension() or ''}",)
# A build of each kind has a folder, so that neither tier compiles what the other left.
KIND = "sanitized" if SANITIZE else "quick"


@pytest.fixture(scope="module")
def over_mlx() -> Path:
    # `make test-sanitize` has the kernels of all instruction sets.
    return built(f"{KIND}/over_mlx", "-DMLX_H2O_AVX512=OFF", *HOW)


# Everything plain where it runs without a GPU: there are no CPU kernels over mlx-c alone.
@pytest.fixture(scope="module")
def over_mlx_c(over_mlx: Path) -> Path:
    beside = f"-DMLXC_DIR={over_mlx / 'mlx_c'}"
    options = ("-DMLX_H2O_C_EXAMPLES=ON", beside, *HOW)
    return built(f"{KIND}/over_mlx_c", "-DMLX_H2O_OVER_MLX_C=ON", *options)


ENGINES = ("over_mlx", "over_mlx_c")


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
        pytest.param("over_mlx", ("--steps", "10000"), marks=pytest.mark.slow, id="kernels"),
        pytest.param("over_mlx", ("--plain", "--every", "7"), marks=pytest.mark.slow, id="plain"),
        pytest.param("over_mlx", ("--steps", "300", "--every", "9"), id="sample"),
        pytest.param("over_mlx_c", ("--steps", "300"), marks=pytest.mark.slow, id="mlx-c"),
        pytest.param("over_mlx_c", ("--steps", "100", "--every", "40"), id="mlx-c sample"),
    ],
    indirect=["engine"],
)
def test_every_golden_vector_is_replayed(engine, options):
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
        *(("over_mlx", what) for what in ("undo", "interrupt", "frame", "memory")),
        # 32,768 tokens, two minutes
        *(pytest.param(name, "positions", marks=pytest.mark.slow) for name in ENGINES),
        # A prompt's memory is the kernels' merit.
        *(("over_mlx_c", what) for what in ("interrupt", "frame")),
        pytest.param("over_mlx_c", "undo", marks=pytest.mark.slow),
    ],
    indirect=["engine"],
)
def test_conversations(engine, what):
    """Bit by bit: drafts taken back, steps that are looked at, frames; a reduced prompt's memory.

    Undo for every kind of policy and store: after any number of tokens of a draft was taken back
    the outputs, positions, scores and statistics are those of plain decoding; more than can be
    taken back is refused; the memory of it is counted and does not grow.
    """
    succeed(engine / "tests" / "conversations", what)


@over_both
def test_wrong_arguments_are_refused(engine):
    """Each argument of every function, made wrong in every way: an error, and nothing changed."""
    succeed(engine / "tests" / "arguments", "refuse")


@over_both
def test_the_program_evaluates(engine, host_gpu):
    """All that the library evaluates goes through the evaluator of the program, which may fail."""
    succeed(engine / "tests" / "evaluator")
    succeed(engine / "tests" / "evaluator", "gpu", **host_gpu)


@over_both
def test_settings_and_kinds_of_errors(engine, host_gpu, tmp_path):
    """All that a cache was made with; kernels for one cache and not for another."""
    succeed(engine / "tests" / "getters")
    launched = kernels_of(engine, host_gpu, tmp_path, "getters", "gpu")
    # Three fused steps of the cache with kernels, and one of the other when it may.
    assert launched.count("update") == 4


@over_both
def test_masks_and_rows(engine, host_gpu, tmp_path):
    """Masks as arrays; rows, positions and arrays held, which fused steps go on beside."""
    succeed(engine / "tests" / "looking")
    launched = kernels_of(engine, host_gpu, tmp_path, "looking", "steps", "fused")
    assert launched.count("update") == 2 * 7  # every step of both conversations


@over_both
def test_own_policies_chunks_pins_and_views(engine):
    """A policy of functions is H2O where they are; a chunk's end goes back; rows are not copied."""
    succeed(engine / "tests" / "own")


# Caches that Python saves: settings, and tokens of the prompt before that.
SAVED: dict[str, tuple[dict[str, Any], int]] = {
    "salient": ({"budgets": [24, 20], "policy": "salient"}, 40),
    "short": ({"budgets": [300, 300], "policy": "h2o"}, 7),
    "layer": ({"budgets": [24, 24], "policy": make_policy("paper", recent=8)}, 40),
    "streaming": ({"budgets": [16, 24], "policy": "streaming", "remainder": False}, 40),
    "distinct undo": ({"budgets": [30, 24], "policy": "distinct", "undo": 3}, 40),
    "tova packed": (
        {"budgets": [24, 24], "policy": make_policy("tova", evict_every=3), "bits": 4}
        | {"group_size": 32, "saturation": (0.0, 2.5)},
        40,
    ),
    "newest apart": (
        {"budgets": [24, 20], "policy": "salient", "k_bits": 8, "v_bits": 4, "group_size": 32}
        | {"recent_bits": 16},
        40,
    ),
    "newest apart, short": (
        {"budgets": [40, 44], "policy": "ema", "bits": 4, "group_size": 32, "recent_bits": 8},
        9,
    ),
    "framed": (
        {"budgets": [24, 24], "policy": "keydiff", "bits": 8, "group_size": 32}
        | {"frame": Frame(mx.full((2, 32), 0.5), mx.full((2, 32), 2.0))},
        40,
    ),
    "rolling": ({"budgets": [24, 20], "policy": "h2o", "remainder": False}, 40),
    "plain rows": ({"max_size": 64, "policy": "keydiff"}, 90),
    "plain rows, short": ({"max_size": 64, "policy": "keydiff"}, 30),
}
STEPS_AFTER = 9


def rows_of(seed: int, heads: int, tokens: int) -> mx.array:
    return mx.random.normal((1, heads, tokens, 32), key=mx.random.key(seed))


def taken_in(cache: H2OKVCache, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    keys, values = cache.update_and_fetch(k, v)
    out = cache.attend(q, keys, values, scale=0.2, mask="causal") if cache.attending else keys
    mx.eval(out, list(cache.arrays().values()))
    return out


def begun(name: str) -> H2OKVCache:
    """A cache that has seen a prompt, and pins of it."""
    settings, prompt = SAVED[name]
    cache = (PlainRowsKVCache if name.startswith("plain rows") else H2OKVCache)(**settings)
    if name == "rolling":
        cache.follow(replace(cache.settings, rope=Rope(32, 500.0, 0.5, True)))
    taken_in(cache, rows_of(1, 4, prompt), rows_of(2, 2, prompt), rows_of(3, 2, prompt))
    if name == "salient":
        cache.pin([(prompt - 2, prompt + 2)])
        cache.new_turn(0.5)
    return cache


def written(
    path: Path, arrays: dict[str, mx.array], settings: str, tokens: Sequence[mx.array]
) -> None:
    inputs = dict(zip(("in.q", "in.k", "in.v"), tokens, strict=True))
    named = {f"cache.{name}": array for name, array in arrays.items()}
    mx.save_safetensors(str(path), named | inputs, {"settings": settings})


def oldest_first(arrays: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """The arrays with the recent window's ring turned, and without what it has no tokens for."""
    ring = config["recent"]
    return {
        name: mx.roll(x[:, :, : ring["length"]], -ring["oldest"], 2) if "recent." in name else x
        for name, x in arrays.items()
    }


@pytest.mark.few(9)
@over_both
@pytest.mark.parametrize("name", SAVED)
def test_a_cache_that_python_saved_goes_on(engine, tmp_path, name):
    """In C as in Python, and then in Python again: outputs, positions and arrays are the same."""
    ours = begun(name)
    tokens = [rows_of(10 + i, heads, STEPS_AFTER) for i, heads in enumerate((4, 2, 2))]
    arrays, settings = ours.state
    written(tmp_path / "in.safetensors", arrays, settings, tokens)
    succeed(engine / "tests" / "saved", tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    for i in range(STEPS_AFTER):
        out = taken_in(ours, *(rows[:, :, i : i + 1] for rows in tokens))
    held, metadata = mx.load(str(tmp_path / "out.safetensors"), return_metadata=True)
    assert mx.allclose(held.pop("out"), out, atol=2e-4)
    back = restored(
        ({n.removeprefix("cache."): array for n, array in held.items()}, metadata["settings"])
    )
    theirs, mine = (oldest_first(cache.arrays(), cache.config()) for cache in (back, ours))
    assert theirs.keys() == mine.keys()
    for field, array in mine.items():
        assert (theirs[field].shape, theirs[field].dtype) == (array.shape, array.dtype), field
        assert mx.allclose(theirs[field], array, atol=2e-4, rtol=1e-3), field
    said = [cache.config() for cache in (back, ours)]
    for config in said:
        config["recent"] = config["recent"] and config["recent"] | {"oldest": 0}
    assert said[0] == said[1]
    last = rows_of(20, 4, 1), rows_of(21, 2, 1), rows_of(22, 2, 1)
    assert mx.allclose(taken_in(back, *last), taken_in(ours, *last), atol=2e-4)


def changed_state(
    arrays: dict[str, mx.array], config: dict[str, Any], draw: random.Random
) -> tuple[dict[str, mx.array], str]:
    """A state with something wrong in it, mostly."""
    arrays, config = dict(arrays), json.loads(json.dumps(config))
    for _ in range(draw.randint(1, 2)):
        if draw.random() < 0.4:
            name = draw.choice(list(arrays))
            array = arrays[name]
            wrong = [
                lambda a: a[..., :-1] if a.shape[-1] > 1 else a[None],
                lambda a: mx.concatenate([a, a], axis=a.ndim - 1),
                lambda a: a.astype(mx.float16 if a.dtype != mx.float16 else mx.int32),
                lambda a: a + mx.array(draw.choice([-100, 1, 1000, 2**14])).astype(a.dtype),
                lambda a: None,
            ]
            result = draw.choice(wrong)(array)
            if result is None:
                del arrays[name]
            else:
                arrays[name] = result
            continue
        inside: Any = config
        key: Any = draw.choice(list(config))
        while isinstance(inside[key], dict | list) and inside[key] and draw.random() < 0.8:
            inside = inside[key]
            key = draw.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        if isinstance(inside, dict) and draw.random() < 0.2:
            del inside[key]
        else:
            inside[key] = draw.choice(
                [None, True, -1, 0, 1, 2, 5, 31, 33, 2**30, 2**31, 2**63, 0.5, "x", [], {}, [[0]]]
            )
    return arrays, json.dumps(config)


@pytest.mark.few(8)
@over_both
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("rounds", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_what_no_cache_saved_is_refused(engine, tmp_path, name, rounds):
    """Whatever is changed is refused as a saved cache, or is one and goes on; no bad access."""
    cache = begun(name)
    tokens = [rows_of(10 + i, heads, 3) for i, heads in enumerate((4, 2, 2))]
    for seed in range(rounds):
        draw = random.Random(f"{name} {seed}")
        path = tmp_path / f"{seed}.safetensors"
        arrays, settings = changed_state(cache.arrays(), cache.config(), draw)
        written(path, arrays, settings, tokens)
        succeed(engine / "tests" / "saved", "refuse", path)


@pytest.mark.few(7)
@over_both
def test_prompt_cache_files_are_those_of_python(engine, tmp_path):
    """Each language reads what the other wrote, with the texts kept beside the caches."""
    caches = [begun(name) for name in SAVED]
    texts = {"title": 'über "x"\n\t', "\U0001f600": "{}"}
    save_prompt_cache(tmp_path / "in.safetensors", caches, texts)
    files = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    succeed(engine / "tests" / "files", "copy", *files, len(caches))
    loaded, kept = load_prompt_cache(files[1], return_metadata=True)
    assert kept == texts
    last = rows_of(20, 4, 1), rows_of(21, 2, 1), rows_of(22, 2, 1)
    for ours, theirs in zip(caches, loaded, strict=True):
        assert mx.array_equal(taken_in(ours, *last), taken_in(theirs, *last))


@over_both
def test_damaged_prompt_cache_files_are_refused(engine, tmp_path):
    """A changed bit or a cut is an error; a write that fails leaves the old file, and no other."""
    path = tmp_path / "in.safetensors"
    save_prompt_cache(path, [begun("salient")])
    succeed(engine / "tests" / "files", "damaged", path, tmp_path / "damaged.safetensors")
    before = path.read_bytes()
    succeed(engine / "tests" / "files", "failing", path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    save_prompt_cache(path, [KVCache()])
    done = run(engine / "tests" / "files", "copy", path, path, 1)
    assert "holds a KVCache" in done.stderr


@over_both
@pytest.mark.parametrize(
    "settings", ["", "{", "[]", "[" * 5000, '{"a": 1e}', "nul", '{"runs": NaN}', '"\\', "1 2"]
)
def test_what_is_no_json_is_refused(engine, tmp_path, settings):
    path = tmp_path / "in.safetensors"
    written(path, begun("short").arrays(), settings, [rows_of(1, 2, 1)] * 3)
    assert "refused" in succeed(engine / "tests" / "saved", "refuse", path)


def test_a_compiled_function_is_refused(over_mlx):
    succeed(over_mlx / "tests" / "tracing")


@over_both
def test_copies_and_other_slots(engine):
    """A copy goes on bit by bit as the original would; other slots hold what they may."""
    succeed(engine / "tests" / "copies")


@over_both
def test_prompts_that_are_read_twice(engine, tmp_path):
    """Within the bound after both readings or a part of them; wrong arguments change nothing."""
    succeed(engine / "tests" / "twice", tmp_path)


@pytest.mark.parametrize(
    "engine", ["over_mlx", pytest.param("over_mlx_c", marks=pytest.mark.slow)], indirect=True
)
def test_files_of_rows(engine, tmp_path):
    """Tokens taken back, copies, failures: the conversation goes on, and no file is left."""
    succeed(engine / "tests" / "rows", "check", tmp_path)


@over_both
def test_rows_in_the_file_are_those_of_python(engine, tmp_path):
    """Bit by bit, also in a block that tokens taken back opened again."""
    tokens, out = 75, tmp_path / "out"
    out.mkdir()
    succeed(engine / "tests" / "rows", "save", tmp_path / "rows", tokens, out)
    packing: dict[str, Any] = {"bits": 4, "group_size": 32, "recent_bits": 8}
    caches = [H2OKVCache(budgets=[24, 32], policy="salient", **packing) for _ in range(2)]
    spill_to(caches, Spill(tmp_path / "rows"), [frozenset({0})] * 2)
    for first in (0, *range(5, tokens)):
        for layer, cache in enumerate(caches):
            seed, count = 1000 * first + 10 * layer, 1 if first else 5
            q, k, v = (mx.array(bell(seed + i, (1, (4, 2, 2)[i], count, 32))) for i in range(3))
            mx.eval(taken_in(cache, q, k, v))
    for layer, cache in enumerate(caches):
        assert cache.spill is not None
        for head in range(2):
            theirs: Any = mx.load(str(out / f"{layer}.{head}.safetensors"))
            ours = cache.spill.rows(head, range(tokens // 8 * 8))
            assert theirs.keys() == ours.keys()
            for name, rows in ours.items():
                assert (np.array(theirs[name]) == rows).all(), (layer, head, name)


# More by hand: build/c_api/sanitized/over_mlx/tests/arguments fuzz 1000000 7
FUZZED_CALLS = 3000


@over_both
@pytest.mark.parametrize(
    ("calls", "seed"),
    [(FUZZED_CALLS, 1), pytest.param(20 * FUZZED_CALLS, 2, marks=pytest.mark.slow)],
)
def test_random_arguments(engine, calls, seed):
    """Sequences of calls, arguments right and wrong: each refused, or right and then run."""
    told = succeed(engine / "tests" / "arguments", "fuzz", calls, seed)
    refused = int(told.split(",")[1].split()[0])
    assert calls // 10 < refused < calls // 2, told


def a_number_more(arrays: dict[str, mx.array], name: str) -> None:
    flat = arrays[name].flatten()
    off = flat + (mx.arange(flat.size) == flat.size - 1).astype(flat.dtype)
    arrays[name] = off.reshape(arrays[name].shape)


@pytest.fixture(scope="module")
def host_gpu(over_mlx: Path) -> dict[str, str]:
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
        # What is launched is recorded; below are tests of the checks.
        "MLX_H2O_VERIFY": "never",
    }


def conversed(
    engine: Path, host_gpu: dict[str, str], *, way: str = "", mode: str = "once"
) -> subprocess.CompletedProcess[str]:
    """A conversation by kernels that are broken in some way, and by MLX's operations."""
    environment = host_gpu | {"MLX_H2O_VERIFY": mode}
    if way:
        environment["HOST_GPU_BREAK"] = way
    return run(engine / "tests" / "self_check", **environment)


# As in tests/metal/broken.py, with what is said of the fused step; but for the last a launch of
# attention by itself says the same.
BROKEN_WAYS = {
    "a wrong scale": "differs by",
    "a barrier removed": "raised",
    "a text that does not compile": "raised",
    "NaN only in the last tile": "has a NaN",
    "the best goes first": "what is kept",
}


@pytest.mark.parametrize(
    ("engine", "way"),
    [
        pytest.param(engine, way, marks=[] if quick else pytest.mark.slow)
        for engine in ENGINES
        for way in BROKEN_WAYS
        for quick in [(engine, way) == ("over_mlx_c", "a wrong scale")]
    ],
    indirect=["engine"],
)
def test_a_broken_kernel_is_not_used(engine, host_gpu, way):
    """It is caught, with one notice; the outputs are those of MLX's operations."""
    done = conversed(engine, host_gpu, way=way)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert not report["fused"]
    assert report["same"]
    assert report["notices"] == 1
    update_alone = way == "the best goes first"
    assert report["apart"] < 1e-5
    bad = {v["variant"]: v["why"] for v in report["verdicts"] if not v["usable"]}
    [fused] = [why for variant, why in bad.items() if variant.startswith("a fused step")]
    assert BROKEN_WAYS[way] in fused
    of_scores = [why for variant, why in bad.items() if "with scores" in variant]
    assert [BROKEN_WAYS[way] in why for why in of_scores] == [True] * (not update_alone) * 1


@pytest.mark.parametrize(
    "engine", [pytest.param("over_mlx", marks=pytest.mark.slow), "over_mlx_c"], indirect=True
)
def test_sound_kernels_are_checked_and_used(engine, host_gpu):
    report = json.loads(conversed(engine, host_gpu).stdout)
    assert report["fused"]
    assert report["same"]
    assert report["notices"] == 0
    assert report["apart"] < 1e-4
    assert all(v["usable"] and 0 < v["error"] <= 1 for v in report["verdicts"])
    assert len(report["verdicts"]) == 4  # a prompt with and without mass, steps, scores


def test_kernels_are_checked_once_or_never(over_mlx_c, host_gpu):
    report = json.loads(conversed(over_mlx_c, host_gpu, mode="never").stdout)
    assert {v["why"] for v in report["verdicts"]} == {"not checked (MLX_H2O_VERIFY=never)"}
    done = conversed(over_mlx_c, host_gpu, mode="sometimes")
    assert done.returncode != 0
    assert 'MLX_H2O_VERIFY must be once or never; got "sometimes".' in done.stderr


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
    "returning": ("--case", "salient-4bit"),
}
# What must have run beside attention.
RUN_BESIDES: dict[str, set[str]] = {
    "attention": {"prompt"},
    "quantized": set(),
    "trajectory": {"prompt", "overwrite", "update", "kept"},
    "framed": {"overwrite", "update"},
    "turns": {"overwrite", "update"},
    "filling": {"overwrite", "update"},
    "returning": {"overwrite", "update"},
}


# Over mlx-c alone, quickly: a prompt, and fused steps.
QUICK_OVER_MLX_C = ("attention", "turns")


@pytest.mark.parametrize(
    ("engine", "group"),
    [
        *(("over_mlx", group) for group in ON_HOST_GPU),
        *(
            pytest.param(
                *("over_mlx_c", group), marks=[] if group in QUICK_OVER_MLX_C else pytest.mark.slow
            )
            for group in ON_HOST_GPU
        ),
    ],
    indirect=["engine"],
)
def test_golden_vectors_by_the_gpu_kernels(engine, host_gpu, tmp_path, group):
    """The kernels' own text, launched from C, run lane by lane on the host harness."""
    options = (GOLDEN, "--group", group, *ON_HOST_GPU[group])
    kernels = kernels_of(engine, host_gpu, tmp_path, "replay", *options)
    assert set(kernels) >= {"attention"} | RUN_BESIDES[group]


@pytest.mark.slow
@over_both
def test_undo_on_a_gpu(engine, host_gpu, tmp_path):
    """Op by op around the attention kernels, on the host harness; no fused step."""
    kernels = kernels_of(engine, host_gpu, tmp_path, "conversations", "gpu")
    assert "attention" in kernels
    assert not set(kernels) & {"overwrite", "update"}


@over_both
def test_launches_are_those_of_python(engine, host_gpu, tmp_path):
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


@pytest.mark.parametrize(
    ("tokens", "heads", "ours"), [(1030, 4, True), (1030, 2, False), (600, 4, False)]
)
def test_grouped_queries_over_many_keys_go_to_our_kernel(
    over_mlx, host_gpu, tmp_path, tokens, heads, ours
):
    """MLX's attention takes two passes over them, which were seen to give garbage (mlx#4022)."""
    told = tmp_path / "launched"
    environment = host_gpu | {"HOST_GPU_RECORD": str(told)}
    done = run(over_mlx / "tests" / "launches", "tokens", tokens, heads, **environment)
    assert done.returncode == 0, done.stderr
    launched = told.read_text() if told.exists() else ""
    assert ("attention_vector" in launched) == ours


PERTURBED = {
    "attention": "float32-4of2-causal-v32-L3/out.out",
    "quantized": "k4v4-g64-none-float32/in.k_w",
    "remainder": "rows-4/out.keys",
    "accumulate": "ema-L6-G1/out.scores",
    "selection": "victims-keydiff-head-3-of-16/out.victims",
    "trajectory": "distinct-uniform-dense/out.kept",
    "framed": "distinct-4bit/out.kept",
    "turns": "tova/out.kept",
    "filling": "tova/out.kept",
    "returning": "tova/out.kept",
}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


@pytest.mark.few(9)
@over_both
@pytest.mark.parametrize("group", PERTURBED)
def test_a_perturbed_golden_vector_fails(engine, copied, group):
    """One number of one array."""
    path = str(copied / f"{group}.safetensors")
    arrays, metadata = mx.load(path, return_metadata=True)
    name = PERTURBED[group]
    if name not in arrays:
        name = next(key for key in arrays if key.startswith(name.partition("-")[0]))
    a_number_more(arrays, name)
    mx.save_safetensors(path, arrays, metadata)
    # Of the conversations, which take seconds, this one alone.
    whole = ("trajectory", "framed", "turns", "filling", "returning")
    one = ("--case", name.partition("/")[0]) if group in whole else ()
    done = replay(engine, copied, "--group", group, *one)
    assert done.returncode == 1, done.stdout + done.stderr
    assert name.partition("/")[0] in done.stderr


@over_both
def test_damaged_golden_files_are_refused(engine, copied):
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
        assert replay_damaged(engine, copied).returncode == 2
    # A parameter that it does not know might change everything: it must not be ignored.
    text(lambda text: text.replace("\nrows ", "\nnovelty 1\nrows ", 1))
    assert replay_damaged(engine, copied).returncode == 1
    text(lambda text: text)
    path = copied / "remainder.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert replay_damaged(engine, copied).returncode == 2
    path.unlink()
    assert replay_damaged(engine, copied).returncode == 2


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


@over_both
def test_the_first_example_bounds_a_layer(engine):
    """The program of which docs/reference/c.md shows lines."""
    program = (ROOT / "c_api" / "examples" / "bound.c").read_text()
    page = (ROOT / "docs" / "reference" / "c.md").read_text()
    shown = page.partition("```c\n")[2].partition("```")[0].splitlines()
    assert [line for line in shown if line not in program and "..." not in line] == []
    told = succeed(engine / "examples" / "bound")
    assert told.endswith("after 799 tokens\n")
    assert int(told.split()[0]) < 2 * 128 * 2 * 64 * 2


@over_both
def test_a_conversation_is_saved(engine, tmp_path):
    """By the example to which c.md points; Python reads its file."""
    path = tmp_path / "conversation.safetensors"
    assert succeed(engine / "examples" / "save", path) == "A letter: the same\n"
    caches, texts = load_prompt_cache(path, return_metadata=True)
    assert texts == {"title": "A letter"}
    assert [cache.offset for cache in caches] == [300, 300]


@over_both
def test_a_prompt_is_compressed(engine):
    """By what is installed alone: sinks and the newest rows stay, rows are in order."""
    lines = succeed(engine / "examples" / "compress").splitlines()
    assert len(lines) == 2
    for line in lines:
        kept = [int(word) for word in line.split("keeps")[1].split()]
        assert len(kept) == 64
        assert kept == sorted(set(kept))
        assert kept[:4] == [0, 1, 2, 3]
        assert kept[-1] == 511


@pytest.mark.slow
def test_it_installs_for_cmake_and_pkg_config(tmp_path):
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
