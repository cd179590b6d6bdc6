"""Golden vectors: they hold the kernels, and damage to them is told."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from covering import STEP
from golden import generate as generating
from golden import manifest
from golden.generate import generate
from golden.groups import GROUPS
from golden.manifest import GoldenError
from golden.margins import margin
from golden.numbers import bell, hashed
from golden.verify import compared, computing_by, main, size_of, verify
from mlx_h2o.attention.backends import choice, reference

GOLDEN = Path(__file__).parents[2] / "golden"
# Groups that are quick to write anew.
QUICK = ("accumulate", "remainder")


@pytest.fixture(scope="module")
def golden() -> manifest.Golden:
    return manifest.read(GOLDEN)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    generate(folder, QUICK)
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    """A folder of our own to damage."""
    for path in written.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_the_files_are_whole_and_small(golden):
    vectors = [
        path for path in GOLDEN.iterdir() if path.suffix in (".safetensors", ".json", ".txt")
    ]
    assert sum(path.stat().st_size for path in vectors) < 10_800_000
    assert {case.group for case in golden.cases} == set(GROUPS)
    for case in golden.cases:
        assert golden.of(case, "out"), case.name


@pytest.mark.slow
def test_the_kernels_reproduce_every_case():
    """Outputs within the tolerances, kept positions exactly."""
    if choice.backend() is reference:
        pytest.fail("The extension is not built: nothing would be tested.")
    for verdict in verify(GOLDEN, ["kernels"]):
        assert not verdict.differences, verdict.differences[0]
        assert verdict.cases


# The reference is slow, and it wrote the vectors: of a group it replays every n-th case, and in a
# quick run half as many.
REFERENCE_STEPS = {
    group: step * (2 if STEP > 1 else 1)
    for group, step in {
        "trajectory": 52, "framed": 52, "model": 3, "turns": 6, "filling": 7, "returning": 12,
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("backend", ["kernels", "reference"])
def test_a_sample_of_each_group_is_reproduced(golden, backend, group):
    """The parameters in the manifest are all that is needed."""
    cases = [case for case in golden.cases if case.group == group]
    step = STEP if backend == "kernels" else REFERENCE_STEPS.get(group, 1)
    with computing_by(backend):
        for case in cases[::step]:
            found = GROUPS[group].run(case.parameters, golden.of(case, "in"))
            differences = compared(found, golden.of(case, "out"), golden.tolerances, size_of(case))[
                1
            ]
            assert differences == [], case.name


def test_the_cases_are_those_that_the_code_describes(golden):
    """A changed case list without new files would leave the files testing something else."""
    for name, group in GROUPS.items():
        described = [(case, {**p, "seed": 0}) for case, p in group.cases()]
        stored = [(c.name, {**c.parameters, "seed": 0}) for c in golden.cases if c.group == name]
        assert described == stored, name


def test_margins_are_recorded_and_large_enough(golden):
    for case in golden.cases:
        if case.group in ("trajectory", "filling", "returning", "model"):
            assert case.margin is not None
        assert case.margin is None or case.margin >= 1e-5


def test_written_twice_they_are_the_same_bytes(written, tmp_path):
    generate(tmp_path, QUICK)
    for path in written.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_groups_that_are_written_later_join_the_others(written, tmp_path):
    """One after the other, in any order, and one anew: as all of them at once."""
    for group in (*QUICK, QUICK[0]):
        generate(tmp_path, [group])
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written.iterdir()}
    for path in written.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name
    (tmp_path / f"{QUICK[1]}.safetensors").write_bytes(b"cut")
    with pytest.raises(GoldenError, match="was cut off or changed"):
        generate(tmp_path, QUICK[:1])  # that would vouch for what is damaged
    generate(tmp_path, QUICK[1:])
    manifest.read(tmp_path)


def test_flat_text_says_what_json_says(golden):
    """Read back as another language would."""
    text = (GOLDEN / "cases.txt").read_text()
    head, *blocks = text.split("\n\n")
    assert head.splitlines()[0] == "mlx-h2o golden 1"
    for block, case in zip(blocks, golden.cases, strict=True):
        first, *lines = block.splitlines()
        assert first == f"case {case.group} {case.name}"
        fields = dict(line.split(" ", 1) if " " in line else (line, "") for line in lines)
        assert fields["seed"] == str(case.parameters["seed"])
        if case.group == "trajectory":
            policy = case.parameters["policy"]
            assert fields["policy.name"] == policy["name"]
            assert float(fields["policy.recent"]) == policy["recent"]
            assert ("." in fields["policy.recent"]) == isinstance(policy["recent"], float)
            flat = [slots for layer in case.parameters["cache"]["budgets"] for slots in layer]
            assert [int(word) for word in fields["cache.budgets"].split()] == flat


# -- damage ---------------------------------------------------------------------------------------


def changed(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def flip(folder: Path) -> None:
    path = folder / "remainder.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def cut(folder: Path) -> None:
    path = folder / "remainder.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "corrupted": (flip, "remainder.safetensors is corrupted"),
    "truncated": (cut, "cut off"),
    "missing": (lambda folder: (folder / "remainder.safetensors").unlink(), "is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "cut manifest": (
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text()[:500]),
        "is damaged",
    ),
    "another schema": (lambda f: changed(f, lambda m: m.update(schema=2)), "has schema 2"),
    "another format": (lambda f: changed(f, lambda m: m.update(format="x")), "is no manifest"),
    "no cases": (lambda f: changed(f, lambda m: m.pop("cases")), "is damaged"),
    "cases that differ": (
        lambda f: changed(f, lambda m: m["cases"][0]["parameters"].update(seed=1)),
        "different cases",
    ),
    "an unlisted file": (
        lambda f: changed(f, lambda m: m["files"].pop("remainder.safetensors")),
        "does not list",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(copied, damage):
    assert not any(verdict.differences for verdict in verify(copied, ["reference"]))
    spoil, message = DAMAGE[damage]
    spoil(copied)
    with pytest.raises(GoldenError, match=message):
        verify(copied)


@pytest.mark.parametrize("group", QUICK)
def test_a_perturbed_result_is_found(copied, group, capsys):
    """Under a correct checksum, each perturbed array is named and the command fails."""
    path = copied / f"{group}.safetensors"
    arrays = mx.load(str(path))
    victim = next(name for name in arrays if "/out." in name)
    arrays[victim] = arrays[victim] + 3e-3
    mx.save_safetensors(str(path), arrays)
    changed(copied, lambda m: m["files"].update({path.name: manifest.digest(path)}))
    assert main(["--out", str(copied), "--backend", "reference"]) == 2
    assert victim.partition("/")[0] in capsys.readouterr().err


def test_comparison():
    """Infinities, NaN, shapes, dtypes, missing arrays; the tolerance is the boundary."""
    tolerances = manifest.TOLERANCES
    inf, nan = math.inf, math.nan

    def differs(a: mx.array, b: mx.array) -> bool:
        return bool(compared({"x": a}, {"x": b}, tolerances)[1])

    golden = mx.array([1.0, -inf, inf, nan, 0.0])
    assert not differs(golden, golden)
    for i, wrong in ((0, 1.1), (1, inf), (1, -1e38), (2, 0.0), (3, 0.0), (4, nan), (0, inf)):
        spoilt = [*golden.tolist()]
        spoilt[i] = wrong
        assert differs(mx.array(spoilt), golden), (i, wrong)
    assert not differs(mx.array([1 + 1.9e-5]), mx.array([1.0]))
    assert differs(mx.array([1 + 2.2e-5]), mx.array([1.0]))
    assert differs(mx.array([1]), mx.array([2]))
    assert differs(mx.array([1]), mx.array([1.0]))
    assert differs(mx.array([1.0]), mx.array([[1.0]]))
    assert compared({}, {"x": golden}, tolerances)[1]
    assert compared({"x": golden}, {}, tolerances)[1]


# -- inputs and margins ---------------------------------------------------------------------------


def test_numbers_are_those_of_the_page():
    assert [hex(x) for x in hashed(0, 2).tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]
    numbers = bell(7, (20000,))
    assert numbers.dtype == np.float32
    parts = sum((int(hashed(7, 1)[0]) >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    assert numbers[0] == (parts - 131070) / 2**15
    assert abs(numbers.mean()) < 0.03
    assert abs(numbers.std() - 1.155) < 0.02


@pytest.mark.parametrize("ordered", [True, False])
def test_margin_is_what_must_change_to_change_the_choice(ordered):
    worth = mx.array([[[5.0, 1.0, 4.0, 1.5, 8.0, 1.75]]])
    evictable = mx.array([[[True, True, True, True, False, True]]])
    # Of 1, 1.5, 1.75, 4, 5 three go: 0.25 decides their order, 2.25 which they are.
    found = margin(worth, evictable, "head", 3, ordered)
    assert found == pytest.approx((0.25 if ordered else 2.25) / 5)
    assert margin(worth, evictable, "head", 5) == math.inf


def test_near_ties_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(generating, "LEAST_MARGIN", 10.0)
    with pytest.raises(GoldenError, match="leaves choices to rounding"):
        generate(tmp_path, ["selection"])


def test_the_reference_alone_computes_where_asked():
    before = choice.backend()
    with choice.only_reference():
        assert choice.backend() is reference
        assert mx.default_device() == mx.Device(mx.cpu)
    assert choice.backend() is before
