"""What `make test` leaves out, which target runs it, and that nothing is left out twice."""

import importlib.util
import re
import shutil
import subprocess
import sys
import time
from itertools import combinations, product
from pathlib import Path
from types import ModuleType

import pytest

from covering import cover

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/test_the_rest.py over a folder whose Makefile has targets of another kind."""
    path = ROOT / "tools" / "test_the_rest.py"
    spec = importlib.util.spec_from_file_location("test_the_rest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclass looks its module up.
    monkeypatch.setitem(sys.modules, "test_the_rest", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    (tmp_path / "Makefile").write_text(
        "good:\n\t@echo 3 passed\nbad:\n\t@echo wrong; exit 1\nlong:\n\t@sleep 600\n"
    )
    return module


def test_a_cover_holds_every_pair_that_there_is():
    cases = [
        {"a": str(a), "b": str(b), "c": str(c)}
        for a, b, c in product(range(4), range(3), range(5))
        if (a, b) != (1, 1)
    ]
    chosen = [cases[number] for number in cover(cases)]
    assert len(chosen) <= 24

    def pairs(some: list[dict[str, str]]) -> set[object]:
        return {pair for case in some for pair in combinations(sorted(case.items()), 2)}

    assert pairs(chosen) == pairs(cases)
    assert cover([{"a": "1"}, {"a": "2"}]) == {0, 1}


def test_what_was_touched_last_comes_first(rest):
    commits = [["README.md"], ["swift/Sources/A.swift"], ["metal/a.metal", "python/src/a.cpp"]]
    order = rest.ordered(commits)
    assert order[0] == "test-swift"
    assert {"test-metal", "test-sanitize"} <= set(order[1:5])
    assert sorted(order) == sorted(rest.AREAS)
    assert rest.ordered([]) == list(rest.AREAS)


def test_missing_tools_are_named_once(tmp_path):
    """And are no error: what needs them is skipped."""
    (tmp_path / "bash").symlink_to(shutil.which("bash"))
    ran = subprocess.run(
        [shutil.which("make"), "-s", "missing-tools"], cwd=ROOT, env={"PATH": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line for line in ran.stdout.splitlines() if line.startswith("no ")]
    assert [line.split(":")[0][3:] for line in lines][::2] == ["C++ compiler", "Chromium"]


def test_failures_count_and_what_did_not_finish_is_told(rest, monkeypatch, capsys):
    monkeypatch.setattr(rest, "LEAST_SECONDS", 0.5)
    started = time.monotonic()
    results = rest.run(["good", "bad", "long", "long"], 4)
    assert time.monotonic() - started < 12
    assert results["good"].startswith("passed")
    assert results["good"].endswith("3 passed")
    assert results["bad"].startswith("FAILED")
    assert results["long"].startswith("not finished")
    assert "wrong" in capsys.readouterr().out
    monkeypatch.setattr(rest, "LEAST_SECONDS", 60)
    assert rest.run(["good"], 1) == {"good": "not run: no time was left"}


def test_every_target_of_the_whole_has_an_area_and_a_job(rest):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^ALL := (.*)$", makefile, re.MULTILINE)[1].split())
    assert targets == set(rest.AREAS)
    workflow = (ROOT / ".github" / "workflows" / "linux.yml").read_text()
    assert targets == set(re.findall(r"^ +- (test-[\w-]+)$", workflow, re.MULTILINE))
