"""Damaged files, their digests made right again: refused with a ValueError, or safe to run."""

import subprocess
import sys
from pathlib import Path

import pytest

import gguf_mutants
import mutants
from mlx_h2o import load_prompt_cache, save_prompt_cache


def survived(folder: Path, seed: int, count: int, program: str = mutants.__file__) -> int:
    """How many of `count` mutants could be read and run."""
    done = subprocess.run(
        [sys.executable, program, folder, str(seed), str(count)], capture_output=True, text=True
    )
    last = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, f"{last}\n{done.stderr[-3000:]}"
    return int(last[0].removesuffix(" ran"))


@pytest.mark.parametrize(
    "shape_of",
    [
        lambda shape: [1, -5, 3],
        lambda shape: [10**12, 10**9],
        lambda shape: [-1, *shape, -1],  # as many elements as there are
        lambda shape: [2**32 + shape[0], *shape[1:]],
        lambda shape: [2**32 * shape[0], *shape[1:-1], 0],
    ],
)
def test_a_shape_that_the_file_does_not_hold_is_refused_before_mlx_sees_it(tmp_path, shape_of):
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(path, mutants.families()["others"])
    header, data = mutants.parts_of(path.read_bytes())
    header["1.0.0"]["shape"] = shape_of(header["1.0.0"]["shape"])
    mutants.sign(header, data)
    path.write_bytes(mutants.whole(header, data))
    with pytest.raises(ValueError, match="no readable prompt cache"):
        load_prompt_cache(path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"sink": 4', '"sink": 1000000000000000000'),
        ('"recent": 0.2', '"recent": 1000000000000000000'),
        ('"recent": 0.2', '"recent": 0.9999999999999999'),
        ('"pool": 5', '"pool": 1000000000000000001'),
        ('"length": 16', '"length": 1000000000000000000'),
        ('"allocated": 16', '"allocated": 1000000000000000000'),
        ('"offset": 52', '"offset": 1000000000000000000'),
        ('"victims": 1', '"victims": -1'),
    ],
)
def test_settings_out_of_range_are_refused_though_the_digest_fits(tmp_path, before, after):
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(path, mutants.families()["dense"])
    header, data = mutants.parts_of(path.read_bytes())
    notes = header["__metadata__"]
    assert before in notes["entries"]
    notes["entries"] = notes["entries"].replace(before, after)
    mutants.sign(header, data)
    path.write_bytes(mutants.whole(header, data))
    with pytest.raises(ValueError, match="is damaged"):
        load_prompt_cache(path)


def test_damaged_files_are_refused_or_safe(tmp_path):
    # Some are harmless (a weight, a window); were all refused, nothing would have been run.
    assert 5 < survived(tmp_path, seed=0, count=150) < 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_thousands_of_damaged_files_are_refused_or_safe(tmp_path, seed):
    survived(tmp_path, seed, 2000)


def test_damaged_gguf_files_are_refused_or_safe(tmp_path):
    # As above: a model whose numbers are others is still a model.
    assert 15 < survived(tmp_path, 0, 150, gguf_mutants.__file__) < 75


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_thousands_of_damaged_gguf_files_are_refused_or_safe(tmp_path, seed):
    survived(tmp_path, seed, 1500, gguf_mutants.__file__)
